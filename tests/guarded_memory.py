"""Tensors that lie directly before or behind a page that nobody may touch: an access outside them kills the process."""

import ctypes
import mmap

import torch
from torch import Tensor

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_NO_ACCESS = 0


def guarded(t: Tensor, at_end: bool) -> Tensor:
    """A copy that ends where the last forbidden page begins (``at_end``), or begins where the first one ends."""
    size = t.numel() * t.element_size()
    if size == 0:
        return t
    pages = -(-size // mmap.PAGESIZE)
    memory = mmap.mmap(-1, (pages + 2) * mmap.PAGESIZE)
    start = mmap.PAGESIZE + (pages * mmap.PAGESIZE - size if at_end else 0)
    copy = torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=start).view(t.dtype).view(t.shape)
    copy.copy_(t)
    base = copy.data_ptr() - start
    for page in (base, base + (pages + 1) * mmap.PAGESIZE):
        if _libc.mprotect(page, mmap.PAGESIZE, _NO_ACCESS) != 0:
            raise OSError(ctypes.get_errno(), "mprotect")
    return copy
