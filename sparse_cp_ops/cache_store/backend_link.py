"""A store's way to its backend: calls with a deadline, and a pause after a failure."""

from __future__ import annotations

import concurrent.futures
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from sparse_cp_ops.cache_store.backend import Backend
from sparse_cp_ops.cache_store.io_thread import IoThread
from sparse_cp_ops.cache_store.stats import StoreStats

logger = logging.getLogger(__name__)
T = TypeVar("T")

# A backend that failed is left alone for so long; every request meanwhile recomputes without waiting for it.
RETRY_SECONDS = 5.0


class BackendLink:
    """Asks a backend, or stands for none: then nothing is found, and what is put counts as stored.

    Attributes:
        timeout: seconds that a question may take, if it is asked without a deadline.
    """

    def __init__(self, backend: Backend | None, timeout: float, stats: StoreStats, lock: threading.Condition) -> None:
        """Start the thread that asks.

        Args:
            backend: where entries go to and come from; None = nowhere.
            timeout: seconds that a question may take.
            stats: counters of the store.
            lock: guards the counters.
        """
        self.timeout = timeout
        self._backend = backend
        self._stats = stats
        self._lock = lock
        self._down_until = 0.0
        self._receiver = IoThread("cache-store-receive")

    @property
    def usable(self) -> bool:
        """Whether there is a backend and it is not left alone."""
        return self._backend is not None and time.monotonic() >= self._down_until

    def ask(
        self,
        question: Callable[[Backend], T],
        deadline: float | None = None,
        abandoned: Callable[[], None] = lambda: None,
    ) -> T | None:
        """The answer; None if the backend fails, is late, or is left alone for now.

        Args:
            question: called on the receiving thread.
            deadline: by ``time.monotonic()``; None = after the timeout.
            abandoned: called if nobody gets the answer, once nothing works on the question any more.
        """
        backend, future, answered = self._backend, None, False
        try:
            if backend is not None and self.usable:
                deadline = time.monotonic() + self.timeout if deadline is None else deadline
                future = self._receiver.submit(lambda: question(backend))
                answer = future.result(max(0.0, deadline - time.monotonic()))
                answered = True
                return answer
        except concurrent.futures.TimeoutError:
            self._leave_alone("it has not answered in time")
        except Exception as error:  # also what a client library lets through: it is a miss
            self._leave_alone(str(error) or repr(error))
        finally:
            if future is None:
                abandoned()
            elif not answered:
                future.cancel()
                future.add_done_callback(lambda _: abandoned())
        return None

    def put(self, entries: Sequence[tuple[bytes, memoryview]]) -> list[bytes]:
        """The keys that the backend has acknowledged; it takes as long as it takes."""
        if self._backend is None:
            return [key for key, _ in entries]
        if not self.usable:
            return []
        try:
            results = self._backend.put(entries)
        except Exception as error:  # also what a client library lets through
            self._leave_alone(f"{len(entries)} pages are not stored there ({str(error) or repr(error)})")
            return []
        refused = results.count(False)
        if refused:
            logger.warning("the backend has refused %d of %d pages", refused, len(entries))
        return [key for (key, _), stored in zip(entries, results, strict=True) if stored]

    def touch(self, keys: Sequence[bytes]) -> None:
        """Entries were used now; on the calling thread."""
        if self._backend is not None:
            self._backend.touch(keys)

    def touch_later(self, keys: Sequence[bytes]) -> None:
        """Entries were used now; on the receiving thread."""
        self._receiver.submit(lambda: self.touch(keys))

    def close_behind(self, behind: Callable[[Callable[[], None]], None]) -> threading.Event:
        """Close the backend behind all calls that still run, however late they end.

        Args:
            behind: runs what it is given behind everything that puts.

        Returns:
            Set when the backend is closed.
        """
        backend, closed = self._backend, threading.Event()

        def close() -> None:
            try:
                if backend is not None:
                    backend.close()
            finally:
                closed.set()

        self._receiver.submit(lambda: behind(close))
        return closed

    def _leave_alone(self, reason: str) -> None:
        with self._lock:
            self._stats.backend_errors += 1
        self._down_until = time.monotonic() + RETRY_SECONDS
        logger.warning("miss: the store's backend is left alone for %.0f s: %s", RETRY_SECONDS, reason)
