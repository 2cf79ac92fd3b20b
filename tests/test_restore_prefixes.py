"""Prompts that find their beginnings on the device and in a store, in one process; ranks are in test_distributed.py."""

import random
from pathlib import Path

import pytest
import torch
from hf_reference import small_model
from store_harness import FLUSH_SECONDS, PAGE, FakeBackend, holds, memory_for, small_cache, store_pages, wipe

from sparse_cp_ops.cache_store import CacheStore, PrefixCache, restore_prefixes
from sparse_cp_ops.integrations.transformers import SparseCpModel


def prompt(seed: int, length: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(100) for _ in range(length)]


def test_the_device_first_then_the_store(device: str) -> None:
    backend = FakeBackend()
    long = prompt(1, 5 * PAGE + 3)
    writing = CacheStore(small_cache(8, device), memory_for(small_cache(), 8), "", backend)
    keys = writing.page_keys(long)
    store_pages(writing, keys)
    store = CacheStore(small_cache(10, device), memory_for(small_cache(), 8), "", backend)
    prefix_cache = PrefixCache(10, PAGE, store.fingerprint)
    wipe(store.cache)
    (found,) = restore_prefixes(prefix_cache, store, [long[: 2 * PAGE + 1]])
    assert len(found) == 2
    assert store.stats.backend_hits == 2
    pages, other, whole = restore_prefixes(prefix_cache, store, [long, prompt(2, 40), long[: 5 * PAGE]])
    assert pages[:2] == found
    assert (len(pages), other, len(whole)) == (5, [], 4)  # at least one token is left to compute
    for page, key in zip(pages, keys, strict=True):
        assert holds(store.cache, key, page)
    for page, key in zip(whole, keys, strict=False):
        assert holds(store.cache, key, page)
    for held in (found, pages, whole):
        prefix_cache.release(held)
    assert prefix_cache.available == 10
    calls = backend.calls
    assert len(restore_prefixes(prefix_cache, store, [long])[0]) == 5
    assert backend.calls == calls


def test_what_prompts_have_in_common_is_restored_once(device: str) -> None:
    backend = FakeBackend()
    common, ends = prompt(1, 3 * PAGE), [[*prompt(seed, PAGE), 1] for seed in (2, 3)]
    writing = CacheStore(small_cache(8, device), memory_for(small_cache(), 8), "", backend)
    for end in ends:
        keys = writing.page_keys(common + end)
        if wanted := [key for key in keys if key not in backend.content]:
            store_pages(writing, wanted)
    prompts = [common + ends[0], common[: 2 * PAGE + 1], common + ends[1], common + ends[0]]
    store = CacheStore(small_cache(8, device), memory_for(small_cache(), 8), "", backend)
    prefix_cache = PrefixCache(8, PAGE, store.fingerprint)
    first, short, second, again = restore_prefixes(prefix_cache, store, prompts)
    assert [len(pages) for pages in (first, short, second, again)] == [4, 2, 4, 4]
    assert first == again
    assert (short, second[:3]) == (first[:2], first[:3])
    assert store.stats.backend_hits + store.stats.memory_hits == 5
    for pages, tokens in ((first, prompts[0]), (second, prompts[2])):
        for page, key in zip(pages, store.page_keys(tokens), strict=True):
            assert holds(store.cache, key, page)
    for pages in (first, short, second, again):
        prefix_cache.release(pages)
    assert prefix_cache.available == 8


def test_pages_that_had_lost_their_beginning_do_not_come_twice(device: str) -> None:
    store = CacheStore(small_cache(4, device), memory_for(small_cache(), 8))
    long = prompt(1, 2 * PAGE + 1)
    keys = store.page_keys(long)
    store_pages(store, keys)
    prefix_cache = PrefixCache(4, PAGE, store.fingerprint)
    pages = prefix_cache.allocate(2)
    prefix_cache.insert(long, pages)
    prefix_cache.release(pages[:1])
    prefix_cache.release(prefix_cache.allocate(3))  # gives the first page away while the second is held
    prefix_cache.release(pages[1:])
    short, whole = restore_prefixes(prefix_cache, store, [long[: PAGE + 1], long])
    assert (len(short), len(whole)) == (1, 2)
    assert whole[:1] == short
    for page, key in zip(whole, keys, strict=True):
        assert holds(store.cache, key, page)
    prefix_cache.release(short)
    prefix_cache.release(whole)
    assert prefix_cache.available == 4


def test_behind_a_common_page_that_is_damaged_nothing_is_restored(device: str) -> None:
    backend = FakeBackend()
    common, ends = prompt(1, 2 * PAGE), [[*prompt(seed, PAGE), 1] for seed in (2, 3)]
    store = CacheStore(small_cache(8, device), memory_for(small_cache(), 8), "", backend)
    for end in ends:
        store_pages(store, [key for key in store.page_keys(common + end) if key not in backend.content])
    store.memory.clear()
    damaged = store.page_keys(common)[1]
    backend.content[damaged] = bytes(len(backend.content[damaged]))
    prefix_cache = PrefixCache(8, PAGE, store.fingerprint)
    first, second = restore_prefixes(prefix_cache, store, [common + end for end in ends])
    assert first == second
    assert len(first) == 1
    assert holds(store.cache, store.page_keys(common)[0], first[0])
    for pages in (first, second):
        prefix_cache.release(pages)
    assert prefix_cache.available == 8


def test_without_room_or_store_it_is_match_prefix() -> None:
    backend = FakeBackend()
    store = CacheStore(small_cache(), memory_for(small_cache(), 8), "", backend)
    long = prompt(1, 3 * PAGE + 1)
    store_pages(store, store.page_keys(long))
    full = PrefixCache(8, PAGE, store.fingerprint)
    held = full.allocate(6)
    assert len(restore_prefixes(full, store, [long])[0]) == 2
    assert full.available == 0
    full.release(held)
    alone = PrefixCache(8, PAGE)
    assert restore_prefixes(alone, None, [long, long]) == [[], []]
    with pytest.raises(ValueError, match="expected the fingerprint of the store"):
        restore_prefixes(alone, store, [long])
    for page_size in (PAGE // 2, 2 * PAGE):  # pages of other tokens than their keys say
        other = PrefixCache(8, page_size, store.fingerprint)
        with pytest.raises(ValueError, match=f"expected the store's {PAGE} tokens a page, got {page_size}"):
            restore_prefixes(other, store, [long])
        assert other.available == 8


def test_an_error_leaves_nothing_held(monkeypatch: pytest.MonkeyPatch) -> None:
    store = CacheStore(small_cache(), memory_for(small_cache(), 8), "", FakeBackend())
    long = prompt(1, 3 * PAGE + 1)
    store_pages(store, store.page_keys(long))
    prefix_cache = PrefixCache(8, PAGE, store.fingerprint)
    monkeypatch.setattr(store, "read", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        restore_prefixes(prefix_cache, store, [long, long])
    assert prefix_cache.available == 8


def test_a_model_reuses_what_another_one_has_stored(tmp_path: Path, device: str) -> None:
    """In chunks, with pages on the device given away in between: the same logits as without a store."""
    model = small_model("glm_moe_dsa", dtype=torch.float64).to(device)
    sizes = {"num_pages": 14, "page_size": 16, "max_positions": 256}
    url = f"file://{tmp_path}?memory=8MiB"
    long, other = prompt(1, 150), prompt(2, 200)
    plain = SparseCpModel(model, **sizes)
    _, expected = plain.prefill([long])
    writing = SparseCpModel(model, store_url=url, model_id="m", **sizes)
    requests, logits = writing.prefill([long], chunk_tokens=40)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-9)
    assert requests[0].prefix_hit == 0
    writing.release(requests)
    writing.release(writing.prefill([other])[0])  # takes all pages of the device
    assert writing.store is not None
    assert writing.store.flush(FLUSH_SECONDS)
    requests, again = writing.prefill([long])
    assert requests[0].prefix_hit == 144
    torch.testing.assert_close(again, expected, rtol=0, atol=1e-9)
    assert writing.store.stats.refused == writing.store.stats.failed == 0
    reading = SparseCpModel(model, store_url=url, model_id="m", **sizes)
    requests, again = reading.prefill([long])
    assert requests[0].prefix_hit == 144
    torch.testing.assert_close(again, expected, rtol=0, atol=1e-9)
    stranger = SparseCpModel(model, store_url=url, model_id="other weights", **sizes)
    assert stranger.prefill([long])[0][0].prefix_hit == 0
    for override in ({"rope_theta": 20000.0}, {"softmax_scale": 0.5}, {"index_topk": 128}):  # other bytes
        altered = SparseCpModel(model, store_url=url, model_id="m", **sizes, **override)
        assert altered.prefill([long])[0][0].prefix_hit == 0
    with pytest.raises(ValueError, match="store_url: expected None with quantise=False"):
        SparseCpModel(model, store_url=url, quantise=False, **sizes)
    with pytest.raises(
        ValueError, match="model_id: expected the name and version of the weights beside store_url, got ''"
    ):
        SparseCpModel(model, store_url=url, **sizes)
