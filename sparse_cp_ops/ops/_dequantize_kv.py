import torch
from torch import Tensor

from sparse_cp_ops.ops import direct
from sparse_cp_ops.ops._fake import register_fake
from sparse_cp_ops.ops._types import require_tensors


def dequantize_kv(kv_cache: Tensor, slots: Tensor) -> Tensor:
    """Read any slots of an MLA cache as bf16: for fallbacks and debugging.

    Columns 0-511 are ``e4m3 * scale`` in fp32, rounded to bf16; columns 512-575 are the RoPE part, bit for bit.
    A slot outside the cache gives a zero row.

    Args:
        kv_cache: [num_pages, page_size, 656] uint8, page_size 16, 32, 64 or 128; page stride free.
        slots: [n] int64, contiguous.

    Returns:
        [n, 576] bfloat16.

    Raises:
        TypeError: an argument is not a tensor.
        ValueError: dtype, device, shape or stride does not fit; with SPARSE_CP_OPS_CHECK=1 also a slot other than -1
            outside the cache.
        RuntimeError: an argument requires grad in grad mode.
    """
    require_tensors("dequantize_kv", kv_cache=kv_cache, slots=slots)
    out: Tensor = direct.dequantize_kv(kv_cache, slots)
    return out


@register_fake("dequantize_kv")
def _fake(kv_cache: Tensor, slots: Tensor) -> Tensor:
    return kv_cache.new_empty((slots.shape[0], 576), dtype=torch.bfloat16)
