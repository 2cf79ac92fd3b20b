"""Small stores and caches for tests; the content of a page follows from its key, so that anybody can check it."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from sparse_cp_ops.cache_store import CacheStore, CacheWriter
from sparse_cp_ops.cache_store.backend import BackendError, StoredEntry
from sparse_cp_ops.cache_store.entry import HEADER_BYTES, EntryLayout
from sparse_cp_ops.kv_cache import PagedKvCache

PAGE = 16
LAYERS = (True, False, True)
# Only what hangs takes so long: each page costs three fsyncs, which on a busy disk may take 100 ms each.
FLUSH_SECONDS = 120.0


def small_cache(pages: int = 8, device: str = "cpu", layers: Sequence[bool] = LAYERS) -> PagedKvCache:
    return PagedKvCache(len(layers), pages, PAGE, device, layers)


def memory_for(cache: PagedKvCache, pages: int) -> int:
    return pages * EntryLayout(cache, "").entry_bytes


def keys_of(store: CacheStore, count: int, seed: int = 0) -> list[bytes]:
    generator = random.Random(seed)
    return store.page_keys([generator.randrange(1000) for _ in range(count * PAGE)])


def content_of(cache: PagedKvCache, key: bytes) -> list[torch.Tensor]:
    """What the page of a key holds in every cache."""
    generator = np.random.default_rng(int.from_bytes(key))
    return [
        torch.from_numpy(generator.integers(256, size=pages[0].shape, dtype=np.uint8))
        for pages in (*cache.mla, *cache.indexer)
        if pages is not None
    ]


def fill(cache: PagedKvCache, keys: Sequence[bytes], pages: Sequence[int]) -> None:
    for key, page in zip(keys, pages, strict=True):
        arrays = [layer for layer in (*cache.mla, *cache.indexer) if layer is not None]
        for layer, content in zip(arrays, content_of(cache, key), strict=True):
            layer[page] = content.to(layer.device)


def wipe(cache: PagedKvCache) -> None:
    for layer in (*cache.mla, *cache.indexer):
        if layer is not None:
            layer.fill_(255)


def holds(cache: PagedKvCache, key: bytes, page: int) -> bool:
    arrays = [layer for layer in (*cache.mla, *cache.indexer) if layer is not None]
    return all(
        torch.equal(layer[page].cpu(), content) for layer, content in zip(arrays, content_of(cache, key), strict=True)
    )


def untouched(cache: PagedKvCache, page: int) -> bool:
    return all(bool(layer[page].eq(255).all()) for layer in (*cache.mla, *cache.indexer) if layer is not None)


def write_pages(store: CacheStore, keys: Sequence[bytes]) -> CacheWriter:
    """Write pages through the device; the finished writer."""
    fill(store.cache, keys, range(len(keys)))
    writer = store.writer(keys, range(len(keys)))
    assert writer is not None
    with writer:
        for layer in range(store.cache.num_layers):
            writer.write_layer(layer)
    return writer


def store_pages(store: CacheStore, keys: Sequence[bytes]) -> list[bytes]:
    """Write pages through the device and wait; the acknowledged keys."""
    writer = write_pages(store, keys)
    assert store.flush(FLUSH_SECONDS)
    return writer.acknowledged


def wait_until(condition: Callable[[], bool]) -> None:
    """For what another thread does without telling anybody."""
    deadline = time.monotonic() + FLUSH_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def read_back(store: CacheStore, keys: Sequence[bytes]) -> int:
    """Pages that come back; they must be right, and the ones behind them untouched."""
    wipe(store.cache)
    restored = store.read(keys, range(len(keys)))
    for page, key in enumerate(keys):
        assert holds(store.cache, key, page) if page < restored else untouched(store.cache, page)
    return restored


def assert_all_room_can_be_had(store: CacheStore) -> None:
    """No slot is lost, and none is in use for ever."""
    assert store.flush(FLUSH_SECONDS)
    assert store.writer([], []) is None
    slots = store.memory.take(len(store.memory), patience=FLUSH_SECONDS)
    assert sorted(slots) == [*range(len(store.memory))]
    store.memory.release(slots)


class FakeBackend:
    """Entries in a dict that another store can share; every call passes a gate and can be told to fail."""

    def __init__(self) -> None:
        self.content: dict[bytes, bytes] = {}
        self.open_gate = threading.Event()
        self.open_gate.set()
        self.put_gate = threading.Event()
        self.put_gate.set()
        self.failing = False
        self.room: int | None = None
        self.calls = 0
        self.closed = False

    def _pass(self) -> None:
        self.calls += 1
        self.open_gate.wait()
        if self.failing:
            raise BackendError("the fake backend fails")

    def present(self, keys: Sequence[bytes]) -> list[bool]:
        self._pass()
        return [key in self.content for key in keys]

    def put(self, entries: Sequence[tuple[bytes, memoryview]]) -> list[bool]:
        self.put_gate.wait()
        self._pass()
        taken = []
        for key, content in entries:
            taken.append(self.room is None or len(self.content) < self.room)
            if taken[-1]:
                self.content[key] = bytes(content)
        return taken

    def get(self, entries: Sequence[tuple[bytes, memoryview]]) -> list[bool]:
        self._pass()
        for key, content in entries:
            if key in self.content:
                content[:] = self.content[key]
        return [key in self.content for key, _ in entries]

    def touch(self, keys: Sequence[bytes]) -> None:
        pass

    def remove(self, key: bytes) -> None:
        self._pass()
        self.content.pop(key, None)

    def entries(self) -> Iterator[StoredEntry]:
        self._pass()
        return iter([StoredEntry(key.hex(), len(data), data[:HEADER_BYTES]) for key, data in self.content.items()])

    def close(self) -> None:
        self._pass()
        self.closed = True


def new_store(backend: FakeBackend, pages: int = 8, device: str = "cpu", **options: float) -> CacheStore:
    """A store of `pages` pages over a fresh small cache of 8 and the backend."""
    cache = small_cache(8, device)
    return CacheStore(cache, memory_for(cache, pages), "", backend, **{"timeout": FLUSH_SECONDS, **options})
