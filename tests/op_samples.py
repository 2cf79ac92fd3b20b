"""Small valid arguments of every op, with pads, holes and a prefix, for the tests of what holds for all of them."""

from collections.abc import Callable
from typing import Any

import torch
from builders import num_pages, random_block_table, random_indexer_cache, random_mla_cache

PAGE_SIZE = 16
KV_LENS = [40, 23]  # of two requests
# Just inside and outside of what the samples allow, and far outside.
HOSTILE = [-(2**31), 2**31 - 1, -1, -7, 0, 1, 5, 16, 40, 47, 48, 1000]
HOSTILE_64 = [*HOSTILE, 2**63 - 1, -(2**63), 2**40]


def rows(count: int, device: str, shift: int = 0) -> dict[str, torch.Tensor]:
    """Per-row tensors of ``count`` rows: the last positions of alternating requests, every fifth row a pad.

    Another ``shift`` gives other positions, lengths and pads.
    """
    index = torch.arange(count) + shift
    req_ids = (index % 2).int()
    positions = torch.tensor(KV_LENS)[index % 2].int() - 1 - (index // 2 % 20).int()
    pads = index % 5 == 4
    req_ids[pads], positions[pads] = -1, 0
    kv_lens = torch.where(pads, 0, positions + 1).int()
    return {"req_ids": req_ids.to(device), "positions": positions.to(device), "kv_lens": kv_lens.to(device)}


def sample(name: str, device: str, count: int = 10, shift: int = 0) -> tuple[Any, ...]:
    """Positional arguments of op ``name`` with ``count`` rows; fresh tensors at every call, other lengths per shift."""
    make: dict[str, Callable[[], tuple[Any, ...]]] = {
        "rope_": lambda: (bf16(count, 3, 64), row["positions"], cos_sin, True, bf16(count, 3, 64)),
        "quant_q_k_cp": lambda: (
            bf16(count, 8, 128), bf16(count, 128), torch.randn(count, 8, device=device), row["positions"], cos_sin,
            empty_u8(count, 132), False, True, 0.03, "ue8m0",
        ),
        "pack_mla_kv": lambda: (
            bf16(count, 512), bf16(count, 64), row["positions"], cos_sin, empty_u8(count, 656), True, "ue8m0",
        ),
        "write_kv_cache": lambda: (
            mla_cache.view(-1, 656)[:count].clone(), empty_u8(count, 132).fill_(7), row["req_ids"], row["positions"],
            table, mla_cache, index_cache,
        ),
        "dequantize_kv": lambda: (mla_cache, torch.arange(count, device=device) * 3 - 1),
        "indexer_topk_ragged_cp": lambda: (*indexer_arguments(), 64, 0),
        "indexer_scores_ragged_cp": lambda: (*indexer_arguments(), 48),
        "sparse_mla_fp8_cp": lambda: (
            bf16(count, 8, 576), mla_cache, torch.randint(-3, 50, (count, 64), device=device).int(), table,
            row["req_ids"], row["kv_lens"], 0.05,
        ),
        "attend_new_rows": lambda: (
            bf16(count, 16, 576), bf16(count, 12, 192), bf16(count, 512), bf16(count, 64), bf16(count, 8, 128),
            bf16(count, 128), torch.randn(count, 8, device=device), row["positions"], cos_sin, row["req_ids"],
            row["kv_lens"], table, mla_cache, index_cache, False, 0.03, 448.0, "ue8m0", 64, 0, "fp32", 0.05, "high",
            False,
        ),
        "merge_attention_states": lambda: (
            torch.randn(2, count, 8, 64, device=device), torch.randn(2, count, 8, device=device),
        ),
        "expand_cp_plan": lambda: (
            torch.tensor([[17, count], [shift, 3]], device=device).int(), 0, 2, "zigzag", count + 8, count + 3,
        ),
        "write_cache_store": lambda: (mla_cache, index_cache, pages[:count], slots[:count], mla_store, index_store),
        "read_cache_store": lambda: (mla_store, index_store, slots[:count], pages[:count], mla_cache, index_cache),
    }  # fmt: skip

    def bf16(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device).bfloat16()

    def empty_u8(*shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=torch.uint8, device=device)

    def indexer_arguments() -> tuple[Any, ...]:
        q8 = torch.randn(count, 8, 128).to(torch.float8_e4m3fn).view(torch.uint8).to(device)
        weights = torch.randn(count, 8, device=device)
        return (q8, weights, index_cache, table, row["req_ids"], row["kv_lens"])

    row = rows(count, device, shift)
    total = num_pages(KV_LENS, PAGE_SIZE)
    table = random_block_table(KV_LENS, PAGE_SIZE).to(device)
    mla_cache = random_mla_cache(total, PAGE_SIZE).to(device)
    index_cache = random_indexer_cache(total, PAGE_SIZE).to(device)
    mla_store, index_store = torch.zeros_like(mla_cache), torch.zeros_like(index_cache)
    pages = torch.randperm(total).int().to(device)
    slots = torch.randperm(total).to(device)
    angles = torch.arange(64).unsqueeze(1) * 100.0 ** (-torch.arange(0, 64, 2) / 64)
    cos_sin = torch.cat([angles.cos(), angles.sin()], 1).to(device)
    return make[name]()


def tensors(value: Any) -> list[torch.Tensor]:
    """The tensors among the arguments or results."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [item for item in value if isinstance(item, torch.Tensor)] if isinstance(value, (tuple, list)) else []


def with_hostile_ints(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """About a third of all entries of integer tensors replaced: requests, positions, lengths, pages, slots."""

    def change(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.dtype not in (torch.int32, torch.int64):
            return value
        pool = torch.tensor(HOSTILE_64 if value.dtype == torch.int64 else HOSTILE).to(value)
        picks = pool[torch.randint(0, len(pool), value.shape, device=value.device)]
        return torch.where(torch.rand(value.shape, device=value.device) < 0.3, picks, value)

    return tuple(change(value) for value in args)
