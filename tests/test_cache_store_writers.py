"""What a writer may store: pages that find room, and layers that are all there."""

import torch
from store_harness import (
    FakeBackend,
    fill,
    keys_of,
    memory_for,
    new_store,
    small_cache,
    store_pages,
    untouched,
    wipe,
)

from sparse_cp_ops.cache_store import CacheStore


def test_nobody_waits_for_room_that_the_memory_does_not_have() -> None:
    store = new_store(FakeBackend(), pages=3, patience=600.0)
    assert len(store_pages(store, keys_of(store, 8))) == 3
    assert store.stats.refused == 5
    alone = CacheStore(small_cache(), memory_for(small_cache(), 3), patience=600.0)
    first = keys_of(alone, 8)
    store_pages(alone, first[:2])
    writer = alone.writer(first[2:], range(2, 8), first)  # two of three slots stand in front of these pages
    assert writer is not None
    assert writer.keys == first[2:3]


def test_incomplete_layers_never_reach_the_backend() -> None:
    backend = FakeBackend()
    store = new_store(backend)
    keys = keys_of(store, 2)
    fill(store.cache, keys, range(2))
    writer = store.writer(keys, range(2))
    assert writer is not None
    writer.write_layer(0)
    writer.write_layer(2)
    writer.finish()
    assert store.flush()
    assert not backend.content
    wipe(store.cache)
    assert store.read(keys, range(2)) == 0
    assert untouched(store.cache, 0)
    assert not torch.is_inference(store.memory.slots)
