import torch
from torch import Tensor

from sparse_cp_ops.reference._fp8 import quantise
from sparse_cp_ops.reference._rope_ import rotate, with_device_nan


def pack_mla_kv(
    compressed_kv: Tensor,
    k_pe: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    records: Tensor,
    interleaved: bool,
    scale_format: str,
) -> None:
    """See :func:`sparse_cp_ops.ops.pack_mla_kv`."""
    values, scales = quantise(compressed_kv.float().unflatten(-1, (4, 128)), scale_format)
    rope = with_device_nan(rotate(k_pe, positions, cos_sin_cache, interleaved).bfloat16())
    parts = [values.flatten(-2), scales.flatten(-2).view(torch.uint8), rope.view(torch.uint8)]
    records.copy_(torch.cat(parts, dim=-1))
