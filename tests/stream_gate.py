"""A gate in a stream that the test itself opens: a delay would be over too early on a loaded machine."""

import ctypes
import threading
from types import TracebackType
from typing import Self

import torch

# A call that waits for the device would wait for ever: after this time the gate opens by itself, and the test fails.
LONGEST_SECONDS = 30.0
GREATER_OR_EQUAL = 0  # CU_STREAM_WAIT_VALUE_GEQ


class StreamGate:
    """``with StreamGate(stream) as gate``: what is enqueued on the stream inside runs after ``gate.open()``, at the
    latest after the block."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._flag = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._timer = threading.Timer(LONGEST_SECONDS, self.open)
        self._timer.daemon = True

    @property
    def is_closed(self) -> bool:
        return self._flag.item() == 0

    def open(self) -> None:
        self._flag.fill_(1)

    def __enter__(self) -> Self:
        wait = ctypes.CDLL("libcuda.so.1").cuStreamWaitValue32_v2
        wait.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint)
        error = wait(self._stream.cuda_stream, self._flag.data_ptr(), 1, GREATER_OR_EQUAL)
        assert error == 0, f"cuStreamWaitValue32: CUDA driver error {error}"
        self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        self.open()
        self._stream.synchronize()  # the flag may go
