"""Many rows with many keys: on Hopper thresholds from a sample and survivor lists, elsewhere row chunk by row chunk."""

import pytest
import torch
from indexer_cases import case_with_scores, random_case
from test_indexer_topk_ragged_cp import PATTERNS

from sparse_cp_ops import ops, reference

pytestmark = pytest.mark.cuda
MIB = 2**20
KEYS, ROWS, TOPK = 20_000, 1100, 2048


def repeated_lengths() -> list[int]:
    """ROWS lengths of 44 kinds, each in 25 places."""
    edges = [0, 1, TOPK - 1, TOPK, TOPK + 1, 4095, 4096, 4097, 8191, 8192, 8193, KEYS - 1, KEYS]
    kinds = edges + torch.randint(1, KEYS, (ROWS // 25 - len(edges),)).tolist()
    return [kinds[i] for i in (torch.randperm(ROWS) % len(kinds)).tolist()]


@pytest.mark.parametrize("pattern", [*PATTERNS, "one lane"])
def test_prescribed_scores(pattern: str) -> None:
    lengths = repeated_lengths()
    if pattern == "one lane":  # all winners in one of 32 lists
        scores = torch.where(torch.arange(KEYS) % 64 == 5, 2.0, 1.0) * (1 + torch.rand(KEYS))
    else:
        scores = PATTERNS[pattern](KEYS)
    case = case_with_scores(scores, 64, lengths).to("cuda")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    selected = ops.indexer_topk_ragged_cp(*case.tensors, TOPK, 0)
    assert torch.cuda.max_memory_allocated() - before <= 256 * MIB + selected.nbytes
    kinds = sorted(set(lengths))
    expected = reference.select_topk(scores.expand(len(kinds), -1), kinds, TOPK)
    assert torch.equal(selected.cpu(), expected[[kinds.index(length) for length in lengths]])
    for workspace in (8 * MIB, 64 * MIB, 2**40):  # row and key chunks, two chunks of rows, one
        assert torch.equal(ops.indexer_topk_ragged_cp(*case.tensors, TOPK, workspace), selected)


@pytest.mark.parametrize("precision", ["fp32", "f16"])
def test_ragged_batch(precision: str) -> None:
    rows = [(0, n) for n in range(19_000, 19_600)] + [(1, n) for n in range(24_500, 25_000)] + [(-1, 0)] * 21
    case = random_case(rows, heads=32)
    if precision == "f16":
        case = case.encoded_for_f16()
    case.block_table[0, 7] = -1  # keys without a page
    case = case.to("cuda")
    selected = ops.indexer_topk_ragged_cp(*case.tensors, TOPK, 0, precision)
    some = [0, 599, 600, 1099, 1100, *range(5, 1100, 91)]
    scores = ops.indexer_scores_ragged_cp(*case.rows(some).tensors, 25_000, precision).cpu()
    assert torch.equal(selected[some].cpu(), reference.select_topk(scores, [rows[i][1] for i in some], TOPK))
    permutation = torch.randperm(len(rows), device="cuda")
    permuted = ops.indexer_topk_ragged_cp(*case.rows(permutation).tensors, TOPK, 0, precision)
    assert torch.equal(permuted, selected[permutation])
    few = ops.indexer_topk_ragged_cp(*case.rows(some).tensors, TOPK, 0, precision)  # another way to the same
    assert torch.equal(few, selected[some])


@pytest.mark.parametrize("precision", ["fp32", "f16"])
def test_same_bits_in_a_hundred_runs(precision: str) -> None:
    case = random_case([(0, 17_000 + 3 * i) for i in range(ROWS)], heads=64).encoded_for_f16().to("cuda")
    first = ops.indexer_topk_ragged_cp(*case.tensors, TOPK, 0, precision)
    for _ in range(100):
        assert torch.equal(ops.indexer_topk_ragged_cp(*case.tensors, TOPK, 0, precision), first)


def test_neighbours_that_score_alike() -> None:
    """Scores in runs longer than what is sampled at once: thresholds need wider margins."""
    scores = torch.randn(KEYS // 100).repeat_interleave(100) + torch.randn(KEYS) / 8
    lengths = torch.randint(5000, KEYS + 1, (ROWS,)).tolist()
    selected = ops.indexer_topk_ragged_cp(*case_with_scores(scores, 64, lengths).to("cuda").tensors, TOPK, 0)
    assert torch.equal(selected.cpu(), reference.select_topk(scores.expand(ROWS, -1), lengths, TOPK))


@pytest.mark.parametrize("longest", [2100, 4096, 4200, 9000])
def test_wide_block_table_of_a_short_prompt(monkeypatch: pytest.MonkeyPatch, longest: int) -> None:
    """The sample may be all there is; the workspace holds random bytes, which every kernel must overwrite or ignore."""
    case = random_case([(0, KEYS), *[(0, longest - i) for i in range(ROWS - 1)]], heads=8)
    case.kv_lens[0] = longest
    on_device = case.to("cuda")
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    torch.cuda.empty_cache()
    garbage = torch.randint(0, 256, (320 * MIB,), dtype=torch.uint8, device="cuda")
    del garbage
    selected = ops.indexer_topk_ragged_cp(*on_device.tensors, TOPK, 0).cpu()
    some = [0, 1, 2, 500, ROWS - 1]
    scores = ops.indexer_scores_ragged_cp(*case.rows(some).to("cuda").tensors, longest).cpu()
    assert torch.equal(selected[some], reference.select_topk(scores, case.kv_lens[some].tolist(), TOPK))


def test_graph_with_changing_lengths() -> None:
    case = random_case([(0, 19_000 + i) for i in range(ROWS)], heads=8).to("cuda")
    ops.indexer_topk_ragged_cp(*case.tensors, TOPK, 0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        selected = ops.indexer_topk_ragged_cp(*case.tensors, TOPK, 0)
    for cut in (0, 7_000, 16_000, 17_500):
        case.kv_lens.copy_(torch.arange(19_000 - cut, 19_000 - cut + ROWS))
        graph.replay()
        assert torch.equal(selected, ops.indexer_topk_ragged_cp(*case.tensors, TOPK, 4 * MIB))
