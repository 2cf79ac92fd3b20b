"""Random paged caches made byte by byte, independent of the package's own writers."""

import torch
from torch import Tensor

MLA_BYTES = 656
INDEX_DIM = 128


def random_e4m3(shape: tuple[int, ...], generator: torch.Generator | None = None) -> Tensor:
    """uint8 bytes of standard normal values times 100 as e4m3fn: every magnitude, no NaN."""
    values = torch.randn(shape, generator=generator) * 100
    return values.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)


def random_scales(shape: tuple[int, ...], kind: str) -> Tensor:
    """fp32 scales: 'ue8m0' powers of two, 'fp32' arbitrary, 'wild' with ratios up to 2^24, 'tiny' FLT_MIN.

    'static': one number for all, no power of two, as a fixed per-tensor scale has it.
    """
    if kind == "ue8m0":
        return torch.exp2(torch.randint(-9, -5, shape).float())
    if kind == "fp32":
        return torch.rand(shape) * 0.02 + 0.001
    if kind == "wild":
        return torch.exp2(torch.rand(shape) * 24 - 30)
    if kind == "tiny":
        return torch.full(shape, torch.finfo(torch.float32).tiny)
    if kind == "static":
        return torch.full(shape, 0.0123)
    raise ValueError(kind)


def random_block_table(kv_lens: list[int], page_size: int, spare_pages: int = 3, width: int | None = None) -> Tensor:
    """int32 [B, width]: the pages of all requests in one random permutation, -1 behind the last page."""
    counts = [-(-n // page_size) for n in kv_lens]
    permutation = torch.randperm(sum(counts) + spare_pages, dtype=torch.int32)
    table = torch.full((len(kv_lens), max([width or 0, 1, *counts])), -1, dtype=torch.int32)
    start = 0
    for row, count in enumerate(counts):
        table[row, :count] = permutation[start : start + count]
        start += count
    return table


def num_pages(kv_lens: list[int], page_size: int, spare_pages: int = 3) -> int:
    return sum(-(-n // page_size) for n in kv_lens) + spare_pages


def random_mla_cache(pages: int, page_size: int, scale_kind: str = "ue8m0") -> Tensor:
    """uint8 [pages, page_size, 656] with random values, scales and bf16 RoPE parts."""
    values = random_e4m3((pages, page_size, 512))
    scales = random_scales((pages, page_size, 4), scale_kind).view(torch.uint8)
    rope = torch.randn(pages, page_size, 64).bfloat16().view(torch.uint8)
    return torch.cat([values, scales, rope], dim=-1).contiguous()


def random_indexer_cache(pages: int, page_size: int, scale_kind: str = "ue8m0") -> Tensor:
    """uint8 [pages, page_size * 132]: all values of a page, then all its scales."""
    values = random_e4m3((pages, page_size * INDEX_DIM))
    scales = random_scales((pages, page_size), scale_kind).view(torch.uint8)
    return torch.cat([values, scales], dim=-1).contiguous()


def far_apart(pages: Tensor, device: str) -> Tensor:
    """The same pages so far apart that the offset of the last one needs 64 bits.

    Memory that is not touched stays virtual on the CPU.
    """
    stride = (2**31 // (len(pages) - 1) // 4096 + 1) * 4096
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        memory = torch.empty((len(pages) - 1) * stride + pages[0].numel(), dtype=torch.uint8, device=device)
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = fill
    far = memory.as_strided(pages.shape, (stride, *pages.stride()[1:]))
    far.copy_(pages)
    return far


def slots_of(block_table: Tensor, request: int, length: int, page_size: int) -> Tensor:
    """int64 [length]: physical slot of every token of a request."""
    positions = torch.arange(length)
    return block_table[request].long()[positions // page_size] * page_size + positions % page_size
