"""Random inputs of the standard shapes, made on the device."""

import torch
from torch import Tensor

PAGE_SIZE = 64


def e4m3(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """uint8 bytes of standard normal e4m3fn values."""
    return torch.randn(shape, device=device).to(torch.float8_e4m3fn).view(torch.uint8)


def mla_cache(tokens: int, device: torch.device, any_scales: bool = False) -> tuple[Tensor, Tensor]:
    """Records uint8 [tokens/64, 64, 656] and their values bf16 [tokens, 576]; scales 0.5, or any from 0.5 to 1."""
    values = e4m3((tokens, 512), device)
    scales = torch.full((tokens, 4), 0.5, device=device)
    if any_scales:
        scales *= 1 + torch.rand_like(scales)
    rope = torch.randn(tokens, 64, device=device).bfloat16()
    cache = torch.cat([values, scales.view(torch.uint8), rope.view(torch.uint8)], 1)
    latent = values.view(torch.float8_e4m3fn).float() * scales.repeat_interleave(128, 1)
    kv = torch.cat([latent, rope.float()], 1).bfloat16()
    return cache.view(tokens // PAGE_SIZE, PAGE_SIZE, 656), kv


def indexer_cache(tokens: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Pages uint8 [tokens/64, 64*132], and the same keys unpaged: uint8 [tokens, 128] and scales f32 [tokens]."""
    keys = e4m3((tokens, 128), device)
    scales = torch.rand(tokens, device=device) + 0.5
    pages = tokens // PAGE_SIZE
    cache = torch.cat([keys.view(pages, -1), scales.view(pages, PAGE_SIZE).view(torch.uint8)], 1)
    return cache, keys, scales


def make_keys_alike(cache: Tensor, slots: Tensor, scores: str) -> None:
    """Give all keys the same values; in the order of ``slots`` [tokens], scores are "equal", "rising" or "falling"."""
    tokens = len(slots)
    cache[:, : PAGE_SIZE * 128] = cache[0, :128].repeat(PAGE_SIZE)
    scales = torch.arange(1, tokens + 1, device=cache.device, dtype=torch.float32)
    scales = {"equal": torch.ones_like(scales), "rising": scales, "falling": scales.flip(0)}[scores]
    by_slot = torch.empty_like(scales)
    by_slot[slots] = scales
    cache[:, PAGE_SIZE * 128 :] = by_slot.view(-1, PAGE_SIZE).view(torch.uint8)


def selected_positions(rows: int, tokens: int, topk: int, device: torch.device, overlapping: bool = False) -> Tensor:
    """int32 [rows, topk]: random positions a row, ascending; overlapping: 64 neighbours share 15 of 16 keys."""
    if not overlapping:
        distinct = min(rows, 256)
        picks = [torch.randperm(tokens, device=device)[:topk].sort().values for _ in range(distinct)]
        return torch.stack(picks).repeat(-(-rows // distinct), 1)[:rows].int().contiguous()
    out = torch.empty(rows, topk, dtype=torch.int32, device=device)
    shared = topk - topk // 16
    for start in range(0, rows, 64):
        order = torch.randperm(tokens, device=device)
        for row in range(start, min(start + 64, rows)):
            own = order[shared:][torch.randperm(tokens - shared, device=device)[: topk - shared]]
            out[row] = torch.cat([order[:shared], own]).sort().values
    return out


def batch(requests: int, rows: int, tokens: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Requests of ``tokens`` tokens each, pages in random order.

    block_table [requests, pages], and of the last ``rows`` tokens of each: req_ids and causal kv_lens [requests*rows].
    """
    block_table = torch.randperm(requests * tokens // PAGE_SIZE, device=device).int().view(requests, -1)
    req_ids = torch.arange(requests, dtype=torch.int32, device=device).repeat_interleave(rows)
    kv_lens = (torch.arange(rows, device=device) + tokens - rows + 1).int().repeat(requests)
    return block_table, req_ids, kv_lens


def cos_sin_cache(positions: int, device: torch.device) -> Tensor:
    """f32 [positions, 64] of plain RoPE with base 10,000."""
    frequencies = 10000.0 ** (-torch.arange(0, 64, 2, device=device) / 64)
    angles = torch.arange(positions, device=device).unsqueeze(1) * frequencies
    return torch.cat([angles.cos(), angles.sin()], 1).float()
