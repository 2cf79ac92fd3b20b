import torch
from torch import Tensor

from sparse_cp_ops.reference._fp8 import quantise
from sparse_cp_ops.reference._rope_ import rotate, with_device_nan


def hadamard_transform(x: Tensor) -> Tensor:
    """Walsh-Hadamard transform of the last dimension (a power of two), Sylvester order, strides ascending."""
    size, stride = x.shape[-1], 1
    while stride < size:
        pairs = x.unflatten(-1, (-1, 2, stride))
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        x = torch.stack([a + b, a - b], dim=-2).flatten(-3)
        stride *= 2
    return x * torch.tensor(size**-0.5, dtype=x.dtype)


def transform_qk(x: Tensor, positions: Tensor, cos_sin_cache: Tensor, interleaved: bool, hadamard: bool) -> Tensor:
    """Indexer q or k [L, ..., 128] after RoPE and Hadamard, in the dtype of the table."""
    rope_dim = cos_sin_cache.shape[1]
    rotated = rotate(x[..., :rope_dim], positions, cos_sin_cache, interleaved)
    x = torch.cat([rotated, x[..., rope_dim:].to(rotated.dtype)], dim=-1)
    return hadamard_transform(x) if hadamard else x


def quant_q_k_cp(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    k_records: Tensor,
    interleaved: bool,
    hadamard: bool,
    weight_scale: float,
    scale_format: str,
    q_absmax: float = 448.0,
) -> tuple[Tensor, Tensor]:
    """See :func:`sparse_cp_ops.ops.quant_q_k_cp`."""
    k_values, k_scale = quantise(transform_qk(k, positions, cos_sin_cache, interleaved, hadamard), scale_format)
    k_records.copy_(torch.cat([k_values, k_scale.contiguous().view(torch.uint8)], dim=-1))
    q_fp8, q_scale = quantise(transform_qk(q, positions, cos_sin_cache, interleaved, hadamard), scale_format, q_absmax)
    q_weights = weights.float() * q_scale.squeeze(-1) * torch.tensor(weight_scale, dtype=torch.float32)
    return q_fp8, with_device_nan(q_weights)
