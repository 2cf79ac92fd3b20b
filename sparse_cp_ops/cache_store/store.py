"""Pages beyond the device: bytes by content key, in host memory.

An entry is one page of all layers and both caches. It becomes visible when all of its bytes are there and their
checksum is taken; until then, and whenever a checksum fails, a look-up misses.
"""

from __future__ import annotations

import logging
import time
import weakref
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from sparse_cp_ops import ops
from sparse_cp_ops.cache_store.prefix_cache import Tokens, page_keys
from sparse_cp_ops.kv_cache import PagedKvCache
from sparse_cp_ops.ops._types import require_ints

if TYPE_CHECKING:
    from sparse_cp_ops.nn.inputs import AttentionInputs

logger = logging.getLogger(__name__)

# Memory that a copy may still write to when its store had to close: freeing it would be worse than keeping it.
_abandoned: list[PagedKvCache] = []


@dataclass(frozen=True)
class _Entry:
    slot: int
    checksum: int


class CacheStore:
    """The embedded store: a byte budget of host memory (pinned beside CUDA caches), least recently used pages leave.

    On CUDA all copies run on the store's own stream, and the host never waits for them. One thread at a time.
    """

    def __init__(self, cache: PagedKvCache, budget_bytes: int, model: str = "") -> None:
        """Allocate the store.

        Args:
            cache: the caches whose pages are stored.
            budget_bytes: host memory to use, at least one page of all layers.
            model: what the bytes depend on besides the layout, see :meth:`PagedKvCache.layout_fingerprint`.

        Raises:
            TypeError: the cache or the budget has the wrong type.
            ValueError: the budget is below one page.
        """
        if not isinstance(cache, PagedKvCache):
            raise TypeError(f"CacheStore: cache: expected a PagedKvCache, got {type(cache).__name__}")
        require_ints("CacheStore", budget_bytes=budget_bytes)
        self.cache = cache
        self.fingerprint = cache.layout_fingerprint(model)
        num_slots = budget_bytes // cache.page_bytes
        if num_slots < 1:
            raise ValueError(
                f"CacheStore: budget_bytes: expected at least {cache.page_bytes} (a page of all layers), "
                f"got {budget_bytes}"
            )
        cuda = cache.device.type == "cuda"
        self._slots = PagedKvCache(
            cache.num_layers, num_slots, cache.page_size, "cpu", cache.indexer_layers, pin_memory=cuda
        )
        self._stream = torch.cuda.Stream(cache.device) if cuda else None
        self._free = list(range(num_slots))
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()  # least recently used first
        self._writing: set[bytes] = set()  # of writers that are not finished, and of unpublished ones
        self._unpublished: list[CacheWriter] = []
        self._closed = False

    def page_keys(self, tokens: Tokens) -> list[bytes]:
        """Keys of the full pages of a token sequence."""
        return page_keys(tokens, self.cache.page_size, self.fingerprint)

    def match(self, keys: Sequence[bytes]) -> int:
        """How many of the keys, from the first on, are visible."""
        self.poll()
        count = 0
        for key in keys:
            if key not in self._entries:
                break
            count += 1
        return count

    def read(self, keys: Sequence[bytes], pages: Sequence[int]) -> int:
        """Copy stored pages, both caches of all layers, to device pages, on the store's stream.

        The current stream goes on behind the copies. It stops at the first key that is not visible or whose bytes
        don't have their checksum any more.

        Args:
            keys: of a request's pages, from the first on.
            pages: where to, at least as many; those behind the result keep what they held.

        Returns:
            How many pages were restored.

        Raises:
            ValueError: too few pages, pages outside the cache, or one page twice.
            RuntimeError: the store is closed.
        """
        self._require_open()
        pages = self.cache.require_pages("CacheStore.read", pages)
        if len(pages) < len(keys):
            raise ValueError(f"CacheStore.read: pages: expected at least {len(keys)}, got {len(pages)}")
        if len(set(pages)) < len(pages):
            raise ValueError(f"CacheStore.read: pages: expected different pages, got {pages}")
        slots: list[int] = []
        for key in keys[: self.match(keys)]:
            entry = self._entries[key]
            if self._checksum(entry.slot) != entry.checksum:
                logger.warning("a stored page has lost its checksum: dropped")
                self._drop(key)
                break
            self._entries.move_to_end(key)
            slots.append(entry.slot)
        if slots:
            page_ids, store_slots = self._copy_arguments(pages[: len(slots)], slots)
            with self._on_stream():
                for layer_id in range(self.cache.num_layers):
                    ops.read_cache_store(
                        self._slots.mla[layer_id],
                        self._slots.indexer[layer_id],
                        store_slots,
                        page_ids,
                        self.cache.mla[layer_id],
                        self.cache.indexer[layer_id],
                    )
            self._keep_until_copied(page_ids, store_slots, *self.cache.mla, *self.cache.indexer)
            self._order_behind_copies()
        return len(slots)

    def writer(self, keys: Sequence[bytes], pages: Sequence[int]) -> CacheWriter | None:
        """Reserve room for the pages that are not here yet, and return what copies them; None if all are here.

        The least recently used entries make room. Of more pages than fit, the first ones are stored.

        Args:
            keys: of pages that the running forward completes.
            pages: their device pages.

        Raises:
            ValueError: another number of pages than of keys, or pages outside the cache.
            RuntimeError: the store is closed.
        """
        self._require_open()
        pages = self.cache.require_pages("CacheStore.writer", pages)
        if len(keys) != len(pages):
            raise ValueError(f"CacheStore.writer: pages: expected {len(keys)} as keys, got {len(pages)}")
        self.poll()
        wanted = {key: page for key, page in zip(keys, pages, strict=True) if not self._touch(key)}
        new = list(wanted.items())[: len(self._free) + len(self._entries)]
        while len(self._free) < len(new):
            self._drop(next(iter(self._entries)))
        if not new:
            return None
        slots = [self._free.pop() for _ in new]
        self._writing.update(key for key, _ in new)
        return CacheWriter(self, [key for key, _ in new], [page for _, page in new], slots)

    def poll(self) -> None:
        """Make the pages visible whose copies have arrived; waits for none. Every look-up does this first.

        The host reads each new page once, for its checksum.
        """
        arrived = [writer for writer in self._unpublished if writer.has_arrived()]
        for writer in arrived:
            self._unpublished.remove(writer)
            for key, slot in zip(writer.keys, writer.slots, strict=True):
                self._writing.discard(key)
                self._entries[key] = _Entry(slot, self._checksum(slot))

    def close(self, timeout: float = 5.0) -> None:
        """Forget everything and release the memory. Waits for running copies, at most ``timeout`` seconds."""
        if self._closed:
            return
        self._closed = True
        deadline = time.monotonic() + timeout
        while self._copies_run() and time.monotonic() < deadline:
            time.sleep(0.001)
        if self._copies_run():
            logger.warning("cache store closed while copies run: its memory is not released")
            _abandoned.append(self._slots)
        self._unpublished.clear()
        self._entries.clear()
        self._writing.clear()
        del self._slots

    def _copies_run(self) -> bool:
        return self._stream is not None and not self._stream.query()

    def _touch(self, key: bytes) -> bool:
        """Whether a key needs no write; a visible one becomes the most recently used."""
        if key in self._entries:
            self._entries.move_to_end(key)
            return True
        return key in self._writing

    def _give_back(self, keys: Sequence[bytes], slots: Sequence[int]) -> None:
        """Room of a writer that gave up. Its copies may still run: later ones to these slots come behind them."""
        self._writing.difference_update(keys)
        self._free += slots

    def _drop(self, key: bytes) -> None:
        self._free.append(self._entries.pop(key).slot)

    def _checksum(self, slot: int) -> int:
        checksum = 0
        for pages in (*self._slots.mla, *self._slots.indexer):
            if pages is not None:
                checksum = zlib.crc32(pages[slot].numpy().data, checksum)
        return checksum

    def _require_open(self) -> None:
        if self._closed:
            raise RuntimeError("CacheStore: the store is closed")

    def _copy_arguments(self, pages: Sequence[int], slots: Sequence[int]) -> tuple[Tensor, Tensor]:
        """page_ids int32 and store_slots int64 on the device of the caches."""
        page_ids, store_slots = torch.tensor(pages, dtype=torch.int32), torch.tensor(slots, dtype=torch.int64)
        if self._stream is not None:
            page_ids, store_slots = page_ids.pin_memory(), store_slots.pin_memory()
        device = self.cache.device
        return page_ids.to(device, non_blocking=True), store_slots.to(device, non_blocking=True)

    def _on_stream(self) -> torch.cuda.StreamContext | nullcontext[None]:
        """Work on the store's stream, behind what the current stream has been given."""
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream(self.cache.device))
        return torch.cuda.stream(self._stream)

    def _keep_until_copied(self, *tensors: Tensor | None) -> None:
        if self._stream is not None:
            for tensor in tensors:
                if tensor is not None:
                    tensor.record_stream(self._stream)

    def _order_behind_copies(self) -> torch.cuda.Event | None:
        """The current stream waits for the copies so far; returns their event."""
        if self._stream is None:
            return None
        done: torch.cuda.Event = self._stream.record_event()
        torch.cuda.current_stream(self.cache.device).wait_event(done)
        return done


class CacheWriter:
    """Copies the pages that one forward completes, layer by layer; what is not complete at the end never shows up.

    As a context manager it finishes at the end of the block, and gives up on an exception.
    """

    def __init__(self, store: CacheStore, keys: list[bytes], pages: list[int], slots: list[int]) -> None:
        """Use :func:`create_cache_writer` or :meth:`CacheStore.writer`."""
        self.keys = keys
        self.slots = slots
        self._store = store
        self._page_ids, self._store_slots = store._copy_arguments(pages, slots)
        self._layers: set[int] = set()
        self._done: torch.cuda.Event | None = None
        # A writer that is dropped unfinished gives its room back as well.
        self._give_back = weakref.finalize(self, store._give_back, keys, slots)
        self._give_back.atexit = False

    def write_layer(self, layer_id: int) -> None:
        """Copy both caches of a layer, behind the writes that the current stream has been given.

        Raises:
            ValueError: no layer of the cache.
            RuntimeError: the writer is finished, or the store closed.
        """
        store, cache = self._store, self._store.cache
        cache.require_layer(layer_id)
        store._require_open()
        if not self._give_back.alive:
            raise RuntimeError("CacheWriter: the writer is finished")
        with store._on_stream():
            ops.write_cache_store(
                cache.mla[layer_id],
                cache.indexer[layer_id],
                self._page_ids,
                self._store_slots,
                store._slots.mla[layer_id],
                store._slots.indexer[layer_id],
            )
        store._keep_until_copied(self._page_ids, self._store_slots, cache.mla[layer_id], cache.indexer[layer_id])
        self._layers.add(layer_id)

    def finish(self) -> None:
        """Show the pages as soon as their bytes have arrived, if every layer was written; drop them otherwise.

        The current stream goes on behind the copies, so that the pages may be written again.
        """
        store = self._store
        if not self._give_back.alive or store._closed:
            return
        self._done = store._order_behind_copies()
        if len(self._layers) < store.cache.num_layers:
            self._give_back()
            return
        self._give_back.detach()
        store._unpublished.append(self)
        store.poll()

    def abort(self) -> None:
        """Drop the pages, whatever was written."""
        self._layers.clear()
        self.finish()

    def has_arrived(self) -> bool:
        """Whether all copies of a finished writer are done."""
        return self._done is None or self._done.query()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.finish()
        else:
            self.abort()


def create_cache_writer(
    store: CacheStore | None,
    inputs: AttentionInputs,
    tokens: Sequence[Tokens],
    pages: Sequence[Sequence[int]],
) -> CacheWriter | None:
    """The one place that decides what a forward stores: the full pages of prefix and new tokens, prefill only.

    Lengths are the requests' own, not those of a rank's rows: every rank holds complete pages.

    Args:
        store: where to, None = nothing is stored.
        inputs: the batch of the forward.
        tokens: token ids of each request, at least ``prefix_len + new_len`` of them.
        pages: pages of each request in order, as in the block table.

    Returns:
        The writer, None in decode or if the store has all pages already.
    """
    if store is None or not inputs.is_prefill:
        return None
    page_size = store.cache.page_size
    keys: list[bytes] = []
    page_ids: list[int] = []
    for request, length in enumerate((inputs.prefix_lens + inputs.new_lens).tolist()):
        if len(tokens[request]) < length or len(pages[request]) < length // page_size:
            raise ValueError(
                f"create_cache_writer: request {request}: expected tokens and pages for {length} tokens, got "
                f"{len(tokens[request])} tokens and {len(pages[request])} pages of {page_size}"
            )
        keys += store.page_keys(tokens[request][:length])
        page_ids += pages[request][: length // page_size]
    return store.writer(keys, page_ids)
