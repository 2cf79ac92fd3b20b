import logging
import random

import pytest
import torch
from cp_harness import PAGE, attention_inputs

from sparse_cp_ops.cache_store import CacheStore, CacheWriter, create_cache_writer
from sparse_cp_ops.cache_store.entry import EntryLayout
from sparse_cp_ops.cache_store.reader import _runs
from sparse_cp_ops.kv_cache import PagedKvCache

LAYERS = (True, False, True)


def random_cache(device: str, pages: int = 12, layers: tuple[bool, ...] = LAYERS) -> PagedKvCache:
    cache = PagedKvCache(len(layers), pages, PAGE, device, layers)
    for layer_pages in (*cache.mla, *cache.indexer):
        if layer_pages is not None:
            layer_pages.copy_(torch.randint(256, layer_pages.shape, dtype=torch.uint8))
    return cache


def page_bytes(cache: PagedKvCache, page: int) -> list[torch.Tensor]:
    return [pages[page].cpu().clone() for pages in (*cache.mla, *cache.indexer) if pages is not None]


def wipe(cache: PagedKvCache, pages: list[int]) -> None:
    for layer_pages in (*cache.mla, *cache.indexer):
        if layer_pages is not None:
            layer_pages[pages] = 255


def memory_for(cache: PagedKvCache, pages: int) -> int:
    return pages * EntryLayout(cache, "").entry_bytes


def store_pages(store: CacheStore, keys: list[bytes], pages: list[int]) -> None:
    writer = store.writer(keys, pages)
    assert writer is not None
    with writer:
        for layer in range(store.cache.num_layers):
            writer.write_layer(layer)
    assert store.flush()


def keys_of(store: CacheStore, count: int, seed: int = 0) -> list[bytes]:
    generator = random.Random(seed)
    return store.page_keys([generator.randrange(1000) for _ in range(count * PAGE)])


def test_wiped_pages_come_back_bit_for_bit(device: str) -> None:
    cache = random_cache(device)
    store = CacheStore(cache, memory_for(cache, 8))
    keys = keys_of(store, 3)
    before = {page: page_bytes(cache, page) for page in range(12)}
    store_pages(store, keys, [7, 2, 9])
    wipe(cache, [7, 2, 9, 4])
    assert store.read(keys, [4, 7, 2]) == 3  # other pages than they came from
    for target, source in ((4, 7), (7, 2), (2, 9)):
        for restored, expected in zip(page_bytes(cache, target), before[source], strict=True):
            assert torch.equal(restored, expected)
    for restored in page_bytes(cache, 9):
        assert restored.eq(255).all()
    for page in (0, 1, 3, 5, 6, 8, 10, 11):
        assert all(map(torch.equal, page_bytes(cache, page), before[page]))
    store.close()


def test_a_page_is_visible_only_with_all_its_layers(device: str) -> None:
    cache = random_cache(device)
    store = CacheStore(cache, memory_for(cache, 8))
    keys = keys_of(store, 2)
    writer = store.writer(keys, [0, 1])
    assert writer is not None
    writer.write_layer(0)
    writer.write_layer(2)
    assert store.match(keys) == 0
    writer.finish()
    assert store.flush()
    assert store.match(keys) == 0
    assert store.read(keys, [5, 6]) == 0
    store_pages(store, keys, [0, 1])
    assert store.match(keys) == 2
    assert store.match([*keys, bytes(16)]) == 2
    assert store.match([bytes(16), *keys]) == 0


def fail_after_writing(writer: CacheWriter) -> None:
    with writer:
        for layer in range(len(LAYERS)):
            writer.write_layer(layer)
        raise KeyError


def test_an_exception_or_an_abandoned_writer_leaves_no_trace(device: str) -> None:
    cache = random_cache(device)
    store = CacheStore(cache, memory_for(cache, 2))
    keys = keys_of(store, 2)
    writer = store.writer(keys, [0, 1])
    assert writer is not None
    assert store.writer(keys, [0, 1]) is None  # somebody is writing them already
    with pytest.raises(KeyError):
        fail_after_writing(writer)
    with pytest.raises(RuntimeError, match="writer is finished"):
        writer.write_layer(0)
    assert store.match(keys) == 0
    if device == "cuda":
        torch.cuda.synchronize()  # room comes back when the copies into it have ended
    abandoned = store.writer(keys, [0, 1])
    assert abandoned is not None
    del abandoned
    store_pages(store, keys, [0, 1])
    assert store.match(keys) == 2


def test_the_budget_holds_and_the_least_recently_used_pages_leave(device: str) -> None:
    cache = random_cache(device)
    store = CacheStore(cache, memory_for(cache, 4) + 100)
    first, second, third = keys_of(store, 2, 1), keys_of(store, 2, 2), keys_of(store, 1, 3)
    store_pages(store, first, [0, 1])
    store_pages(store, second, [2, 3])
    assert store.read(first, [5, 6]) == 2
    store_pages(store, third, [4])
    assert store.match(second) == 1  # the end of a chain leaves first
    assert store.match(second[1:]) == 0
    assert store.match(first) == 2
    assert store.match(third) == 1
    many = keys_of(store, 6, 4)
    store_pages(store, many, [0, 1, 2, 3, 4, 5])
    assert store.match(many) == 4
    assert store.match(first) == store.match(third) == 0
    with pytest.raises(ValueError, match=rf"budget_bytes: expected at least {memory_for(cache, 1)} .*, got 1000"):
        CacheStore(cache, 1000)


def test_of_a_prompt_in_chunks_the_end_leaves_first(device: str) -> None:
    cache = random_cache(device)
    store = CacheStore(cache, memory_for(cache, 4))
    prompt = list(range(4 * PAGE))
    table = torch.arange(4, dtype=torch.int32, device=device)[None]
    for prefix in (0, 2 * PAGE):
        writer = create_cache_writer(store, attention_inputs([2 * PAGE], [prefix], table), [prompt], [[0, 1, 2, 3]])
        assert writer is not None
        with writer:
            for layer in range(3):
                writer.write_layer(layer)
        assert store.flush()
    assert store.match(store.page_keys(prompt)) == 4
    for left, seed in ((3, 1), (2, 2)):
        store_pages(store, keys_of(store, 1, seed), [5])
        assert store.match(store.page_keys(prompt)) == left


def test_a_prompt_longer_than_the_memory_keeps_its_beginning(device: str) -> None:
    cache = random_cache(device)
    store = CacheStore(cache, memory_for(cache, 3))
    store_pages(store, keys_of(store, 3, seed=1), [6, 7, 8])
    prompt = list(range(6 * PAGE))
    table = torch.arange(6, dtype=torch.int32, device=device)[None]
    for prefix, stored in ((0, 2), (2 * PAGE, 3), (4 * PAGE, 3)):
        inputs = attention_inputs([2 * PAGE], [prefix], table)
        writer = create_cache_writer(store, inputs, [prompt], [[0, 1, 2, 3, 4, 5]])
        if writer is not None:
            with writer:
                for layer in range(3):
                    writer.write_layer(layer)
        assert store.flush()
        assert store.match(store.page_keys(prompt)) == stored
    assert store.stats.refused == 3
    store_pages(store, keys_of(store, 3, seed=2), [6, 7, 8])  # another prompt takes the room as ever
    assert store.match(keys_of(store, 3, seed=2)) == 3


def test_what_is_no_key_or_comes_twice_is_refused_and_takes_no_room(device: str) -> None:
    cache = random_cache(device)
    store = CacheStore(cache, memory_for(cache, 2))
    keys = keys_of(store, 2)
    store_pages(store, keys, [0, 1])
    for _ in range(3):
        with pytest.raises(ValueError, match="keys: expected different keys"):
            store.read([keys[0], keys[0]], [4, 5])
    for method, call in (
        ("match", lambda wrong: store.match([wrong])),
        ("read", lambda wrong: store.read([wrong], [0])),
        ("writer", lambda wrong: store.writer([wrong], [0])),
    ):
        with pytest.raises(TypeError, match=f"CacheStore.{method}: keys: expected bytes, got str"):
            call(keys[0].hex())
        with pytest.raises(ValueError, match=f"CacheStore.{method}: keys: expected 16 bytes each, got 15"):
            call(keys[0][:15])
    assert store.read(keys, [4, 5]) == 2
    if device == "cuda":
        torch.cuda.synchronize()  # room comes back when the copies from it have ended
    others = keys_of(store, 2, seed=1)
    store_pages(store, others, [0, 1])
    assert store.read(others, [4, 5]) == 2


def test_a_damaged_page_is_a_miss(device: str, caplog: pytest.LogCaptureFixture) -> None:
    cache = random_cache(device)
    for victim in range(2):
        store = CacheStore(cache, memory_for(cache, 8))
        keys = keys_of(store, 3)
        store_pages(store, keys, [0, 1, 2])
        damaged = store.memory.indexer[2] if victim else store.memory.mla[1]
        assert damaged is not None
        (slot,) = store.memory.find(keys[1:2]).values()
        damaged[slot].view(-1)[-1] ^= 1
        store.memory.release([slot])
        wipe(cache, [3, 4, 5])
        with caplog.at_level(logging.WARNING):
            assert store.read(keys, [3, 4, 5]) == 1
        assert "lost their checksum" in caplog.text
        assert all(untouched.eq(255).all() for untouched in page_bytes(cache, 4))
        assert store.match(keys) == 1
        store_pages(store, keys, [0, 1, 2])
        assert store.read(keys, [3, 4, 5]) == 3


def test_other_layouts_and_models_have_other_keys() -> None:
    tokens = list(range(2 * PAGE))
    caches = [random_cache("cpu"), random_cache("cpu", layers=(True, True, True)), random_cache("cpu", layers=(True,))]
    stores = [CacheStore(cache, 1 << 20, model) for cache in caches for model in ("a", "b")]
    assert len({key for store in stores for key in store.page_keys(tokens)}) == 2 * len(stores)


def test_closing_is_final_and_prompt(device: str) -> None:
    cache = random_cache(device)
    store = CacheStore(cache, memory_for(cache, 4))
    keys = keys_of(store, 1)
    writer = store.writer(keys, [0])
    assert writer is not None
    writer.write_layer(0)
    store.close()
    store.close()
    writer.finish()
    with pytest.raises(RuntimeError, match="store is closed"):
        writer.write_layer(1)
    with pytest.raises(RuntimeError, match="store is closed"):
        store.writer(keys, [0])
    with pytest.raises(RuntimeError, match="store is closed"):
        store.read(keys, [0])


def test_writers_are_made_for_prefill_and_for_the_requests_own_lengths(device: str) -> None:
    cache = random_cache(device)
    store = CacheStore(cache, memory_for(cache, 12))
    prompts = [[seed * 1000 + i for i in range(100)] for seed in range(3)]
    pages = [[0, 1, 2], [3, 4], [5]]
    table = torch.zeros(3, 3, dtype=torch.int32, device=device)
    # 2 pages and a half, 1 page of which a part is new, less than a page
    prefill = attention_inputs([PAGE, 1, PAGE - 1], [PAGE + 8, PAGE - 1, 0], table)
    assert create_cache_writer(None, prefill, prompts, pages) is None
    decode = attention_inputs([1, 1, 1], [PAGE - 1, PAGE, 3], table, is_prefill=False)
    assert create_cache_writer(store, decode, prompts, pages) is None
    writer = create_cache_writer(store, prefill, prompts, pages)
    assert writer is not None
    # The second page of the first request: the first one was complete before this forward.
    assert writer.keys == [store.page_keys(prompts[0])[1], store.page_keys(prompts[1])[0]]
    with writer:
        for layer in range(3):
            writer.write_layer(layer)
    assert store.flush()
    assert create_cache_writer(store, prefill, prompts, pages) is None
    assert store.match(store.page_keys(prompts[0])[1:]) == 1
    for request, length in ((0, 0), (1, 1), (2, 0)):
        assert store.match(store.page_keys(prompts[request])) == length
    before = page_bytes(cache, 3)
    wipe(cache, [3])
    assert store.read(store.page_keys(prompts[1][:PAGE]), [3]) == 1
    assert all(map(torch.equal, page_bytes(cache, 3), before))
    with pytest.raises(
        ValueError, match="request 0: expected tokens and pages for 40 tokens, got 39 tokens and 3 pages"
    ):
        create_cache_writer(store, prefill, [prompts[0][:39], *prompts[1:]], pages)
    with pytest.raises(ValueError, match="got 100 tokens and 1 pages of 16"):
        create_cache_writer(store, prefill, prompts, [[0], [3], []])
    with pytest.raises(ValueError, match="create_cache_writer: tokens: expected those of 3 requests, got 2"):
        create_cache_writer(store, prefill, prompts[:2], pages)
    with pytest.raises(ValueError, match="create_cache_writer: pages: expected those of 3 requests, got 4"):
        create_cache_writer(store, prefill, prompts, [*pages, []])


def test_equal_prompts_in_one_batch_are_stored_once(device: str) -> None:
    cache = random_cache(device)
    store = CacheStore(cache, memory_for(cache, 4))
    prompt = list(range(2 * PAGE))
    table = torch.zeros(2, 2, dtype=torch.int32, device=device)
    writer = create_cache_writer(
        store, attention_inputs([2 * PAGE] * 2, [0, 0], table), [prompt, prompt], [[0, 1], [2, 3]]
    )
    assert writer is not None
    assert writer.keys == store.page_keys(prompt)


def test_copies_are_as_few_as_the_slots_allow() -> None:
    assert [*_runs([(0, 4), (1, 5), (2, 9), (3, 10), (7, 11), (6, 10), (0, 0)])] == [
        (0, 4, 2),
        (2, 9, 2),
        (7, 11, 1),
        (6, 10, 1),
        (0, 0, 1),
    ]
    assert [*_runs([])] == []
