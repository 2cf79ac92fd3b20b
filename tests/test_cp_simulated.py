"""Context parallelism at op level is invisible: same bits as one rank, cache bytes included."""

import copy
import random
from collections.abc import Sequence

import pytest
import torch
from cp_harness import (
    PAGE,
    Rank,
    Ranks,
    Scenario,
    one_thread,  # noqa: F401  (fixture)
    poisoned_cache,
    simulated_gather,  # noqa: F401  (fixture)
)

from sparse_cp_ops import reference

pytestmark = pytest.mark.usefixtures("simulated_gather", "one_thread")

SIZES = [1, 2, 3, 4, 8]
SPLITS = ["zigzag", "interleave"]


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


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_every_prefix_up_to_three_pages(device: str, size: int, split: str) -> None:
    """A prefix hit, page aligned or not, changes nothing: not even with one new token, or on some requests only."""
    prefixes = [0, 1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE - 1, 2 * PAGE, 2 * PAGE + 5, 3 * PAGE]
    for new_lens in ([1] * 9, [1, 2, PAGE, 40, 1, 3, 5, 2 * PAGE, 7]):
        totals = [prefix + new for prefix, new in zip(prefixes, new_lens, strict=True)]
        scenario = Scenario(totals, device)
        one_shot = scenario.ranks(1)
        expected = scenario.run(one_shot, totals, [0] * 9)
        many = scenario.ranks(size, split=split)
        for rank in many.ranks:  # the pages that other requests have left behind
            copy_tokens(one_shot, rank, prefixes, scenario.block_table)
        result = scenario.run(many, new_lens, prefixes)
        result.assert_bitwise(expected, scenario.rows(new_lens, prefixes))
        many.assert_caches_equal(one_shot)


def copy_tokens(source: Ranks, target: Rank, lengths: Sequence[int], block_table: torch.Tensor) -> None:
    """The first tokens of each request, byte by byte, both caches."""
    for request, length in enumerate(lengths):
        for position in range(length):
            page, offset = int(block_table[request, position // PAGE]), position % PAGE
            cache = source.ranks[0].cache
            for mine, theirs in zip(target.cache.mla, cache.mla, strict=True):
                mine[page, offset] = theirs[page, offset]
            for mine_index, theirs_index in zip(target.cache.indexer, cache.indexer, strict=True):
                if mine_index is None or theirs_index is None:
                    continue
                for start, width in ((offset * 128, 128), (PAGE * 128 + offset * 4, 4)):
                    mine_index[page, start : start + width] = theirs_index[page, start : start + width]


@pytest.mark.parametrize("seed", range(6))
def test_any_chunking_of_the_prompts_equals_one_shot(device: str, seed: int) -> None:
    """Chunks of random lengths, requests out of step, every chunk on another number of ranks and with another split."""
    rng = random.Random(seed)
    totals = [rng.choice([1, PAGE, 3 * PAGE + 1, 100, 77]) for _ in range(3)]
    scenario = Scenario(totals, device)
    one_shot = scenario.ranks(1)
    expected = scenario.run(one_shot, totals, [0] * len(totals))
    done = [0] * len(totals)
    ranks = None
    while done != totals:
        new_lens = [rng.randint(0, min(40, total - start)) for total, start in zip(totals, done, strict=True)]
        next_ranks = scenario.ranks(rng.choice([1, 2, 3, 8]), split=rng.choice(SPLITS))
        for rank in next_ranks.ranks:
            if ranks is not None:
                rank.cache = copy.deepcopy(ranks.ranks[0].cache)
        ranks = next_ranks
        scenario.run(ranks, new_lens, done).assert_bitwise(expected, scenario.rows(new_lens, done))
        done = [start + new for start, new in zip(done, new_lens, strict=True)]
    assert ranks is not None
    ranks.assert_caches_equal(one_shot)


@pytest.mark.parametrize("split", SPLITS)
def test_page_boundaries(device: str, split: str) -> None:
    """Prefix and end of the request one token before, on and behind page ends, in every combination."""
    edges = [PAGE - 1, PAGE, PAGE + 1, 2 * PAGE - 1, 2 * PAGE, 2 * PAGE + 1]
    cases = [(prefix, end) for prefix in [0, *edges] for end in [*edges, 3 * PAGE] if prefix < end]
    prefixes, totals = [prefix for prefix, _ in cases], [end for _, end in cases]
    new_lens = [end - prefix for prefix, end in cases]
    scenario = Scenario(totals, device)
    one_shot, many = scenario.ranks(1), scenario.ranks(3, split=split)
    expected = scenario.run(one_shot, totals, [0] * len(totals))
    scenario.run(many, prefixes, [0] * len(totals))
    scenario.run(many, new_lens, prefixes).assert_bitwise(expected, scenario.rows(new_lens, prefixes))
    many.assert_caches_equal(one_shot)


@pytest.mark.parametrize("decode_mode", ["replicated", "batch_slice"])
def test_decode_after_context_parallel_prefill(device: str, decode_mode: str) -> None:
    """64 steps of three requests, over page ends; one request pauses every other step."""
    steps, prompts = 64, [70, 1, 2 * PAGE]
    totals = [prompt + steps for prompt in prompts]
    scenario = Scenario(totals, device)
    one_shot, many = scenario.ranks(1), scenario.ranks(4, decode_mode=decode_mode)
    expected = scenario.run(one_shot, totals, [0, 0, 0])
    scenario.run(many, prompts, [0, 0, 0])
    done = list(prompts)
    for step in range(steps):
        new_lens = [1, step % 2, 1]
        result = scenario.run(many, new_lens, done, is_prefill=False)
        assert {plan.head_mode for plan in many.plans} == {"full" if decode_mode == "replicated" else decode_mode}
        assert not any(plan.use_cp for plan in many.plans)
        result.assert_bitwise(expected, scenario.rows(new_lens, done))
        done = [start + new for start, new in zip(done, new_lens, strict=True)]


def test_a_rank_without_rows_takes_part(device: str) -> None:
    scenario = Scenario([2], device)
    many = scenario.ranks(8, split="interleave")
    expected = scenario.run(scenario.ranks(1), [2], [0])
    scenario.run(many, [2], [0]).assert_bitwise(expected)
    assert [int((plan.req_ids >= 0).sum()) for plan in many.plans] == [1, 1, 0, 0, 0, 0, 0, 0]
    assert {plan.local_rows for plan in many.plans} == {1}


@pytest.mark.parametrize("new_lens", [[], [0], [0, 0]])
def test_nothing_to_compute(device: str, new_lens: list[int]) -> None:
    scenario = Scenario([PAGE] * len(new_lens), device)
    for ranks in (scenario.ranks(1), scenario.ranks(4)):
        result = scenario.run(ranks, new_lens, [0] * len(new_lens))
        assert [out.shape[0] for out in result.out] == [0, 0]


def test_dynamic_activation_gives_the_same_bits(device: str) -> None:
    """Batches below and at the threshold: the first ones run whole on every rank."""
    for new_lens, split_rows in (([30, 33], False), ([30, 34], True)):
        scenario = Scenario(new_lens, device)
        one, many = scenario.ranks(1), scenario.ranks(3, min_tokens=64)
        expected = scenario.run(one, new_lens, [0, 0])
        scenario.run(many, new_lens, [0, 0]).assert_bitwise(expected)
        assert {plan.use_cp for plan in many.plans} == {split_rows}
        many.assert_caches_equal(one)


def test_one_rank_against_the_reference_ops(device: str) -> None:
    """What all tests above compare with: the same pipeline made of the plain PyTorch definitions."""
    totals = [100, 9]
    scenario = Scenario(totals, device)
    ranks = scenario.ranks(1)
    result = scenario.run(ranks, totals, [0, 0])
    packed = {name: state.cpu() for name, state in scenario.batch(totals, [0, 0])[0].items()}
    rank, plan, config = ranks.ranks[0], ranks.plans[0], ranks.config
    cache = poisoned_cache(config, scenario.pages)
    block_table, table = scenario.block_table.cpu(), rank.table.cpu()
    req_ids = torch.tensor([0] * 100 + [1] * 9, dtype=torch.int32)
    positions = torch.cat([torch.arange(100), torch.arange(9)]).int()
    # Rows that nobody shares are the packed tokens, without pads.
    assert torch.equal(plan.req_ids.cpu(), req_ids)
    assert torch.equal(plan.positions.cpu(), positions)
    assert torch.equal(plan.restore.cpu(), torch.arange(109, dtype=torch.int32))
    records = torch.empty(109, 656, dtype=torch.uint8)
    reference.pack_mla_kv(packed["compressed_kv"], packed["k_pe"], positions, table, records, True, "ue8m0")
    k_records = torch.empty(109, 132, dtype=torch.uint8)
    q_fp8, q_weights = reference.quant_q_k_cp(
        packed["index_q"],
        packed["index_k"],
        packed["index_weights"],
        positions,
        table,
        k_records,
        False,
        True,
        (128 * 8) ** -0.5,
        "ue8m0",
    )
    indexer_pages = cache.indexer[0]
    assert indexer_pages is not None
    reference.write_kv_cache(records, k_records, req_ids, positions, block_table, cache.mla[0], indexer_pages)
    assert torch.equal(rank.cache.mla[0].cpu(), cache.mla[0])
    assert torch.equal(rank.cache.indexer[0].cpu(), indexer_pages)  # type: ignore[union-attr]
    kv_lens = positions + 1
    scores = reference.indexer_scores_ragged_cp(
        q_fp8, q_weights, indexer_pages, block_table, req_ids, kv_lens, block_table.shape[1] * PAGE
    )
    picks = result.picks[0].cpu()
    for row in range(109):
        chosen = picks[row][picks[row] >= 0].long()
        assert chosen.numel() == min(64, int(kv_lens[row]))
        best = scores[row, : kv_lens[row]].topk(chosen.numel()).values
        # The kernel's fp32 sums against the reference's: cosine difference 5e-6 allows about 3e-3 of a score's size.
        torch.testing.assert_close(scores[row, chosen].sort(descending=True).values, best, rtol=3e-3, atol=3e-3)
    out, lse = reference.sparse_mla_fp8_cp(packed["q"], cache.mla[0], picks, block_table, req_ids, kv_lens, 0.1)
    torch.testing.assert_close(result.out[0].cpu().double(), out.double(), rtol=2.01 / 128, atol=1e-3)
    torch.testing.assert_close(result.lse[0].cpu().double(), lse.double(), rtol=8.01 / 65536, atol=1e-5)
