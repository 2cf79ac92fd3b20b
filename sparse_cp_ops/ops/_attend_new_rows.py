import torch
from torch import Tensor

from sparse_cp_ops.ops import direct
from sparse_cp_ops.ops._fake import register_fake
from sparse_cp_ops.ops._types import require_bools, require_floats, require_ints, require_strs, require_tensors


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
    """Everything of an attention layer between its projections, in one call: the host pays for one op instead of six.

    :func:`pack_mla_kv` and :func:`quant_q_k_cp` (with the Hadamard transform) into records of its own,
    :func:`write_kv_cache`, :func:`indexer_topk_ragged_cp`, :func:`rope_` of the queries and :func:`sparse_mla_fp8_cp`,
    the bits of these ops called one by one. RoPE pairs of latent and queries are interleaved. For rows that no other
    rank needs, and few of them: all inputs live until the attention is done.

    Args:
        q: [L, H, 576] bfloat16; ``[..., :512]`` holds the absorbed queries. Written: ``[..., 512:]`` of the first Hq
            heads.
        queries: [L, Hq, d] bfloat16, Hq at most H, d at least 64; the last 64 values are rotated into ``q``.
        compressed_kv: [L, 512] bfloat16 after its norm.
        k_pe: [L, 64] bfloat16 before RoPE.
        index_q: [L, Hi, 128] bfloat16 before RoPE.
        index_k: [L, 128] bfloat16 after LayerNorm, before RoPE.
        index_weights: [L, Hi] float32.
        positions: [L] int32.
        cos_sin_cache: [max_positions, 64] float32.
        req_ids: [L] int32, -1 for a pad.
        kv_lens: [L] int32, keys that the row sees.
        block_table: [B, W] int32.
        mla_cache: [num_pages, page_size, 656] uint8. Written.
        indexer_cache: [num_pages, page_size * 132] uint8. Written.
        index_interleaved: RoPE pairs of the indexer, as in :func:`quant_q_k_cp`.
        index_weight_scale, index_q_absmax: ``weight_scale`` and ``q_absmax`` of :func:`quant_q_k_cp`.
        scale_format: "ue8m0" or "fp32", of both caches.
        topk, workspace_bytes, index_precision: as in :func:`indexer_topk_ragged_cp`.
        softmax_scale, precision, batch_invariant: as in :func:`sparse_mla_fp8_cp`.

    Returns:
        out [L, H, 512] bfloat16 and indices [L, topk] int32.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: dtype, device, shape, stride or value does not fit, as in these ops; earlier steps may have run.
        RuntimeError: an argument requires grad in grad mode.
    """
    require_tensors(
        "attend_new_rows",
        q=q,
        queries=queries,
        compressed_kv=compressed_kv,
        k_pe=k_pe,
        index_q=index_q,
        index_k=index_k,
        index_weights=index_weights,
        positions=positions,
        cos_sin_cache=cos_sin_cache,
        req_ids=req_ids,
        kv_lens=kv_lens,
        block_table=block_table,
        mla_cache=mla_cache,
        indexer_cache=indexer_cache,
    )
    require_bools("attend_new_rows", index_interleaved=index_interleaved, batch_invariant=batch_invariant)
    require_floats(
        "attend_new_rows",
        index_weight_scale=index_weight_scale,
        index_q_absmax=index_q_absmax,
        softmax_scale=softmax_scale,
    )
    require_ints("attend_new_rows", topk=topk, workspace_bytes=workspace_bytes)
    require_strs("attend_new_rows", scale_format=scale_format, index_precision=index_precision, precision=precision)
    out, indices = direct.attend_new_rows(
        q,
        queries,
        compressed_kv,
        k_pe,
        index_q,
        index_k,
        index_weights,
        positions,
        cos_sin_cache,
        req_ids,
        kv_lens,
        block_table,
        mla_cache,
        indexer_cache,
        index_interleaved,
        index_weight_scale,
        index_q_absmax,
        scale_format,
        topk,
        workspace_bytes,
        index_precision,
        softmax_scale,
        precision,
        batch_invariant,
    )
    return out, indices


@register_fake("attend_new_rows")
def _fake(q: Tensor, *arguments: Tensor | bool | float | str) -> tuple[Tensor, Tensor]:
    topk = arguments[17]
    assert isinstance(topk, int)
    return q.new_empty((q.shape[0], q.shape[1], 512)), q.new_empty((q.shape[0], topk), dtype=torch.int32)
