"""What copies entries from host memory to device pages, batch by batch, and checks them on the way."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from sparse_cp_ops.cache_store.entry import HEADER_BYTES, EntryLayout
from sparse_cp_ops.kv_cache import PagedKvCache
from sparse_cp_ops.ops import direct

if TYPE_CHECKING:
    from sparse_cp_ops.cache_store.store import CacheStore


class CacheReader:
    """Copies entries of one call: fetched once they are found, loaded into their pages once they are known to be good.

    Beside caches on the CPU: threads check the entries where they are.
    """

    def __init__(self, store: CacheStore, keys: Sequence[bytes], pages: Sequence[int]) -> None:
        """Use :meth:`CacheStore.read`."""
        self._store = store
        self._keys = keys
        self._pages = pages
        self._problems: dict[bytes, concurrent.futures.Future[str | None]] = {}

    def fetch(self, slots: Mapping[bytes, int]) -> None:
        """Begin with slots of the store's memory, which the caller goes on using."""
        for key, slot in slots.items():
            self._problems[key] = self._store.checkers.submit(self._store.problem, key, slot)

    def problems(self, slots: Mapping[bytes, int]) -> dict[bytes, str | None]:
        """What is wrong with fetched slots, None where nothing is; waits until that is known."""
        return {key: self._problems[key].result() for key in slots}

    def load(self, start: int, slots: Sequence[int]) -> Any:
        """Copy good slots to the pages of the keys from number ``start`` on; the current stream goes on behind that.

        Returns:
            The CUDA event behind which the slots are not needed; None on the CPU.
        """
        store, cache = self._store, self._store.cache
        page_ids, store_slots = store.copy_arguments(self._pages[start : start + len(slots)], slots)
        for layer_id in range(cache.num_layers):
            direct.read_cache_store(
                store.memory.mla[layer_id],
                store.memory.indexer[layer_id],
                store_slots,
                page_ids,
                cache.mla[layer_id],
                cache.indexer[layer_id],
            )


class Staging:
    """Device memory of two batches of entries on their way to pages, and what happens to them there.

    Copies of whole entries run at the rate of the bus, which kernels that read pinned memory do not reach; and the
    device checks them in passing, for which host threads would need all cores (docs/cache_store.md has the figures).

    Attributes:
        entries: uint8 [count, entry_bytes].
        copying: stream of the copies from host memory.
        checking: stream of the checksums.
        checksums: uint8 [count, 16], pinned: of the entries, behind :meth:`check`.
        loaded: CUDA event of the last batch that was copied on to pages.
    """

    def __init__(self, cache: PagedKvCache, layout: EntryLayout, count: int) -> None:
        device, payload_bytes = cache.device, layout.entry_bytes - HEADER_BYTES
        with torch.inference_mode(False):
            self.entries = torch.empty(count, layout.entry_bytes, dtype=torch.uint8, device=device)
            # What each KB adds to the eight accumulators of XXH3-128.
            self._sums = torch.empty(count, (payload_bytes - 1) // 1024, 8, dtype=torch.int64, device=device)
            self._checksums = torch.empty(count, 16, dtype=torch.uint8, device=device)
            self.checksums = torch.empty(count, 16, dtype=torch.uint8, pin_memory=True)
        self.copying, self.checking = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self.loaded: Any = None
        for stream in (self.copying, self.checking):  # the memory may still be in use on the current stream
            stream.wait_stream(torch.cuda.current_stream(device))
            for memory in (self.entries, self._sums, self._checksums):
                memory.record_stream(stream)
        self._cache = cache
        self._indexers = [pages for pages in cache.indexer if pages is not None]
        self._indexer_layers = [layer for layer, owner in enumerate(cache.indexer_layers) if owner]

    def check(self, first: int, count: int) -> None:
        """Compute the checksums of some entries, on the current stream."""
        torch.ops.sparse_cp_ops_store.checksum_entries.default(
            self.entries, first, count, HEADER_BYTES, self._sums, self._checksums
        )
        some = slice(first, first + count)
        self.checksums[some].copy_(self._checksums[some], non_blocking=True)

    def load(self, first: int, pages: Sequence[int]) -> None:
        """Copy entries from ``first`` on to pages of the caches, on the current stream."""
        torch.ops.sparse_cp_ops_store.load_entries.default(
            self.entries, first, pages, self._cache.mla, self._indexers, self._indexer_layers
        )


class StagedReader(CacheReader):
    """Through staging memory, beside CUDA caches. What is fetched and not loaded lies within two batches."""

    def __init__(self, store: CacheStore, staging: Staging, keys: Sequence[bytes], pages: Sequence[int]) -> None:
        super().__init__(store, keys, pages)
        self._staging = staging
        self._place_of = {key: number % len(staging.entries) for number, key in enumerate(keys)}
        self._checked: dict[bytes, Any] = {}  # CUDA events

    def fetch(self, slots: Mapping[bytes, int]) -> None:
        """Copy slots to staging memory and compute their checksums there."""
        staging, memory = self._staging, self._store.memory
        if staging.loaded is not None:  # the batch that was in the same places
            staging.copying.wait_event(staging.loaded)
        for first, slot, count in _runs((self._place_of[key], slot) for key, slot in slots.items()):
            with torch.cuda.stream(staging.copying):
                staging.entries[first : first + count].copy_(memory.slots[slot : slot + count], non_blocking=True)
            staging.checking.wait_stream(staging.copying)
            with torch.cuda.stream(staging.checking):
                staging.check(first, count)
        self._checked.update(dict.fromkeys(slots, staging.checking.record_event()))

    def problems(self, slots: Mapping[bytes, int]) -> dict[bytes, str | None]:
        for checked in {self._checked[key] for key in slots}:
            checked.synchronize()
        checksums = self._staging.checksums.numpy()
        return {
            key: self._store.problem(key, slot, checksums[self._place_of[key]].tobytes()) for key, slot in slots.items()
        }

    def load(self, start: int, slots: Sequence[int]) -> Any:
        store, staging = self._store, self._staging
        try:
            with store.on_stream():
                staging.load(self._place_of[self._keys[start]], self._pages[start : start + len(slots)])
        finally:  # after an error too: what was started runs on
            staging.loaded = store.order_behind_copies()
        return staging.loaded


def _runs(pairs: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """Rows of pairs that both count up, as their first pair and length: one copy each."""
    first, second, length = 0, 0, 0
    for a, b in pairs:
        if length and (a, b) == (first + length, second + length):
            length += 1
            continue
        if length:
            yield first, second, length
        first, second, length = a, b, 1
    if length:
        yield first, second, length
