from torch import Tensor

from sparse_cp_ops.reference._indexer_topk_ragged_cp import indexer_topk_ragged_cp
from sparse_cp_ops.reference._pack_mla_kv import pack_mla_kv
from sparse_cp_ops.reference._quant_q_k_cp import quant_q_k_cp
from sparse_cp_ops.reference._rope_ import rope_
from sparse_cp_ops.reference._sparse_mla_fp8_cp import sparse_mla_fp8_cp
from sparse_cp_ops.reference._write_kv_cache import write_kv_cache


def attend_new_rows(
    q: Tensor,
    queries: Tensor,
    compressed_kv: Tensor,
    k_pe: Tensor,
    index_q: Tensor,
    index_k: Tensor,
    index_weights: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    req_ids: Tensor,
    kv_lens: Tensor,
    block_table: Tensor,
    mla_cache: Tensor,
    indexer_cache: Tensor,
    index_interleaved: bool,
    index_weight_scale: float,
    index_q_absmax: float,
    scale_format: str,
    topk: int,
    workspace_bytes: int,
    index_precision: str,
    softmax_scale: float,
    precision: str,
    batch_invariant: bool,
) -> tuple[Tensor, Tensor]:
    """See :func:`sparse_cp_ops.ops.attend_new_rows`; the references of its steps, one after the other."""
    mla_records, k_records = (mla_cache.new_empty(len(q), width) for width in (656, 132))
    pack_mla_kv(compressed_kv, k_pe, positions, cos_sin_cache, mla_records, True, scale_format)
    q_fp8, q_weights = quant_q_k_cp(
        index_q,
        index_k,
        index_weights,
        positions,
        cos_sin_cache,
        k_records,
        index_interleaved,
        True,
        index_weight_scale,
        scale_format,
        index_q_absmax,
    )
    write_kv_cache(mla_records, k_records, req_ids, positions, block_table, mla_cache, indexer_cache)
    indices = indexer_topk_ragged_cp(
        q_fp8, q_weights, indexer_cache, block_table, req_ids, kv_lens, topk, workspace_bytes, index_precision
    )
    rope_(q[:, : queries.shape[1], 512:], positions, cos_sin_cache, True, queries[..., -64:])
    out, _ = sparse_mla_fp8_cp(q, mla_cache, indices, block_table, req_ids, kv_lens, softmax_scale, precision)
    return out, indices
