"""Memory that NCCL has registered for the gathers of a group. What travels is up to :mod:`.collectives`."""

from __future__ import annotations

import ctypes
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    import torch.distributed as dist


class RegisteredBuffer:
    """Persistent memory that NCCL has registered, lent to one gather at a time.

    Ranks must not mix registered and plain memory in one collective (NCCL documentation, user buffer registration).
    So what decides is the same on all of them: sizes and the order of calls, never whether an object still lives.
    """

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        self._borrower: int | None = None  # who has the memory
        self._last_stream: torch.cuda.Stream | None = None

    @classmethod
    def register(cls, nbytes: int, device: torch.device, process_group: dist.ProcessGroup) -> RegisteredBuffer:
        """Allocate memory that NCCL's allocator gives and register it with the group's communicator."""
        backend: Any = process_group._get_backend(device)
        with torch.cuda.device(device):  # a pool belongs to the current device
            idle = _idle_pools.setdefault((torch.cuda.current_device(), nbytes), [])
            pool = idle.pop() if idle else _immortal_pool(backend.mem_allocator)
            with torch.cuda.use_mem_pool(pool):
                buffer = cls(torch.empty(nbytes, dtype=torch.uint8, device=device))
            weakref.finalize(buffer, idle.append, pool).atexit = False
            backend.register_mem_pool(pool)
        return buffer

    def take(self, nbytes: int, borrower: int) -> Tensor | None:
        """The first bytes until :meth:`release`, or None if there are not enough or another gather has them."""
        if nbytes > self._memory.shape[0] or self._borrower is not None:
            return None
        self._borrower = borrower
        if self._memory.is_cuda:
            # The last scatter may still run on its stream. A capture must not wait on what is outside of it; there the
            # order of replays is the caller's, as it is for the caches.
            stream = torch.cuda.current_stream(self._memory.device)
            if self._last_stream not in (None, stream) and not torch.cuda.is_current_stream_capturing():
                stream.wait_stream(self._last_stream)
            self._last_stream = stream
        return self._memory[:nbytes]

    def release(self, borrower: int) -> None:
        """If the borrower has the memory, it is done with it or has given up."""
        if self._borrower == borrower:
            self._borrower = None


# Pools of buffers whose group is gone, by device and bytes: the next buffer of that size takes one.
_idle_pools: dict[tuple[int, int], list[Any]] = {}


def _immortal_pool(allocator: Any) -> Any:
    """A memory pool that is never freed.

    Freeing its memory deregisters it with every communicator that it was registered with, destroyed ones included, and
    that ends the process (torch 2.11: "NCCL communicator was aborted", from a destructor). Nothing tells beforehand
    that a group is about to be destroyed.
    """
    pool = torch.cuda.MemPool(allocator)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(pool))
    return pool
