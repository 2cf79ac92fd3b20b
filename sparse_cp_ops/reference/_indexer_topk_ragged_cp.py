import torch
from torch import Tensor

from sparse_cp_ops.reference._indexer_scores_ragged_cp import RECORD_BYTES, indexer_scores_ragged_cp, visible_keys


def indexer_topk_ragged_cp(
    q_fp8: Tensor,
    q_weights: Tensor,
    indexer_cache: Tensor,
    block_table: Tensor,
    req_ids: Tensor,
    kv_lens: Tensor,
    topk: int,
    workspace_bytes: int = 0,
    precision: str = "fp32",
) -> Tensor:
    """See :func:`sparse_cp_ops.ops.indexer_topk_ragged_cp`; ranks the scores of the reference."""
    lengths = visible_keys(block_table, req_ids, kv_lens, indexer_cache.shape[1] // RECORD_BYTES)
    scores = indexer_scores_ragged_cp(
        q_fp8, q_weights, indexer_cache, block_table, req_ids, kv_lens, max([0, *lengths]), precision
    )
    return select_topk(scores, lengths, topk)


def select_topk(scores: Tensor, lengths: list[int], topk: int) -> Tensor:
    """int32 [L, topk]: positions of the best of ``scores[i, :lengths[i]]``, ascending, then -1, by sorting them all.

    Score descending, ties to the smaller position, NaN below every number, -0.0 equal to +0.0.
    """
    selected = torch.full((scores.shape[0], topk), -1, dtype=torch.int32, device=scores.device)
    for row, length in enumerate(lengths):
        values = scores[row, :length]
        is_nan = values.isnan()
        by_score = torch.sort(values.masked_fill(is_nan, -torch.inf), descending=True, stable=True).indices
        numbers_first = by_score[torch.sort(is_nan[by_score].int(), stable=True).indices]
        best = numbers_first[:topk].sort().values
        selected[row, : len(best)] = best.int()
    return selected
