import torch
from torch import Tensor


def rotate(x: Tensor, positions: Tensor, cos_sin_cache: Tensor, interleaved: bool) -> Tensor:
    """RoPE of ``x`` [n, ..., d] in fp32 (fp64 for fp64 arguments), not rounded; NaN where the position has no row."""
    max_positions, dim = cos_sin_cache.shape
    inside = (positions >= 0) & (positions < max_positions)
    table = torch.cat([cos_sin_cache, cos_sin_cache.new_full((1, dim), torch.nan)])
    rows = table[torch.where(inside, positions.long(), max_positions)]
    rows = rows.view(rows.shape[0], *[1] * (x.dim() - 2), dim)
    cos, sin = rows.chunk(2, dim=-1)
    x = x.to(cos_sin_cache.dtype)
    a, b = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    first, second = a * cos - b * sin, b * cos + a * sin
    if interleaved:
        return torch.stack([first, second], dim=-1).flatten(-2)
    return torch.cat([first, second], dim=-1)


def with_device_nan(x: Tensor) -> Tensor:
    """The NaN that the GPU's arithmetic returns in place of every NaN, so that bytes can be compared."""
    bits, pattern = (torch.int16, 0x7FFF) if x.dtype == torch.bfloat16 else (torch.int32, 0x7FFFFFFF)
    return torch.where(x.isnan(), torch.full_like(x, 0, dtype=bits).fill_(pattern).view(x.dtype), x)


def rope_(x: Tensor, positions: Tensor, cos_sin_cache: Tensor, interleaved: bool, source: Tensor | None = None) -> None:
    """See :func:`sparse_cp_ops.ops.rope_`."""
    x.copy_(with_device_nan(rotate(x if source is None else source, positions, cos_sin_cache, interleaved).to(x.dtype)))
