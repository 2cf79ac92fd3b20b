"""Streams beside the current one, for parts of the layer that need not wait for each other."""

from __future__ import annotations

import functools
from types import TracebackType

import torch
from torch import Tensor


class SideStream:
    """A stream beside the current one while a CUDA graph of a decode step is captured, else the current one itself.

    Kernels of few rows leave most of the device idle, and a graph runs its branches at once. Eager steps are bound by
    the host, for which more streams are more work; many rows fill the device.

    ``with side:`` puts work there. What it reads has to be there before :meth:`follow`; what it has written is there
    for the current stream behind :meth:`join`. The last join comes before any tensor that both streams use is given up,
    and memory that a stream gives up goes to later work of that stream, which has to follow first.
    """

    def __init__(self, like: Tensor, is_prefill: bool, number: int) -> None:
        """Choose the stream.

        Args:
            like: a tensor on the device of the forward.
            is_prefill: of the forward's plan.
            number: which of the streams beside the current one, from 0 on.
        """
        self._side: torch.cuda.Stream | None = None
        if runs_side_streams(like, is_prefill):
            self._main = torch.cuda.current_stream(like.device)
            self._side = _side_of(self._main, number)
            self._context = torch.cuda.stream(self._side)

    def __enter__(self) -> None:
        if self._side is not None:
            self._context.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._side is not None:
            self._context.__exit__(kind, error, trace)

    def follow(self) -> None:
        """What comes to this stream from now on waits for all that the current one has."""
        if self._side is not None:
            self._side.wait_stream(self._main)

    def join(self) -> None:
        """What comes to the current stream from now on waits for all that this one has."""
        if self._side is not None:
            self._main.wait_stream(self._side)


def runs_side_streams(like: Tensor, is_prefill: bool) -> bool:
    """Whether a CUDA graph of a decode step is being captured by what runs eagerly, on the device of ``like``."""
    if is_prefill or torch.compiler.is_compiling() or not like.is_cuda:
        return False
    return torch.cuda.is_current_stream_capturing()


@functools.cache
def _side_of(main: torch.cuda.Stream, number: int) -> torch.cuda.Stream:
    """Its own for each stream, so that captures of two threads do not meet on it."""
    return torch.cuda.Stream(main.device)
