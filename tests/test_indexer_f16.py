"""What `precision="f16"` does to the picks: few differ from those of exact scores, all of them near ties."""

from dataclasses import replace

import pytest
import torch
from builders import num_pages, random_block_table, slots_of
from indexer_cases import IndexerCase
from torch import Tensor

from sparse_cp_ops import ops, reference

ROWS, KEYS, HEADS, TOPK = 24, 6000, 64, 512


def encoded(vectors: Tensor, absmax: float) -> tuple[Tensor, Tensor]:
    """e4m3 bytes with the given largest magnitude a vector, and their scales."""
    scale = vectors.abs().amax(-1) / absmax
    return (vectors / scale.unsqueeze(-1)).to(torch.float8_e4m3fn).view(torch.uint8), scale


def case_of(q: Tensor, k: Tensor, weights: Tensor, q_absmax: float) -> IndexerCase:
    """One request whose last rows see all keys up to their own; q [L,Hi,128], k [S,128], weights [L,Hi] unquantised."""
    rows, count = len(q), len(k)
    q8, q_scale = encoded(q, q_absmax)
    k8, k_scale = encoded(k, 448.0)
    table, pages = random_block_table([count], 64), num_pages([count], 64)
    slots = slots_of(table, 0, count, 64)
    values, scales = torch.zeros(pages * 64, 128, dtype=torch.uint8), torch.zeros(pages * 64)
    values[slots], scales[slots] = k8, k_scale
    cache = torch.cat([values.view(pages, -1), scales.view(pages, -1).view(torch.uint8)], 1)
    lengths = torch.arange(count - rows + 1, count + 1, dtype=torch.int32)
    return IndexerCase(q8, weights * q_scale, cache, table, torch.zeros(rows, dtype=torch.int32), lengths)


def random_vectors() -> tuple[Tensor, Tensor]:
    return torch.randn(ROWS, HEADS, 128), torch.randn(KEYS, 128)


def peaked_vectors() -> tuple[Tensor, Tensor]:
    """Keys in topics that change along the text, queries that look for two of them, and a few keys that stand out."""
    topics = torch.nn.functional.normalize(torch.randn(40, 128), dim=1) * 11
    k = topics[torch.arange(KEYS) // 50 % 40] + torch.randn(KEYS, 128)
    k[torch.randperm(KEYS)[:30]] *= 4
    wanted = topics[torch.randint(0, 40, (ROWS, 2))].mean(1)
    return wanted.unsqueeze(1) + torch.randn(ROWS, HEADS, 128), k


@pytest.mark.parametrize("vectors", [random_vectors, peaked_vectors])
def test_picks_are_those_of_exact_scores_but_for_near_ties(device: str, vectors: object) -> None:
    assert callable(vectors)
    q, k = vectors()
    case = case_of(q, k, torch.rand(ROWS, HEADS), 0.875)
    picks = ops.indexer_topk_ragged_cp(*case.to(device).tensors, TOPK, 0, "f16").cpu().long()
    scores = ops.indexer_scores_ragged_cp(*case.to(device).tensors, KEYS, "f16").cpu().double()
    exact = reference.indexer_scores_ragged_cp(
        *replace(case, q_weights=case.q_weights.double()).tensors, KEYS, "fp32"
    ).double()
    lengths = case.kv_lens.tolist()
    best = reference.select_topk(exact.float(), lengths, TOPK).long()
    differing = 0
    for row, length in enumerate(lengths):
        error = (scores - exact)[row, :length].abs().max()
        assert error <= 1e-2 * exact[row, :length].std()
        cut = exact[row, best[row]].min()
        # A key that only f16 picks lies at most two errors below the cut: its own, and that of a key it displaces.
        assert exact[row, picks[row]].min() >= cut - 2 * error
        differing += int((~torch.isin(picks[row], best[row])).sum())
    # About keys * density at the cut * error = 6000 * 0.17 * 6e-4 keys a row lie so close to the cut.
    assert differing <= 0.01 * ROWS * TOPK
