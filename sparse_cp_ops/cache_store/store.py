"""Pages beyond the device: bytes by content key, in host memory and, behind it, in files or in a distributed engine.

An entry is one page of all layers and both caches. It becomes visible when all of its bytes are there and sealed with
a checksum; whatever is incomplete, damaged, of another model or out of reach is a miss with a line in the log.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import logging
import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from sparse_cp_ops.cache_store.backend import Backend, StoreUrl, open_backend
from sparse_cp_ops.cache_store.backend_link import BackendLink
from sparse_cp_ops.cache_store.entry import EntryLayout, require_keys
from sparse_cp_ops.cache_store.host_memory import HostMemory, Lease
from sparse_cp_ops.cache_store.prefix_cache import Tokens, page_keys
from sparse_cp_ops.cache_store.publisher import Publisher
from sparse_cp_ops.cache_store.reader import CacheReader, StagedReader, Staging
from sparse_cp_ops.cache_store.stats import StoreStats
from sparse_cp_ops.cache_store.writer import CacheWriter
from sparse_cp_ops.kv_cache import PagedKvCache
from sparse_cp_ops.ops._types import require_ints, require_seconds

logger = logging.getLogger(__name__)

# Entries that are moved or handed to a backend at once: 49 MB of a 61-layer model, 0.9 ms over PCIe 5, longer than it
# takes the host to start and to check them.
BATCH = 16
# Beside caches on the CPU: a checksum runs at 5 to 9 GB/s on one thread and cold memory, copies on all cores faster.
CHECKING_THREADS = 16

# Memory that a copy may still write to when its store had to close: freeing it would be worse than keeping it.
_abandoned: list[HostMemory] = []


class CacheStore:
    """A byte budget of host memory (pinned beside CUDA caches), with or without a backend behind it.

    Pages are copied on the store's own stream, sealed and shown by one thread and handed to the backend by another; a
    page leaves the memory, the least recently used first, only when the backend has it or has refused it. What finds no
    room is not stored.
    Reads look into the memory, then into the backend. One thread at a time may use a store.

    Attributes:
        cache: the caches whose pages are stored.
        layout: of an entry.
        fingerprint: of layout and model; the seed of all keys.
        memory: the host memory.
        shared: whether other processes see what is stored here.
        stats: counters.
        checkers: threads that check entries, beside caches on the CPU.
    """

    def __init__(
        self,
        cache: PagedKvCache,
        budget_bytes: int,
        model: str = "",
        backend: Backend | None = None,
        *,
        timeout: float = 10.0,
        patience: float = 0.0,
    ) -> None:
        """Allocate the memory. :meth:`open` does this from a URL.

        Args:
            cache: the caches whose pages are stored.
            budget_bytes: host memory to use, at least one page of all layers and its header.
            model: what the bytes depend on besides the layout, see :meth:`PagedKvCache.layout_fingerprint`.
            backend: where entries go to and come from; None = they stay in this memory.
            timeout: seconds that a look-up or a read waits for the backend; then it is a miss.
            patience: seconds that a writer waits for room that is being made; then it stores fewer pages.

        Raises:
            TypeError: an argument of the wrong type.
            ValueError: the budget is below one page, or a time is negative or too long to wait.
        """
        if not isinstance(cache, PagedKvCache):
            raise TypeError(f"CacheStore: cache: expected a PagedKvCache, got {type(cache).__name__}")
        _require_model("CacheStore", model)
        require_ints("CacheStore", budget_bytes=budget_bytes)
        require_seconds("CacheStore", timeout=timeout, patience=patience)
        self.cache = cache
        self.layout = EntryLayout(cache, model)
        self.fingerprint = self.layout.fingerprint
        self.shared = backend is not None
        self.stats = StoreStats()
        num_slots = budget_bytes // self.layout.entry_bytes
        if num_slots < 1:
            raise ValueError(
                f"CacheStore: budget_bytes: expected at least {self.layout.entry_bytes} (a page of all layers), "
                f"got {budget_bytes}"
            )
        cuda = cache.device.type == "cuda"
        self.memory = HostMemory(num_slots, self.layout, pinned=cuda)
        self._batch = max(1, min(BATCH, num_slots // 2))
        self._staging = Staging(cache, self.layout, 2 * self._batch) if cuda else None
        self._stream = torch.cuda.Stream(cache.device) if cuda else None
        self._patience = patience
        self._given_up: deque[tuple[Any, Sequence[bytes], Sequence[int]]] = deque()
        self._closed = False
        # The allocator keeps in mind that this stream uses the memory, and gives it to nobody before it has.
        self.keep_until_copied(*cache.mla, *cache.indexer, None if self._staging is None else self._staging.entries)
        self._link = BackendLink(backend, timeout, self.stats, self.memory.lock)
        self._publisher = Publisher(self.memory, self.layout, self._link, self.stats, BATCH)
        threads = min(CHECKING_THREADS, os.cpu_count() or 1)
        self.checkers = concurrent.futures.ThreadPoolExecutor(threads, "cache-store-check")

    @classmethod
    def open(
        cls, url: str, cache: PagedKvCache, model: str = "", *, timeout: float = 10.0, patience: float = 0.0
    ) -> CacheStore:
        """The store of a URL (docs/cache_store.md has all options).

        ``memory://?memory=4GiB`` stays in this process. ``file:///folder?disk=100GiB&memory=1GiB`` is a folder that
        processes share. ``mooncake://master:port?metadata=http://host:port/metadata&memory=1GiB`` is a cluster.

        Raises:
            TypeError: an argument of the wrong type.
            ValueError: a URL that is not understood, or a budget that is too small.
            ImportError: Mooncake's package is not installed.
            OSError: the folder can't be made or used.
        """
        parts = StoreUrl.parse(url)
        if not isinstance(cache, PagedKvCache):
            raise TypeError(f"CacheStore.open: cache: expected a PagedKvCache, got {type(cache).__name__}")
        _require_model("CacheStore.open", model)
        backend = open_backend(parts, EntryLayout(cache, model).entry_bytes)
        return cls(cache, parts.size("memory", "1GiB"), model, backend, timeout=timeout, patience=patience)

    def page_keys(self, tokens: Tokens) -> list[bytes]:
        """Keys of the full pages of a token sequence."""
        return page_keys(tokens, self.cache.page_size, self.fingerprint)

    def match(self, keys: Sequence[bytes]) -> int:
        """How many of the keys, from the first on, are visible; a read may still find fewer."""
        self._require_open("match")
        require_keys("CacheStore.match", keys)
        with self.memory.lock:
            here = [key in self.memory for key in keys]
        elsewhere = [key for key, found in zip(keys, here, strict=True) if not found]
        if elsewhere:
            present = self._link.ask(lambda backend: backend.present(elsewhere))
            there = iter([False] * len(elsewhere) if present is None else present)
            here = [found or next(there) for found in here]
        return [*here, False].index(False)

    def read(self, keys: Sequence[bytes], pages: Sequence[int]) -> int:
        """Copy stored pages, both caches of all layers, to device pages, on the store's stream.

        The current stream goes on behind the copies. It stops at the first key that is not visible, not in time, or
        whose bytes are not those that were sealed. While pages are copied, the next ones are fetched and checked.
        Beside CUDA caches this call returns when the last ones have arrived on the device and are checked.

        Args:
            keys: of a request's pages, from the first on.
            pages: where to, at least as many; those behind the result keep what they held.

        Returns:
            How many pages were restored.

        Raises:
            TypeError, ValueError: something that is no key or no page, too few pages, or a key or page twice.
            RuntimeError: the store is closed.
        """
        self._require_open("read")
        require_keys("CacheStore.read", keys)
        if len(set(keys)) < len(keys):
            raise ValueError("CacheStore.read: keys: expected different keys")
        pages = self.cache.require_pages("CacheStore.read", pages)
        if len(pages) < len(keys):
            raise ValueError(f"CacheStore.read: pages: expected at least {len(keys)}, got {len(pages)}")
        if len(set(pages)) < len(pages):
            raise ValueError(f"CacheStore.read: pages: expected different pages, got {pages}")
        if not keys:
            return 0
        deadline = time.monotonic() + self._link.timeout
        batch, restored, received_pages = self._batch, 0, False
        with Lease(self.memory) as lease:
            reader = self._reader(keys, pages[: len(keys)])
            reader.fetch(held := lease.find(keys[:batch]))
            while restored < len(keys):
                wanted = keys[restored : restored + batch]
                missing = [key for key in wanted if key not in held]
                if received := self._receive(missing, deadline, lease) if missing else {}:
                    reader.fetch(received)
                received_pages = received_pages or bool(received)
                # Behind the receiving, which needs the room more.
                reader.fetch(ahead := lease.find(keys[restored + batch : restored + 2 * batch]))
                slots = self._take_good(reader, wanted, held, received, deadline, lease)
                if slots:
                    lease.release_after(reader.load(restored, slots), slots)
                restored += len(slots)
                held = ahead
                if len(slots) < len(wanted):
                    break
        if restored:
            self.memory.touch(used := list(keys[:restored]))
            if received_pages:  # so the backend's thread is not stuck in a call
                self._link.touch_later(used)
        return restored

    def writer(
        self, keys: Sequence[bytes], pages: Sequence[int], used: Sequence[bytes] | None = None
    ) -> CacheWriter | None:
        """Reserve room for the pages that are not here yet, and return what copies them; None if there are none.

        The least recently used entries make room. Of more pages than fit, the first ones are stored.

        Args:
            keys: of pages that the running forward completes.
            pages: their device pages.
            used: keys of all pages of the requests, in order, those of their prefixes too: what is stored leaves before
                what stands in front of it. None = ``keys``.

        Raises:
            TypeError, ValueError: something that is no key or no page, or another number of pages than of keys.
            RuntimeError: the store is closed.
        """
        self._require_open("writer")
        require_keys("CacheStore.writer", keys)
        used = keys if used is None else used
        pages = self.cache.require_pages("CacheStore.writer", pages)
        if len(keys) != len(pages):
            raise ValueError(f"CacheStore.writer: pages: expected {len(keys)} as keys, got {len(pages)}")
        self._take_back()
        writing = self._publisher.writing
        with self.memory.lock:
            known = writing.union(key for key in keys if key in self.memory)
            self.memory.touch(used)
        wanted = {key: page for key, page in zip(keys, pages, strict=True) if key not in known}
        with Lease(self.memory) as lease:
            if not self.shared:  # what stands in front of the new pages must not make room for them: they need it
                lease.find(dict.fromkeys(used))
            slots = lease.take(len(wanted), self._patience)
            if len(slots) < len(wanted):
                self.stats.refused += len(wanted) - len(slots)
                logger.warning("no room for %d of %d pages: they are not stored", len(wanted) - len(slots), len(wanted))
            if not slots:
                return None
            chosen = list(wanted.items())[: len(slots)]
            writer = CacheWriter(self, [key for key, _ in chosen], [page for _, page in chosen], slots, used)
            lease.hand_on(slots)
        with self.memory.lock:
            writing.update(writer.keys)
        return writer

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until finished writers' pages are acknowledged or given up; False if that takes longer.

        Args:
            timeout: seconds; None = that of the store.
        """
        timeout = self._link.timeout if timeout is None else timeout
        require_seconds("CacheStore.flush", timeout=timeout)
        return self._publisher.flush(timeout)

    def close(self, timeout: float = 5.0) -> None:
        """Finish what is being stored, but no longer than ``timeout`` seconds: drop the rest. Forget everything."""
        require_seconds("CacheStore.close", timeout=timeout)
        if self._closed:
            return
        deadline = time.monotonic() + timeout
        if not self.flush(timeout):
            logger.warning("cache store closed: %d writers' pages may be lost", self._publisher.unfinished)
        self._closed = True
        self._publisher.stop()
        gone = self._link.close_behind(self._publisher.run_behind)
        while self._copies_run() and time.monotonic() < deadline:
            time.sleep(0.001)
        if self._copies_run():
            logger.warning("cache store closed while copies run: its memory is not released")
            _abandoned.append(self.memory)
        if self.shared and not gone.wait(max(0.1, deadline - time.monotonic())):
            logger.warning("cache store closed while its backend is busy")
        self.checkers.shutdown(wait=False)
        self.memory.clear()

    # ---- for CacheWriter and CacheReader ----

    def problem(self, key: bytes, slot: int, checksum: bytes | None = None) -> str | None:
        """Why a slot must not be used for a key, see :meth:`EntryLayout.problem`; on any thread."""
        return self.layout.problem(self.memory.bytes_of(slot), key, checksum)

    def copy_arguments(self, pages: Sequence[int], slots: Sequence[int]) -> tuple[Tensor, Tensor]:
        """page_ids int32 and store_slots int64 on the device of the caches."""
        page_ids, store_slots = torch.tensor(pages, dtype=torch.int32), torch.tensor(slots, dtype=torch.int64)
        if self._stream is not None:
            page_ids, store_slots = page_ids.pin_memory(), store_slots.pin_memory()
        device = self.cache.device
        return page_ids.to(device, non_blocking=True), store_slots.to(device, non_blocking=True)

    def on_stream(self) -> torch.cuda.StreamContext | nullcontext[None]:
        """Work on the store's stream, behind what the current stream has been given."""
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream(self.cache.device))
        return torch.cuda.stream(self._stream)

    def keep_until_copied(self, *tensors: Tensor | None) -> None:
        """Memory that the store's stream reads is not given to others before it has."""
        if self._stream is not None:
            for tensor in tensors:
                if tensor is not None:
                    tensor.record_stream(self._stream)

    def order_behind_copies(self) -> Any:
        """The current stream waits for the copies so far; returns their event, None on the CPU."""
        if self._stream is None:
            return None
        done = self._stream.record_event()
        torch.cuda.current_stream(self.cache.device).wait_event(done)
        return done

    def publish(self, writer: CacheWriter, copied: Any) -> None:
        """Seal a complete writer's pages once they have arrived, show them, and hand them to the backend."""
        self._publisher.publish(writer, copied)

    def give_back(self, keys: Sequence[bytes], slots: Sequence[int]) -> None:
        """Room of a writer that gave up; the garbage collector may call this in the middle of any other method."""
        self._given_up.append((None if self._stream is None else self._stream.record_event(), keys, slots))

    @property
    def closed(self) -> bool:
        """Whether the store takes no more calls."""
        return self._closed

    def _take_back(self) -> None:
        """Room of writers that gave up, as soon as their copies have ended."""
        while self._given_up:
            event, keys, slots = self._given_up.popleft()
            with self.memory.lock:
                self._publisher.writing.difference_update(keys)
            self.memory.release_after(event, slots)

    # ---- reading ----

    def _reader(self, keys: Sequence[bytes], pages: Sequence[int]) -> CacheReader:
        return StagedReader(self, self._staging, keys, pages) if self._staging else CacheReader(self, keys, pages)

    def _take_good(
        self,
        reader: CacheReader,
        keys: Sequence[bytes],
        held: Mapping[bytes, int],
        received: Mapping[bytes, int],
        deadline: float,
        lease: Lease,
    ) -> list[int]:
        """Of slots from the memory and from the backend, those with the good bytes of the first keys, as many as there
        are; all others are released."""
        slots = {**held, **received}
        problems = reader.problems(slots)
        good = list(itertools.takewhile(lambda key: key in slots and problems[key] is None, keys))
        for key, slot in slots.items():
            if problems[key] is None:
                self.memory.show(key, slot)
                continue
            self.memory.drop(slot)
            self.stats.damaged += 1
            logger.warning("miss: the stored page %s is dropped: %s", key.hex(), problems[key])
            if key in received:
                self._link.ask(lambda backend, key=key: backend.remove(key), deadline)  # type: ignore[misc]
        lease.release(slot for key, slot in slots.items() if key not in good)
        self.stats.memory_hits += sum(key in held for key in good)
        self.stats.backend_hits += sum(key in received for key in good)
        return [slots[key] for key in good]

    def _receive(self, keys: Sequence[bytes], deadline: float, lease: Lease) -> dict[bytes, int]:
        """Slots that the backend has filled."""
        if not self._link.usable:
            return {}
        self._take_back()
        slots = lease.take(len(keys), deadline - time.monotonic(), for_copies_only=True)
        wanted = list(zip(keys, slots, strict=False))
        lease.hand_on(slots)  # in use as long as the backend may write to them, whatever becomes of this call
        filled = self._link.ask(
            lambda backend: backend.get([(key, self.memory.bytes_of(slot)) for key, slot in wanted]),
            deadline,
            abandoned=lambda: self.memory.release(slots),
        )
        if filled is None:
            return {}
        lease.adopt(slots)
        lease.release(slot for (_, slot), found in zip(wanted, filled, strict=True) if not found)
        return {key: slot for (key, slot), found in zip(wanted, filled, strict=True) if found}

    def _copies_run(self) -> bool:
        copying = self._staging.copying if self._staging is not None else None
        return any(stream is not None and not stream.query() for stream in (self._stream, copying))

    def _require_open(self, method: str) -> None:
        if self._closed:
            raise RuntimeError(f"CacheStore.{method}: the store is closed")


def _require_model(caller: str, model: str) -> None:
    if not isinstance(model, str):
        raise TypeError(f"{caller}: model: expected str, got {type(model).__name__}")
    try:
        model.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{caller}: model: expected text that UTF-8 can hold, got {model!r}") from None
