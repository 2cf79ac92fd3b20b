from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from indexer_cases import FLOAT_MAX, IndexerCase, case_with_scores, random_case
from torch import Tensor

from sparse_cp_ops import ops, reference

MIB = 2**20
SPECIAL = [0.0, -0.0, 1.0, -1.0, 2.0**-149, -(2.0**-149), 2.0**-127, FLOAT_MAX, -FLOAT_MAX]
SPECIAL += [torch.inf, -torch.inf, torch.nan]

PATTERNS: dict[str, Callable[[int], Tensor]] = {
    "equal": lambda n: torch.full((n,), 0.75),
    "two levels": lambda n: torch.randint(0, 2, (n,)).float(),
    "sixteen levels": lambda n: torch.randint(0, 16, (n,)).float() - 8,
    "one bin": lambda n: 1 + torch.randint(0, 2**12, (n,)) * 2.0**-23,  # equal in the upper 20 bits
    "increasing": lambda n: torch.arange(n).float() + 1,  # every key beats all before it
    "decreasing": lambda n: torch.arange(n, 0, -1).float(),
    "denormal": lambda n: torch.randint(0, 4000, (n,)) * 2.0**-149,
    "special": lambda n: torch.tensor(SPECIAL)[torch.randint(0, len(SPECIAL), (n,))],
    "one outlier": lambda n: torch.where(torch.arange(n) == n // 2, 1e30, torch.rand(n) * 1e-30),
    "normal": lambda n: torch.randn(n),
}


def topk_of(case: IndexerCase, topk: int, device: str, workspace_bytes: int = 0, precision: str = "fp32") -> Tensor:
    return ops.indexer_topk_ragged_cp(*case.to(device).tensors, topk, workspace_bytes, precision).cpu()


def sorted_reference(case: IndexerCase, topk: int, device: str, precision: str = "fp32") -> Tensor:
    """The best of the scores that the op itself computes, by sorting them all."""
    capacity = case.block_table.shape[1] * case.page_size
    is_pad = (case.req_ids < 0) | (case.req_ids >= case.block_table.shape[0])
    lengths = case.kv_lens.clamp(0, capacity).masked_fill(is_pad, 0).tolist()
    scores = ops.indexer_scores_ragged_cp(*case.to(device).tensors, max([0, *lengths]), precision).cpu()
    return reference.select_topk(scores, lengths, topk)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("topk", [64, 512])
def test_prescribed_scores(device: str, pattern: str, topk: int) -> None:
    lengths = [0, 1, topk - 1, topk, topk + 1, topk + 63, 2 * topk, 2 * topk + 1, 5 * topk, 3000]
    scores = PATTERNS[pattern](3000)
    selected = topk_of(case_with_scores(scores, 16, lengths), topk, device)
    assert torch.equal(selected, reference.select_topk(scores.expand(len(lengths), -1), lengths, topk))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_long_rows_of_prescribed_scores(device: str, pattern: str) -> None:
    for longest in (20_000, 50_000, 100_000):  # a cluster of blocks of 128, 256 or 512 threads a row
        lengths = [longest, 2047, 2048, 2049, longest * 7 // 10 + 1]
        scores = PATTERNS[pattern](longest)
        selected = topk_of(case_with_scores(scores, 64, lengths), 2048, device)
        assert torch.equal(selected, reference.select_topk(scores.expand(len(lengths), -1), lengths, 2048))


@pytest.mark.cuda
@pytest.mark.parametrize("pattern", [*PATTERNS, "alike in runs", "mostly nan"])
def test_many_long_rows_of_prescribed_scores(pattern: str) -> None:
    """More rows than clusters run at once: a filter first, all radix steps where it fails."""
    for longest in (20_000, 70_000, 140_000):
        lengths = [longest, 2047, 2048, 2049, 2064, 4096, 4097, *(longest - 1009 * r % longest for r in range(60))]
        if pattern == "alike in runs":
            scores = torch.randn(longest // 64 + 1).repeat_interleave(64)[:longest] + torch.randn(longest) / 64
        elif pattern == "mostly nan":
            scores = torch.where(torch.rand(longest) < 0.9, torch.nan, torch.randn(longest))
        else:
            scores = PATTERNS[pattern](longest)
        selected = topk_of(case_with_scores(scores, 64, lengths), 2048, "cuda")
        assert torch.equal(selected, reference.select_topk(scores.cuda().expand(len(lengths), -1), lengths, 2048).cpu())


@pytest.mark.cuda
@pytest.mark.parametrize("rows", [65, 128, 129, 140])
def test_long_rows_of_every_path(rows: int) -> None:
    """More rows than a CTA plans for itself, and more than multiprocessors, which fill their memory with scores."""
    longest = 70_000
    lengths = [2048, 8192, 65_536, 65_537, *(longest - 1013 * r % (longest - 9000) for r in range(rows - 4))]
    for scores in (torch.randn(longest), torch.randint(0, 3, (longest,)).float()):
        selected = topk_of(case_with_scores(scores, 64, lengths), 2048, "cuda")
        assert torch.equal(selected, reference.select_topk(scores.cuda().expand(rows, -1), lengths, 2048).cpu())


@pytest.mark.parametrize("pattern", ["two levels", "increasing", "normal"])
def test_a_million_keys(device: str, pattern: str) -> None:
    lengths = [2**20, 2**20 - 33]
    scores = PATTERNS[pattern](2**20)
    selected = topk_of(case_with_scores(scores, 128, lengths), 2048, device)
    assert torch.equal(selected, reference.select_topk(scores.expand(2, -1), lengths, 2048))


@settings(max_examples=40, deadline=None)
@given(
    levels=st.lists(st.sampled_from(SPECIAL), min_size=1, max_size=4),
    length=st.integers(0, 400),
    topk=st.sampled_from([64, 128, 192]),
    page_size=st.sampled_from([16, 32, 64, 128]),
    seed=st.integers(0, 2**16),
)
def test_few_levels(levels: list[float], length: int, topk: int, page_size: int, seed: int) -> None:
    torch.manual_seed(seed)
    scores = torch.tensor(levels)[torch.randint(0, len(levels), (400,))]
    selected = topk_of(case_with_scores(scores, page_size, [length]), topk, "cpu")
    assert torch.equal(selected, reference.select_topk(scores.unsqueeze(0), [length], topk))


def test_equal_zeros_are_ranked_by_position(device: str) -> None:
    scores = torch.tensor([-0.0, 0.0]).repeat(100)
    assert topk_of(case_with_scores(scores), 64, device).tolist() == [list(range(64))]


def test_nan_only_fills_up(device: str) -> None:
    scores = torch.full((300,), torch.nan)
    scores[[5, 70, 299]] = -torch.inf
    expected = sorted([*[i for i in range(300) if i not in (5, 70, 299)][:61], 5, 70, 299])
    assert topk_of(case_with_scores(scores), 64, device).tolist() == [expected]


@pytest.mark.parametrize("page_size", [16, 64])
def test_missing_pages(device: str, page_size: int) -> None:
    """Holes inside and at the end; few enough pages that keys without one have to fill up."""
    scores = torch.rand(640) + 1
    case = case_with_scores(scores, page_size, [640, 640, 600, 64, 65])
    table = case.block_table.repeat(2, 1)
    keep = torch.zeros(table.shape[1], dtype=torch.bool)
    keep[[1, 3]] = True
    table[1, ~keep] = torch.tensor([-1, -(2**31), 2**31 - 1, table.shape[1] + 3], dtype=torch.int32).repeat(99)[
        : int((~keep).sum())
    ]
    case = replace(case, block_table=table, req_ids=torch.tensor([0, 1, 1, 1, 1], dtype=torch.int32))
    holes = scores.masked_fill(~keep.repeat_interleave(page_size)[:640], torch.nan)
    expected = reference.select_topk(torch.stack([scores, *[holes] * 4]), [640, 640, 600, 64, 65], 192)
    assert torch.equal(topk_of(case, 192, device), expected)


@pytest.mark.parametrize("heads", [8, 16, 24, 32, 64])
@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
def test_several_requests(device: str, heads: int, page_size: int) -> None:
    rows = [(0, 700), (1, 63), (1, 64), (1, 65), (-1, 0), (0, 1), (1, 0), (0, 701), (2, 129), (0, 702), (2, 128)]
    case = random_case(rows, heads, page_size)
    assert torch.equal(topk_of(case, 128, device), sorted_reference(case, 128, device))


def test_f16_mode_ranks_its_own_scores(device: str) -> None:
    case = random_case([(0, 900), (1, 400)], heads=32).encoded_for_f16()
    assert torch.equal(topk_of(case, 128, device, 0, "f16"), sorted_reference(case, 128, device, "f16"))


@pytest.mark.parametrize("pattern", ["equal", "two levels", "sixteen levels", "one bin", "increasing", "decreasing"])
def test_prescribed_scores_in_f16_mode(device: str, pattern: str) -> None:
    """Queries of a half instead of one: all products and weights are exact in half precision, scores are halved."""
    lengths = [0, 1, 511, 512, 513, 3000]
    scores = PATTERNS[pattern](3000)
    case = case_with_scores(scores, 16, lengths)
    half = torch.tensor(0.5).to(torch.float8_e4m3fn).view(torch.uint8)
    case = replace(case, q_fp8=torch.where(case.q_fp8 != 0, half, case.q_fp8))
    selected = topk_of(case, 512, device, 0, "f16")
    assert torch.equal(selected, reference.select_topk(scores.expand(len(lengths), -1), lengths, 512))


def test_hostile_rows(device: str) -> None:
    case = random_case([(0, 100), (0, 101), (1, 64), (1, 10), (0, 5), (1, 7)], page_size=16)
    case.req_ids[:] = torch.tensor([2, -7, 2**31 - 1, -(2**31), 0, 1])
    case.kv_lens[:] = torch.tensor([100, 101, 64, 10, -5, 2**31 - 1])
    selected = topk_of(case, 64, device)
    assert (selected[:5] == -1).all()
    assert torch.equal(selected, sorted_reference(case, 64, device))


def test_result_does_not_depend_on_the_workspace(device: str) -> None:
    for rows in (random_case([(r % 2, 6000 + r) for r in range(40)], 16), random_case([(0, 30_000), (0, 30_001)], 64)):
        default = topk_of(rows, 2048, device)
        assert torch.equal(default, sorted_reference(rows, 2048, device))
        for workspace in (MIB, 3 * MIB, 64 * MIB, 2**40):
            assert torch.equal(topk_of(rows, 2048, device, workspace), default)


def test_thread_counts_give_the_same_result() -> None:
    cases = [
        random_case([(0, 33_000), (0, 33_001), (1, 5000)], 8),
        random_case([(r % 3, 900 + r) for r in range(50)], 8),
    ]
    expected = [sorted_reference(case, 512, "cpu") for case in cases]
    before = torch.get_num_threads()
    try:
        for threads in (1, 3, 16):
            torch.set_num_threads(threads)
            for case, best in zip(cases, expected, strict=True):
                assert torch.equal(topk_of(case, 512, "cpu"), best)
                assert torch.equal(topk_of(case, 512, "cpu", MIB), best)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("level", ["generic", "avx2", "avx512", "avx512_bf16"])
def test_instruction_levels(monkeypatch: pytest.MonkeyPatch, level: str) -> None:
    monkeypatch.setenv("SPARSE_CP_OPS_CPU", level)
    for pattern in PATTERNS.values():
        scores = pattern(1500)
        selected = topk_of(case_with_scores(scores, 32, [1500, 257]), 256, "cpu")
        assert torch.equal(selected, reference.select_topk(scores.expand(2, -1), [1500, 257], 256))


def test_rows_do_not_influence_each_other(device: str) -> None:
    rows = [(r % 3, 200 + 37 * r) for r in range(40)]
    case = random_case(rows, heads=16)
    selected = topk_of(case, 320, device)
    order = torch.randperm(len(rows))
    assert torch.equal(topk_of(case.rows(order), 320, device), selected[order])
    for subset in ([0], [39], [3, 4], list(range(0, 40, 3)), list(range(5, 38))):
        assert torch.equal(topk_of(case.rows(subset), 320, device), selected[subset])


def test_same_bits_in_a_hundred_runs(device: str) -> None:
    case = case_with_scores(PATTERNS["sixteen levels"](3000), 64, [3000, 2999, 700])
    first = topk_of(case, 512, device)
    for _ in range(100):
        assert torch.equal(topk_of(case, 512, device), first)


def test_many_rows_and_none(device: str) -> None:
    """More rows than a grid dimension of 65,535 allows; no rows, requests, pages or columns."""
    rows = 70_000
    one = random_case([(0, 80)], heads=8, page_size=16)
    case = one.rows(torch.zeros(rows, dtype=torch.long))
    case.kv_lens[:] = torch.arange(rows) % 81
    lengths = list(range(81))
    scores = ops.indexer_scores_ragged_cp(*one.to(device).tensors, 80).cpu()
    each_length = reference.select_topk(scores.expand(81, -1), lengths, 64)
    assert torch.equal(topk_of(case, 64, device), each_length[torch.arange(rows) % 81])

    assert topk_of(one.rows([]), 64, device).shape == (0, 64)
    assert (topk_of(replace(one, block_table=one.block_table[:0]), 64, device) == -1).all()
    assert (topk_of(replace(one, block_table=one.block_table[:, :0]), 64, device) == -1).all()
    without_pages = topk_of(replace(one, indexer_cache=one.indexer_cache[:0]), 64, device)
    assert without_pages.tolist() == [list(range(64))]


def temporary_bytes(case: IndexerCase, topk: int, device: str, workspace_bytes: int) -> int:
    """Peak of the memory that a call holds beside its arguments and its result."""
    on_device = case.to(device).tensors
    result_bytes = case.q_fp8.shape[0] * topk * 4
    if device == "cuda":
        ops.indexer_topk_ragged_cp(*on_device, topk, workspace_bytes)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        ops.indexer_topk_ragged_cp(*on_device, topk, workspace_bytes)
        return torch.cuda.max_memory_allocated() - before - result_bytes
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        ops.indexer_topk_ragged_cp(*on_device, topk, workspace_bytes)
    held = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    assert peak >= result_bytes
    return peak - result_bytes


@pytest.mark.parametrize("workspace_mib", [1, 64])
@pytest.mark.parametrize(("rows", "keys", "heads"), [(256, 16_384, 16), (2, 65_536, 64)])
def test_peak_memory_within_the_workspace(device: str, rows: int, keys: int, heads: int, workspace_mib: int) -> None:
    """The scores alone would take 16 MiB in the first case."""
    case = random_case([(0, keys - rows + r) for r in range(rows)], heads)
    used = temporary_bytes(case, 2048, device, workspace_mib * MIB)
    assert 0 < used <= workspace_mib * MIB


@pytest.mark.cuda
def test_short_rows_need_no_scores() -> None:
    """With at most topk keys a request nothing is scored, so nothing is kept."""
    case = random_case([(0, 2048 - r) for r in range(64)], 64)
    assert temporary_bytes(case, 2048, "cuda", 64 * MIB) == 0
    assert torch.equal(topk_of(case, 2048, "cuda"), sorted_reference(case, 2048, "cuda"))


def test_long_context_within_64_mib(device: str) -> None:
    """1024 rows x 65,536 keys, whose scores alone would take 256 MiB: the same picks as with room for everything."""
    case = random_case([(0, 64_513 + r) for r in range(1024)], heads=8)
    assert 0 < temporary_bytes(case, 2048, device, 64 * MIB) <= 64 * MIB
    assert torch.equal(topk_of(case, 2048, device, 64 * MIB), topk_of(case, 2048, device, 2048 * MIB))
