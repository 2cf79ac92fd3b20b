"""Prompts served one after another with prefix reuse, from the device or from the store: same bits as from scratch."""

import random
from collections.abc import Sequence

import pytest
import torch
from cp_harness import (
    PAGE,
    Ranks,
    Result,
    States,
    attention_inputs,
    one_thread,  # noqa: F401  (fixture)
    packed_states,
    random_states,
    simulated_gather,  # noqa: F401  (fixture)
)

from sparse_cp_ops.cache_store import CacheStore, PrefixCache, block_table, create_cache_writer

pytestmark = pytest.mark.usefixtures("simulated_gather", "one_thread")

VOCABULARY = 5


class Model:
    """States of a token in a layer; those of a key must not depend on what comes later."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.tables = [random_states(VOCABULARY * 256, device) for _ in range(2)]

    def layers(self, prompts: Sequence[Sequence[int]]) -> list[list[States]]:
        rows = [
            torch.tensor([token * 256 + position for position, token in enumerate(prompt)], device=self.device).long()
            for prompt in prompts
        ]
        return [[{name: state[r] for name, state in table.items()} for r in rows] for table in self.tables]

    def forward(
        self, ranks: Ranks, prompts: Sequence[Sequence[int]], prefix_lens: Sequence[int], pages: Sequence[Sequence[int]]
    ) -> Result:
        new_lens = [len(prompt) - prefix for prompt, prefix in zip(prompts, prefix_lens, strict=True)]
        inputs = attention_inputs(new_lens, prefix_lens, block_table(pages, self.device))
        packed = [packed_states(requests, new_lens, prefix_lens, self.device) for requests in self.layers(prompts)]
        return ranks.forward(inputs, packed)

    def from_scratch(self, prompt: Sequence[int]) -> Result:
        pages = list(range(-(-len(prompt) // PAGE)))
        return self.forward(Ranks(1, len(pages), self.device), [prompt], [0], [pages])


def prompt_of(rng: random.Random, beginnings: Sequence[Sequence[int]]) -> list[int]:
    beginning = rng.choice(beginnings)
    tail = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 40))]
    return [*beginning[: rng.randint(0, len(beginning))], *tail]


def rows_of(result: Result, start: int) -> list[torch.Tensor]:
    return [rows[start:] for rows in (*result.out, *result.lse, *result.picks)]


@pytest.mark.parametrize("size", [1, 3])
def test_prompts_served_from_shared_pages_equal_prompts_from_scratch(device: str, size: int) -> None:
    """Two at a time, hits on one, both or none, and so few pages that old ones are given away all the time."""
    rng = random.Random(3)
    model, ranks, prefix_cache = Model(device), Ranks(size, 14, device), PrefixCache(14, PAGE)
    beginnings = [[rng.randrange(VOCABULARY) for _ in range(4 * PAGE)] for _ in range(3)]
    hits = misses = 0
    for _ in range(14):
        prompts = [prompt_of(rng, beginnings) for _ in range(2)]
        pages = [prefix_cache.match_prefix(prompt) for prompt in prompts]
        prefix_lens = [len(found) * PAGE for found in pages]
        for prompt, found in zip(prompts, pages, strict=True):
            found += prefix_cache.allocate(-(-len(prompt) // PAGE) - len(found))
        result = model.forward(ranks, prompts, prefix_lens, pages)
        start = 0
        for prompt, prefix, found in zip(prompts, prefix_lens, pages, strict=True):
            end = start + len(prompt) - prefix
            for mine, expected in zip(rows_of(result, start), rows_of(model.from_scratch(prompt), prefix), strict=True):
                assert torch.equal(mine[: end - start], expected)
            start = end
            hits, misses = hits + (prefix > 0), misses + (prefix == 0)
            prefix_cache.insert(prompt, found)
            prefix_cache.release(found)
    assert hits >= 5
    assert misses >= 5


def test_a_prompt_restored_from_the_store_equals_one_from_scratch(device: str) -> None:
    """All device pages are wiped in between, and the restored ones are others than before."""
    rng = random.Random(4)
    prompt = [rng.randrange(VOCABULARY) for _ in range(5 * PAGE + 3)]
    model, ranks = Model(device), Ranks(1, 12, device)
    cache = ranks.ranks[0].cache
    store = CacheStore(cache, 13 * cache.page_bytes, "a model")
    pages = [7, 3, 5, 0, 9, 1]
    inputs = attention_inputs([len(prompt)], [0], block_table([pages], device))
    model.forward(ranks, [prompt], [0], [pages])
    writer = create_cache_writer(store, inputs, [prompt], [pages])
    assert writer is not None
    with writer:
        for layer in range(2):
            writer.write_layer(layer)
    assert store.flush()
    for layer_pages in (*cache.mla, *cache.indexer):
        if layer_pages is not None:
            layer_pages.fill_(255)
    longer = [*prompt, *(rng.randrange(VOCABULARY) for _ in range(20))]
    other_pages = [11, 10, 9, 8, 7, 6, 5]
    restored = store.read(store.page_keys(longer), other_pages)
    assert restored == 5
    result = model.forward(ranks, [longer], [restored * PAGE], [other_pages])
    for mine, expected in zip(rows_of(result, 0), rows_of(model.from_scratch(longer), restored * PAGE), strict=True):
        assert not mine.isnan().any()
        assert torch.equal(mine, expected)
    store.close()
