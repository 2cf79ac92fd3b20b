import torch
from torch import Tensor

from sparse_cp_ops.reference._rope_ import with_device_nan


def dequantize_kv(kv_cache: Tensor, slots: Tensor) -> Tensor:
    """See :func:`sparse_cp_ops.ops.dequantize_kv`."""
    num_pages, page_size, _ = kv_cache.shape
    out = torch.zeros(slots.shape[0], 576, dtype=torch.bfloat16, device=kv_cache.device)
    inside = (slots >= 0) & (slots < num_pages * page_size)
    records = kv_cache[slots[inside] // page_size, slots[inside] % page_size]
    values = records[:, :512].view(torch.float8_e4m3fn).float().unflatten(-1, (4, 128))
    scales = records[:, 512:528].contiguous().view(torch.float32).unsqueeze(-1)
    out[inside, :512] = with_device_nan((values * scales).flatten(1).bfloat16())
    out[inside, 512:] = records[:, 528:].contiguous().view(torch.bfloat16)
    return out
