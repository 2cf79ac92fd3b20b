"""Every op on CUDA at small shapes, each of its kernels at least once: what ``make sanitize`` runs.

Prints one line a call. Torch's caching allocator must be off (PYTORCH_NO_CUDA_MEMORY_CACHING=1), so that the tool sees
every tensor as an allocation of its own.
"""

import argparse
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import attention_cases
import indexer_cases
import torch
from op_samples import sample, with_hostile_ints

from sparse_cp_ops import ops
from sparse_cp_ops._autograd import OP_NAMES
from sparse_cp_ops.cache_store.entry import EntryLayout
from sparse_cp_ops.cache_store.reader import Staging
from sparse_cp_ops.kv_cache import PagedKvCache

Call = tuple[str, Callable[..., Any], tuple[Any, ...]]


def samples() -> Iterator[Call]:
    """The shared samples: every op, few rows and enough rows for the variants that want many."""
    for name in OP_NAMES:
        for count in (1, 10, 37):
            yield f"{name} {count} rows", getattr(torch.ops.sparse_cp_ops, name), sample(name, "cuda", count)
    mla, index, pages, slots, *stores = sample("write_cache_store", "cuda")
    pinned = [store.cpu().pin_memory() for store in stores]
    yield "write_cache_store pinned", ops.write_cache_store, (mla, index, pages, slots, *pinned)
    yield "read_cache_store pinned", ops.read_cache_store, (*pinned, slots, pages, mla, index)


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.uint8, device="cuda")


def cos_sin_cache(dim: int) -> torch.Tensor:
    angles = torch.rand(64, dim // 2, device="cuda")
    return torch.cat([angles.cos(), angles.sin()], 1)


def record_ops() -> Iterator[Call]:
    """The shapes, layouts and alignments at which the record ops change their kernel."""
    for count, heads, rope_dim in ((3, 64, 64), (300, 32, 64), (300, 64, 20), (5000, 32, 64)):
        position = torch.randint(-1, 64, (count,), device="cuda", dtype=torch.int32)
        table = cos_sin_cache(rope_dim)
        q = torch.randn(count, heads, 128, device="cuda").bfloat16()
        k = torch.randn(count, 128, device="cuda").bfloat16()
        weights = torch.randn(count, heads, device="cuda")
        for interleaved, hadamard, scale_format, q_absmax in (
            (False, True, "ue8m0", 448.0),
            (True, True, "fp32", 0.875),
            (False, False, "fp32", 448.0),
        ):
            w = weights if hadamard else weights.bfloat16()
            arguments = (
                q, k, w, position, table, zeros(count, 132), interleaved, hadamard, 0.03, scale_format, q_absmax,
            )  # fmt: skip
            yield f"quant_q_k_cp {count} rows, {heads} heads, {rope_dim=}, {scale_format}", ops.quant_q_k_cp, arguments
        for dtype in (torch.bfloat16, torch.float32):
            x = torch.randn(count, heads, 512 + rope_dim, device="cuda").to(dtype)[..., 512:]
            for interleaved in (False, True):
                for source in (None, torch.randn(count, heads, rope_dim, device="cuda").to(dtype)):
                    yield (
                        f"rope_ {count} rows, {heads} heads, {rope_dim=}, {dtype}, in place: {source is None}",
                        ops.rope_,
                        (x, position, table, interleaved, source),
                    )
    position, table = position[:70], cos_sin_cache(64)
    for offset in (0, 1):  # with 1, rows are not aligned to vectors
        latent = torch.randn(70, 640, device="cuda").bfloat16()[:, offset:]
        for interleaved, scale_format in ((True, "ue8m0"), (False, "fp32")):
            arguments = (
                latent[:, :512], latent[:, 512:576], position, table, zeros(70, 656), interleaved, scale_format,
            )  # fmt: skip
            yield f"pack_mla_kv {offset=}, {scale_format}", ops.pack_mla_kv, arguments


def cache_ops() -> Iterator[Call]:
    """Row counts of write_kv_cache, with and without keys of the indexer, and the same of the store ops."""
    for count in (5, 2100, 33_000):
        pages = -(-count // 64)
        mla, index, mla_cache, index_cache = (
            zeros(count, 656), zeros(count, 132), zeros(pages, 64, 656), zeros(pages, 64 * 132),
        )  # fmt: skip
        slots = torch.randperm(pages * 64)[:count].cuda()
        slots[::7] = int(slots[0])  # rows that meet on a slot
        arguments = (mla, index, None, None, None, mla_cache, index_cache, slots)
        yield f"write_kv_cache {count} rows", ops.write_kv_cache, arguments
        table = torch.randperm(pages, device="cuda").int().unsqueeze(0)
        position = torch.arange(count, device="cuda").int()
        arguments = (mla, None, torch.zeros_like(position), position, table, mla_cache, None)
        yield f"write_kv_cache {count} rows, no indexer", ops.write_kv_cache, arguments
    ids = torch.tensor([3, -1, 7, 99, 0], device="cuda")
    for page_size in (16, 64, 128):
        cache, store = zeros(8, page_size, 656), zeros(9, page_size, 656)
        yield f"write_cache_store {page_size=}", ops.write_cache_store, (cache, None, ids.int(), ids, store, None)
        yield f"read_cache_store {page_size=}", ops.read_cache_store, (store, None, ids, ids.int(), cache, None)


def stored_entries() -> Iterator[Call]:
    """A payload of less than 64 KB and one of more, layers with and without an indexer."""
    for owners in ((True, False, True), (True,) * 40):
        cache = PagedKvCache(len(owners), 8, 16, "cuda", owners)
        staging = Staging(cache, EntryLayout(cache, ""), 6)
        staging.entries.zero_()
        yield f"checksum_entries {len(owners)} layers", staging.check, (1, 4)
        yield f"load_entries {len(owners)} layers", staging.load, (1, [7, 0, 3])


def small_ops() -> Iterator[Call]:
    """States that are merged by vectors and by values, plans of few and of many requests in both splits."""
    for dtype in (torch.bfloat16, torch.float32):
        for parts, count, dim in ((1, 3, 512), (2, 300, 64), (5, 40, 7)):
            outs = torch.randn(parts, count, 16, dim, device="cuda").to(dtype)
            lses = torch.randn(parts, count, 16, device="cuda")
            lses[:, 1] = -torch.inf
            yield (
                f"merge_attention_states {parts} x {count} rows of {dim}, {dtype}",
                ops.merge_attention_states,
                (outs, lses),
            )
    for split in ("zigzag", "interleave"):
        for requests, cp_size in ((1, 1), (40, 3), (1500, 8)):
            request_table = torch.randint(-2, 30, (requests, 2), device="cuda").int()
            new = int(request_table[:, 1].clamp(min=0).sum())
            arguments = (request_table, cp_size - 1, cp_size, split, new // cp_size + 2 * requests + 5, new + 3)
            yield f"expand_cp_plan {requests} requests, {cp_size=}, {split}", ops.expand_cp_plan, arguments


def attention() -> Iterator[Call]:
    """Each tile of heads, equal and unequal scales, one part and several, few rows and many, both precisions."""
    lists = [(0, 300, 125), (1, 90, 65), (-1, 0, 0)]
    for heads in (8, 16, 32, 64, 128):
        for scale_kind in ("ue8m0", "fp32"):
            for count, width in ((3, 512), (70, 128)):
                case = attention_cases.random_case((lists * count)[:count], heads, width, scale_kind=scale_kind)
                slots = case.with_slots().to("cuda")
                case = case.to("cuda")
                for precision in ("high", "fp8"):
                    for batch_invariant in (True, False):
                        yield (
                            f"sparse_mla_fp8_cp {heads} heads, {scale_kind}, {count} rows, {precision}, "
                            f"{batch_invariant=}",
                            ops.sparse_mla_fp8_cp,
                            (*case.tensors, 0.05, precision, batch_invariant),
                        )
                yield (
                    f"sparse_mla_fp8_cp {heads} heads, {scale_kind}, {count} rows, slots",
                    ops.sparse_mla_fp8_cp,
                    (*slots.tensors, 0.05),
                )


def indexer() -> Iterator[Call]:
    """Few rows and many, both precisions, a small workspace, and each width at which the selection changes."""
    portable = os.environ.get("SPARSE_CP_OPS_ARCH") == "portable"
    shapes = {
        "narrow": [(0, 500 + n) for n in range(40)] + [(1, 70), (-1, 0)],
        "few rows of many keys": [(0, 20_000), (1, 17_001), (-1, 0)],
    }
    if not portable:  # which has no path of its own for them
        shapes["many rows of many keys"] = [(0, 16_500 + n % 7) for n in range(1030)]
    for shape, rows in shapes.items():
        for heads, precision in ((8, "fp32"), (64, "fp32"), (32, "f16"), (64, "f16")):
            case = indexer_cases.random_case(rows, heads)
            case = (case.encoded_for_f16() if precision == "f16" else case).to("cuda")
            for workspace in (0,) if shape == "many rows of many keys" else (0, 2**20):
                arguments = (*case.tensors, 256, workspace, precision)
                yield (
                    f"indexer_topk_ragged_cp {shape}, {heads} heads, {precision}, workspace {workspace}",
                    ops.indexer_topk_ragged_cp,
                    arguments,
                )
            if shape != "many rows of many keys":
                arguments = (*case.tensors, 600, precision)
                yield (
                    f"indexer_scores_ragged_cp {shape}, {heads} heads, {precision}",
                    ops.indexer_scores_ragged_cp,
                    arguments,
                )
    for keys in (6_000, 12_000, 40_000, 70_000, 140_000):
        case = indexer_cases.random_case([(0, keys), (1, 900), (-1, 0)], 8).to("cuda")
        yield f"indexer_topk_ragged_cp {keys} keys", ops.indexer_topk_ragged_cp, (*case.tensors, 512, 0)
    case = indexer_cases.random_case([(0, 20_000 - n % 7) for n in range(70)], 8).to("cuda")
    yield "indexer_topk_ragged_cp 70 rows of many keys", ops.indexer_topk_ragged_cp, (*case.tensors, 512, 0)
    if not portable:
        case = indexer_cases.random_case([(0, 700 + n % 7) for n in range(1030)], 8)
        table = torch.nn.functional.pad(case.block_table, (0, 1100 - case.block_table.shape[1]), value=-1)
        case = replace(case, block_table=table).to("cuda")
        yield "indexer_topk_ragged_cp many rows of a wide table", ops.indexer_topk_ragged_cp, (*case.tensors, 256, 0)


def hostile() -> Iterator[Call]:
    """Requests, positions, lengths, pages and slots inside and outside of the tensors, for each kind of kernel."""
    for name in OP_NAMES:
        for count in (10, 37):
            yield f"{name} {count} rows", getattr(torch.ops.sparse_cp_ops, name), sample(name, "cuda", count)
    yield from (call for call in attention() if "fp32" in call[0])
    yield from indexer()


GROUPS = (samples, record_ops, cache_ops, stored_entries, small_ops, attention, indexer)


def all_calls() -> Iterator[Call]:
    """Those of all groups, and the hostile ones."""
    for group in GROUPS:
        yield from group()
    for name, call, arguments in hostile():
        yield f"{name}, hostile", call, with_hostile_ints(arguments)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--match", nargs="+", default=[""], help="only calls whose line contains one of these texts")
    match = parser.parse_args().match
    torch.manual_seed(0)
    calls = 0
    for name, call, arguments in all_calls():
        if any(text in name for text in match):
            print(name, flush=True)
            call(*arguments)
            torch.cuda.synchronize()
            calls += 1
    print(f"{calls} calls")


if __name__ == "__main__":
    main()
