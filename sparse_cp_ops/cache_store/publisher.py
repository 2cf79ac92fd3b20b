"""The way of finished pages out of a forward: sealed and shown by one thread, handed to the backend by another."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from sparse_cp_ops.cache_store.backend_link import BackendLink
from sparse_cp_ops.cache_store.entry import EntryLayout
from sparse_cp_ops.cache_store.host_memory import HostMemory
from sparse_cp_ops.cache_store.io_thread import IoThread
from sparse_cp_ops.cache_store.stats import StoreStats

if TYPE_CHECKING:
    from sparse_cp_ops.cache_store.writer import CacheWriter

logger = logging.getLogger(__name__)


class Publisher:
    """Two threads in a row, so that pages can be read in this process however slowly the backend takes those before.

    The memory of a page is in use until the backend has it or has refused it.

    Attributes:
        writing: keys reserved by writers whose pages are not visible yet; guarded by the memory's lock.
        unfinished: finished writers whose pages are not acknowledged yet.
    """

    def __init__(
        self, memory: HostMemory, layout: EntryLayout, link: BackendLink, stats: StoreStats, batch: int
    ) -> None:
        """Start the threads.

        Args:
            memory: where the pages are.
            layout: of an entry.
            link: where sealed pages go.
            stats: counters of the store.
            batch: pages that are handed to the backend at once.
        """
        self.writing: set[bytes] = set()
        self.unfinished = 0
        self._memory = memory
        self._layout = layout
        self._link = link
        self._stats = stats
        self._batch = batch
        self._stopped = False
        self._sealer, self._sender = IoThread("cache-store-seal"), IoThread("cache-store-send")

    def publish(self, writer: CacheWriter, copied: Any) -> None:
        """Take over a complete writer's pages, whose copies have ended when the CUDA event ``copied`` has passed."""
        with self._memory.lock:  # the thread can't count down before this has counted up
            self._sealer.submit(lambda: self._seal(writer, copied))
            self.unfinished += 1

    def flush(self, timeout: float) -> bool:
        """Wait until nothing is unfinished; False if that takes longer than so many seconds."""
        with self._memory.lock:
            return self._memory.lock.wait_for(lambda: not self.unfinished, timeout)

    def stop(self) -> None:
        """Drop what is not handed to the backend yet."""
        self._stopped = True

    def run_behind(self, call: Callable[[], None]) -> None:
        """Run a call behind everything that was published."""
        self._sealer.submit(lambda: self._sender.submit(call))

    def _seal(self, writer: CacheWriter, copied: Any) -> None:
        """On the sealing thread: show pages as soon as they have arrived, batch after batch, and have them sent."""
        memory, keys, slots = self._memory, writer.keys, writer.slots
        sent = 0
        try:
            while copied is not None and not self._stopped and not copied.query():
                time.sleep(0.0002)  # a tenth of the time in which 50 MB arrive over PCIe
            while sent < len(keys) and not self._stopped:
                batch = list(zip(keys[sent : sent + self._batch], slots[sent : sent + self._batch], strict=True))
                for key, slot in batch:
                    self._layout.seal(memory.bytes_of(slot), key)
                    memory.show(key, slot)
                memory.touch(writer.used)
                with memory.lock:
                    self.writing.difference_update(key for key, _ in batch)
                self._sender.submit(lambda batch=batch: self._send(batch, writer.acknowledged))  # type: ignore[misc]
                sent += len(batch)
        finally:
            if left := len(keys) - sent:
                logger.warning("%d pages are dropped before they were sealed", left)
            with memory.lock:
                self.writing.difference_update(keys[sent:])
                self._stats.failed += left
                memory.release(slots[sent:])
            self._sender.submit(lambda: self._finish(writer))

    def _send(self, batch: Sequence[tuple[bytes, int]], acknowledged: list[bytes]) -> None:
        """On the sending thread: hand sealed pages to the backend; their memory may be used again behind that."""
        stored: list[bytes] = []
        try:
            if not self._stopped:
                stored = self._link.put([(key, self._memory.bytes_of(slot)) for key, slot in batch])
        finally:
            with self._memory.lock:
                acknowledged += stored
                self._stats.stored += len(stored)
                self._stats.failed += len(batch) - len(stored)
                self._memory.release(slot for _, slot in batch)

    def _finish(self, writer: CacheWriter) -> None:
        """On the sending thread, behind the last batch of a writer."""
        try:
            if writer.acknowledged and not self._stopped:
                self._link.touch(writer.used)
        finally:
            with self._memory.lock:
                self.unfinished -= 1
                self._memory.lock.notify_all()
