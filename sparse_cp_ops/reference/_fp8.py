"""FP8 tiles: how every writer chooses scales and bytes."""

import torch
from torch import Tensor


def quantise(x: Tensor, scale_format: str, absmax: float = 448.0) -> tuple[Tensor, Tensor]:
    """Tiles [..., n] of fp32 values to uint8 e4m3fn bytes of that shape and fp32 scales [..., 1]."""
    amax = x.abs().amax(-1, keepdim=True)
    exact = amax.clamp(min=1e-4) / torch.tensor(absmax, dtype=torch.float32)
    scale = exact
    if scale_format == "ue8m0":
        mantissa, exponent = torch.frexp(exact)  # exact = mantissa * 2^exponent with mantissa in [0.5, 1)
        scale = torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).int())
    good = exact.isfinite() & scale.isfinite()
    scale = torch.where(good, scale, torch.ones_like(scale))
    values = (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(good, values, torch.full_like(values, 0x7F)), scale
