"""What copies the pages of one forward into a store, layer by layer."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from sparse_cp_ops.cache_store.prefix_cache import Tokens
from sparse_cp_ops.context_parallel.collectives import CpGroup
from sparse_cp_ops.ops import direct

if TYPE_CHECKING:
    from sparse_cp_ops.cache_store.store import CacheStore
    from sparse_cp_ops.nn.inputs import AttentionInputs


class CacheWriter:
    """Copies the pages that one forward completes; what is not complete at the end never shows up.

    As a context manager it finishes at the end of the block, and gives up on an exception.

    Attributes:
        keys: of the pages that are stored.
        used: of all pages of the requests, see :meth:`CacheStore.writer`.
        acknowledged: those of ``keys`` that are visible to everybody who shares the store, once they are.
    """

    def __init__(
        self, store: CacheStore, keys: list[bytes], pages: list[int], slots: list[int], used: Sequence[bytes]
    ) -> None:
        """Use :func:`create_cache_writer` or :meth:`CacheStore.writer`."""
        self.keys = keys
        self.slots = slots
        self.used = used
        self.acknowledged: list[bytes] = []
        self._store = store
        self._page_ids, self._store_slots = store.copy_arguments(pages, slots)
        self._layers: set[int] = set()
        # A writer that is dropped unfinished gives its room back as well.
        self._give_back = weakref.finalize(self, store.give_back, keys, slots)
        self._give_back.atexit = False

    def write_layer(self, layer_id: int) -> None:
        """Copy both caches of a layer, behind the writes that the current stream has been given.

        Raises:
            ValueError: no layer of the cache.
            RuntimeError: the writer is finished, or the store closed.
        """
        store, cache = self._store, self._store.cache
        cache.require_layer(layer_id)
        if store.closed:
            raise RuntimeError("CacheWriter.write_layer: the store is closed")
        if not self._give_back.alive:
            raise RuntimeError("CacheWriter.write_layer: the writer is finished")
        with store.on_stream():
            direct.write_cache_store(
                cache.mla[layer_id],
                cache.indexer[layer_id],
                self._page_ids,
                self._store_slots,
                store.memory.mla[layer_id],
                store.memory.indexer[layer_id],
            )
        store.keep_until_copied(self._page_ids, self._store_slots)
        self._layers.add(layer_id)

    def finish(self) -> None:
        """Let the store seal the pages and hand them on, if every layer was written; drop them otherwise.

        The current stream goes on behind the copies, so that the pages may be written again.
        """
        store = self._store
        if not self._give_back.alive or store.closed:
            return
        copied = store.order_behind_copies()
        if len(self._layers) < store.cache.num_layers:
            self._give_back()
            return
        store.publish(self, copied)
        self._give_back.detach()

    def abort(self) -> None:
        """Drop the pages, whatever was written."""
        self._layers.clear()
        self.finish()

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
    group: CpGroup | None = None,
) -> CacheWriter | None:
    """The one place that decides what a forward stores: the pages that it completes, in prefill only.

    Lengths are the requests' own, not those of a rank's rows: every rank holds complete pages. Of a store that the
    ranks share each of them writes its part, chosen by the pages' keys, so that a page is stored once.

    Args:
        store: where to, None = nothing is stored.
        inputs: the batch of the forward.
        tokens: token ids of each request, at least ``prefix_len + new_len`` of them.
        pages: pages of each request in order, as in the block table.
        group: the ranks that run this forward; None = one.

    Returns:
        The writer, None in decode or if there is nothing to store on this rank.
    """
    if store is None or not inputs.is_prefill:
        return None
    group = group or CpGroup()
    for name, given in (("tokens", tokens), ("pages", pages)):
        if len(given) != len(inputs.new_lens):
            raise ValueError(
                f"create_cache_writer: {name}: expected those of {len(inputs.new_lens)} requests, got {len(given)}"
            )
    page_size = store.cache.page_size
    keys: list[bytes] = []
    page_ids: list[int] = []
    used: list[bytes] = []
    lengths = (inputs.prefix_lens + inputs.new_lens).tolist()
    for request, (prefix, length) in enumerate(zip(inputs.prefix_lens.tolist(), lengths, strict=True)):
        if len(tokens[request]) < length or len(pages[request]) < length // page_size:
            raise ValueError(
                f"create_cache_writer: request {request}: expected tokens and pages for {length} tokens, got "
                f"{len(tokens[request])} tokens and {len(pages[request])} pages of {page_size}"
            )
        completed = slice(prefix // page_size, length // page_size)
        request_keys = store.page_keys(tokens[request][:length])
        used += request_keys
        for key, page in zip(request_keys[completed], pages[request][completed], strict=True):
            if not store.shared or int.from_bytes(key[:8]) % group.size == group.rank:
                keys.append(key)
                page_ids.append(page)
    return store.writer(keys, page_ids, used)
