from torch import Tensor

from sparse_cp_ops.ops import direct
from sparse_cp_ops.ops._fake import register_fake
from sparse_cp_ops.ops._types import require_ints, require_strs, require_tensors


def indexer_scores_ragged_cp(
    q_fp8: Tensor,
    q_weights: Tensor,
    indexer_cache: Tensor,
    block_table: Tensor,
    req_ids: Tensor,
    kv_lens: Tensor,
    width: int,
    precision: str = "fp32",
) -> Tensor:
    """Lightning-indexer scores of each row against the keys 0 .. width-1 of its request, from the paged FP8 cache.

    ``score[i, j] = k_scale_j * sum_h q_weights[i, h] * relu(q8[i, h] . k8[j])``; relu passes NaN on. These are, bit for
    bit, the scores that :func:`indexer_topk_ragged_cp` ranks: for tests and debugging, since that op never stores them.
    A row's scores depend on that row's inputs alone.

    Args:
        q_fp8: uint8 [L, Hi, 128], e4m3fn bytes; Hi a multiple of 8 up to 64; contiguous, 16-byte aligned.
        q_weights: float32 [L, Hi], the query's scale included; contiguous.
        indexer_cache: uint8 [pages, page_size * 132]: a page's e4m3fn values, then its float32 scales; page_size 16,
            32, 64 or 128; 16-byte aligned, page stride a multiple of 16 bytes.
        block_table: int32 [B, W]: page of the tokens ``[w * page_size, (w + 1) * page_size)``; an id outside the cache
            is no page. Rows may be strided.
        req_ids: int32 [L], request of each row; one outside [0, B) is a pad.
        kv_lens: int32 [L], keys that the row sees; cut to ``W * page_size``, negative counts as 0.
        width: columns of the result.
        precision: "fp32", or "f16" for queries quantised with q_absmax=0.875: half-precision sums on CUDA, faster.

    Returns:
        float32 [L, width]; -inf in columns >= kv_len and in pad rows, NaN for a key without a page.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: dtype, device, shape, stride or value does not fit; with SPARSE_CP_OPS_CHECK=1 also request ids,
            lengths and page ids out of range, and in "f16" mode a finite query value above 0.875.
        RuntimeError: an argument requires grad in grad mode.
    """
    require_tensors(
        "indexer_scores_ragged_cp",
        q_fp8=q_fp8,
        q_weights=q_weights,
        indexer_cache=indexer_cache,
        block_table=block_table,
        req_ids=req_ids,
        kv_lens=kv_lens,
    )
    require_ints("indexer_scores_ragged_cp", width=width)
    require_strs("indexer_scores_ragged_cp", precision=precision)
    scores: Tensor = direct.indexer_scores_ragged_cp(
        q_fp8, q_weights, indexer_cache, block_table, req_ids, kv_lens, width, precision
    )
    return scores


@register_fake("indexer_scores_ragged_cp")
def _fake(
    q_fp8: Tensor,
    q_weights: Tensor,
    indexer_cache: Tensor,
    block_table: Tensor,
    req_ids: Tensor,
    kv_lens: Tensor,
    width: int,
    precision: str = "fp32",
) -> Tensor:
    return q_weights.new_empty((q_fp8.shape[0], width))
