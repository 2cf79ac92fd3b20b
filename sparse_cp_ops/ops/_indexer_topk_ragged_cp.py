from torch import Tensor

from sparse_cp_ops.ops import direct
from sparse_cp_ops.ops._fake import register_fake
from sparse_cp_ops.ops._types import require_ints, require_strs, require_tensors


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
    """The ``topk`` best keys of each row among keys ``0 .. kv_len-1`` of its request: exact, deterministic.

    Ranks the scores of :func:`indexer_scores_ragged_cp` (see there for the score and the first six arguments): higher
    first, of equal scores the smaller position. NaN ranks below every number, -inf included, and is listed only to fill
    up; -0.0 equals +0.0. A row's result depends on that row's inputs alone.

    Args:
        q_fp8: uint8 [L, Hi, 128].
        q_weights: float32 [L, Hi].
        indexer_cache: uint8 [pages, page_size * 132].
        block_table: int32 [B, W].
        req_ids: int32 [L].
        kv_lens: int32 [L].
        topk: a multiple of 64 up to 2048.
        workspace_bytes: bound of the temporary memory, at least 1 MiB; 0 is the default of 256 MiB. The result does
            not depend on it.
        precision: "fp32" or "f16".

    Returns:
        int32 [L, topk]: the selected positions within the request, ascending, then -1. All of ``0 .. kv_len-1`` if
        ``kv_len <= topk``; all -1 in a pad row.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: dtype, device, shape, stride or value does not fit; with SPARSE_CP_OPS_CHECK=1 also request ids,
            lengths and page ids out of range, and in "f16" mode a finite query value above 0.875.
        RuntimeError: an argument requires grad in grad mode.
    """
    require_tensors(
        "indexer_topk_ragged_cp",
        q_fp8=q_fp8,
        q_weights=q_weights,
        indexer_cache=indexer_cache,
        block_table=block_table,
        req_ids=req_ids,
        kv_lens=kv_lens,
    )
    require_ints("indexer_topk_ragged_cp", topk=topk, workspace_bytes=workspace_bytes)
    require_strs("indexer_topk_ragged_cp", precision=precision)
    indices: Tensor = direct.indexer_topk_ragged_cp(
        q_fp8, q_weights, indexer_cache, block_table, req_ids, kv_lens, topk, workspace_bytes, precision
    )
    return indices


@register_fake("indexer_topk_ragged_cp")
def _fake(
    q_fp8: Tensor,
    q_weights: Tensor,
    indexer_cache: Tensor,
    block_table: Tensor,
    req_ids: Tensor,
    kv_lens: Tensor,
    topk: int,
    workspace_bytes: int,
    precision: str = "fp32",
) -> Tensor:
    return req_ids.new_empty((q_fp8.shape[0], topk))
