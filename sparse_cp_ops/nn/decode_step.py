"""A decoding layer's work between its first projections and its values, for rows that no other rank needs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparse_cp_ops._autograd import refuse_grad
from sparse_cp_ops.kv_cache import INDEX_RECORD_BYTES, MLA_RECORD_BYTES
from sparse_cp_ops.nn.bmm_into import bmm_into
from sparse_cp_ops.nn.linear_fp32 import as_dtype, linear_fp32
from sparse_cp_ops.nn.mla_config import KV_LORA_RANK, ROPE_DIM
from sparse_cp_ops.nn.side_stream import SideStream, runs_side_streams
from sparse_cp_ops.ops import direct


def absorb(queries: Tensor, w_kc: Tensor, heads: int) -> Tensor:
    """``q_nope @ W_kc`` ahead of room for the RoPE parts, bf16 [L, heads, 576]; zeros in added heads.

    Args:
        queries: [L, Hq, d].
        w_kc: [Hq, qk_nope_head_dim, 512], dtype of ``queries``.
        heads: of the result, at least Hq.
    """
    rows, count, _ = queries.shape
    full = KV_LORA_RANK + ROPE_DIM
    absorbed = queries.new_empty((rows, heads, full), dtype=torch.bfloat16)
    if heads > count:
        absorbed[:, count:].zero_()
    # One view each, [heads, rows, values], where slices and transpositions would be four.
    row_stride, head_stride, stride = queries.stride()
    nope = queries.as_strided((count, rows, w_kc.shape[1]), (head_stride, row_stride, stride))
    out = absorbed.as_strided((count, rows, KV_LORA_RANK), (full, heads * full, 1))
    if queries.dtype == torch.bfloat16:
        torch.bmm(nope, w_kc, out=out)
    else:
        out.copy_(torch.bmm(nope, w_kc))
    return absorbed


def is_plain(linear: nn.Module) -> bool:
    """Whether calling the module is the product with its weight, and nothing else."""
    if type(linear) is not nn.Linear or linear.bias is not None:
        return False
    return not (linear._forward_hooks or linear._forward_pre_hooks or "forward" in linear.__dict__)


# Under torch.compile one op, so that a CUDA graph of compiled code runs the query heads beside the indexer, too: torch
# puts all that it traces on one stream.
_library = torch.library.Library("sparse_cp_ops_nn", "FRAGMENT")
_library.define(
    "decode_step(Tensor hidden, Tensor query_latent, Tensor w_q, Tensor w_kc, Tensor w_vc, Tensor w_index, int heads, "
    "Tensor compressed_kv, Tensor k_pe, Tensor index_q, Tensor index_k, Tensor positions, Tensor cos_sin_cache, "
    "Tensor req_ids, Tensor kv_lens, Tensor block_table, Tensor(a!) mla_cache, Tensor(b!) indexer_cache, "
    "bool index_interleaved, float index_weight_scale, float index_q_absmax, str scale_format, int topk, "
    "int workspace_bytes, str index_precision, float softmax_scale, str precision, bool batch_invariant) "
    "-> (Tensor values, Tensor indices)"
)


def _kernel(
    hidden: Tensor,
    query_latent: Tensor,
    w_q: Tensor,
    w_kc: Tensor,
    w_vc: Tensor,
    w_index: Tensor,
    heads: int,
    compressed_kv: Tensor,
    k_pe: Tensor,
    index_q: Tensor,
    index_k: Tensor,
    *arguments: Any,
) -> tuple[Tensor, Tensor]:
    # Below autograd, as an eager layer: the ops' autograd kernels are Python.
    with torch._C._AutoDispatchBelowAutograd():
        rows = (compressed_kv, k_pe, index_q, index_k, linear_fp32(hidden, w_index))
        if runs_side_streams(hidden, is_prefill=False):
            out, indices = _side_by_side(query_latent, w_q, w_kc, heads, *rows, *arguments)
        else:
            queries = _queries(query_latent, w_q, w_kc)
            q = absorb(queries, w_kc, heads)
            out, indices = direct.attend_new_rows(q, as_dtype(queries, torch.bfloat16), *rows, *arguments)
        return project_values(out, w_vc), indices


def project_values(attended: Tensor, w_vc: Tensor) -> Tensor:
    """``latent @ W_vc`` of each head.

    Args:
        attended: [L, at least Hv, 512].
        w_vc: [Hv, v_head_dim, 512].

    Returns:
        [L, Hv * v_head_dim] in the dtype of ``w_vc``.
    """
    rows, (count, width, _) = attended.shape[0], w_vc.shape
    latent = attended if attended.shape[1] == count else attended[:, :count]
    values = w_vc.new_empty((rows, count, width))
    bmm_into(values.transpose(0, 1), as_dtype(latent, w_vc.dtype).transpose(0, 1), w_vc.mT)
    return values.view(rows, count * width)


def _queries(query_latent: Tensor, w_q: Tensor, w_kc: Tensor) -> Tensor:
    rows, heads = query_latent.shape[0], w_kc.shape[0]
    return F.linear(query_latent, w_q).view(rows, heads, w_q.shape[0] // heads)


def _side_by_side(
    query_latent: Tensor,
    w_q: Tensor,
    w_kc: Tensor,
    heads: int,
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
    """The same kernels, those of the query heads on a stream of their own."""
    side = SideStream(query_latent, is_prefill=False, number=0)
    side.follow()
    with side:
        queries = _queries(query_latent, w_q, w_kc)
        q = absorb(queries, w_kc, heads)
        rope_part = q[:, : queries.shape[1], KV_LORA_RANK:]
        direct.rope_(rope_part, positions, cos_sin_cache, True, as_dtype(queries[..., -ROPE_DIM:], torch.bfloat16))
    rows = query_latent.shape[0]
    records, k_records = (mla_cache.new_empty((rows, width)) for width in (MLA_RECORD_BYTES, INDEX_RECORD_BYTES))
    direct.pack_mla_kv(compressed_kv, k_pe, positions, cos_sin_cache, records, True, scale_format)
    q_fp8, q_weights = direct.quant_q_k_cp(
        index_q,
        index_k,
        index_weights,
        positions,
        cos_sin_cache,
        k_records,
        index_interleaved,
        True,  # Hadamard
        index_weight_scale,
        scale_format,
        index_q_absmax,
    )
    direct.write_kv_cache(records, k_records, req_ids, positions, block_table, mla_cache, indexer_cache)
    indices = direct.indexer_topk_ragged_cp(
        q_fp8, q_weights, indexer_cache, block_table, req_ids, kv_lens, topk, workspace_bytes, index_precision
    )
    side.join()
    out, _ = direct.sparse_mla_fp8_cp(
        q, mla_cache, indices, block_table, req_ids, kv_lens, softmax_scale, precision, batch_invariant
    )
    return out, indices


def _fake(hidden: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    rows, w_vc, topk = hidden.shape[0], arguments[3], arguments[21]
    values = w_vc.new_empty((rows, w_vc.shape[0] * w_vc.shape[1]))
    return values, hidden.new_empty((rows, topk), dtype=torch.int32)


_library.impl("decode_step", _kernel, "CompositeExplicitAutograd")
torch.library.register_fake("sparse_cp_ops_nn::decode_step", _fake, lib=_library)
traced_decode_step = torch.ops.sparse_cp_ops_nn.decode_step.default
_library.impl("decode_step", refuse_grad(traced_decode_step), "Autograd")
