"""Context parallelism at op level is invisible: same bits as one rank, cache bytes included."""

import itertools
from collections.abc import Sequence

import pytest
import torch
from builders import num_pages, random_block_table
from cp_harness import (
    PAGE,
    Ranks,
    Result,
    States,
    attention_inputs,
    packed_states,
    random_states,
    simulated_gather,  # noqa: F401  (fixture)
)

pytestmark = pytest.mark.usefixtures("simulated_gather")

SIZES = [1, 2, 3, 4, 8]
SPLITS = ["zigzag", "interleave"]
NUM_LAYERS = 2


class Scenario:
    """Requests with their tokens' states in every layer, and their pages."""

    def __init__(self, totals: Sequence[int], device: str) -> None:
        self.totals = list(totals)
        self.layers = [[random_states(total, device) for total in totals] for _ in range(NUM_LAYERS)]
        self.block_table = random_block_table(list(totals), PAGE).to(device)
        self.pages = num_pages(list(totals), PAGE)
        self.device = device

    def ranks(self, size: int, **changes: object) -> Ranks:
        return Ranks(size, self.pages, self.device, **changes)  # type: ignore[arg-type]

    def batch(self, new_lens: Sequence[int], prefix_lens: Sequence[int]) -> list[States]:
        return [packed_states(requests, new_lens, prefix_lens) for requests in self.layers]

    def run(self, ranks: Ranks, new_lens: Sequence[int], prefix_lens: Sequence[int], is_prefill: bool = True) -> Result:
        inputs = attention_inputs(new_lens, prefix_lens, self.block_table, is_prefill)
        return ranks.forward(inputs, self.batch(new_lens, prefix_lens))

    def rows(self, new_lens: Sequence[int], prefix_lens: Sequence[int]) -> torch.Tensor:
        """Rows of the one-shot run of all totals that a batch of chunks corresponds to."""
        starts = [0, *itertools.accumulate(self.totals)]
        return torch.cat(
            [
                torch.arange(start + prefix, start + prefix + new)
                for start, new, prefix in zip(starts, new_lens, prefix_lens, strict=False)
            ]
        ).to(self.device)


MIXED_BATCHES = [
    [1],
    [2],
    [7],
    [15, 16, 17],
    [1, 1, 1],
    [3, 90, 1, 16],
    [0, 5, 0],
    [131],
    [65, 64, 63],
    [2, 3, 5, 7, 11, 13, 17, 19],
]


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("size", SIZES)
def test_mixed_batches_equal_one_rank(device: str, size: int, split: str) -> None:
    for new_lens in MIXED_BATCHES:
        scenario = Scenario(new_lens, device)
        no_prefix = [0] * len(new_lens)
        one, many = scenario.ranks(1), scenario.ranks(size, split=split)
        expected = scenario.run(one, new_lens, no_prefix)
        scenario.run(many, new_lens, no_prefix).assert_bitwise(expected)
        many.assert_caches_equal(one)
