"""Calls that may block for ever, away from the thread that runs the model."""

from __future__ import annotations

import atexit
import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

EXIT_SECONDS = 2.0  # that a call may take to end when the interpreter does

T = TypeVar("T")
_Job = tuple[Callable[[], Any], "Future[Any]"]


class IoThread:
    """Runs calls one after another; who submits one waits for its future as long as it likes.

    A daemon: a call that never returns keeps neither the interpreter nor a closing store from ending.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        thread = threading.Thread(target=_run, args=(self._jobs,), name=name, daemon=True)
        self.stop = weakref.finalize(self, self._jobs.put, None)
        _live.add(self)
        _threads.add(thread)
        thread.start()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Run a call after those before it."""
        future: Future[T] = Future()
        self._jobs.put((call, future))
        return future


def _run(jobs: queue.SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        call, future = job
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
        del job, call, future  # what a call refers to is not kept until the next one


_live: weakref.WeakSet[IoThread] = weakref.WeakSet()
_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


@atexit.register
def _end_threads() -> None:
    """Let threads end before the interpreter does: one that comes back from C++ behind it aborts the process."""
    deadline = time.monotonic() + EXIT_SECONDS
    for live in list(_live):
        live.stop()
    for thread in list(_threads):
        thread.join(max(0.0, deadline - time.monotonic()))
