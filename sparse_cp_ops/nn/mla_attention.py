"""The whole attention layer: projections, indexer, paged cache, sparse attention, output projection."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from sparse_cp_ops.config import ParallelismConfig
from sparse_cp_ops.context_parallel.collectives import (
    CpGroup,
    all_gather_rows,
    all_reduce_sum,
    restore_rows,
    rows_are_split,
    take_local_rows,
)
from sparse_cp_ops.context_parallel.plan import CpPlan
from sparse_cp_ops.kv_cache import PagedKvCache
from sparse_cp_ops.nn import unquantised
from sparse_cp_ops.nn.bmm_into import bmm_into
from sparse_cp_ops.nn.decode_step import absorb, is_plain, project_values, traced_decode_step
from sparse_cp_ops.nn.forward_planner import require_supported
from sparse_cp_ops.nn.indexer import Indexer
from sparse_cp_ops.nn.linear_fp32 import as_dtype, linear_fp32
from sparse_cp_ops.nn.mla_config import MlaConfig, kernel_heads
from sparse_cp_ops.nn.rope import build_cos_sin_cache
from sparse_cp_ops.nn.side_stream import SideStream, runs_side_streams
from sparse_cp_ops.nn.sparse_mla import SparseMlaImpl, require_current
from sparse_cp_ops.nn.unquantised import UnquantisedKvCache
from sparse_cp_ops.ops import direct

# Up to here the host is the bound of an eager layer of DeepSeek-V3.2 (docs/context_parallel.md).
FEW_ROWS = 1024


class _Heads(NamedTuple):
    """The attention heads that this rank computes in a forward, ``first .. first+number-1``."""

    first: int
    number: int
    padded: int  # as how many the kernel sees them
    w_kc: Tensor  # [number, qk_nope_head_dim, 512] and
    w_vc: Tensor  # [number, v_head_dim, 512], views of ``kv_b_proj.weight``


class MlaAttention(nn.Module):
    """Multi-head latent attention with a lightning indexer, as in DeepSeek-V3.2 and GLM-5.

    Parameters are named as in Hugging Face's ``DeepseekV32Attention`` and ``GlmMoeDsaAttention``, so their state dicts
    load. Models of any floating dtype work; the kernels' inputs are rounded to bfloat16 once. Inference only.

    Nothing of a forward is kept on the module. In the order of work: latent and indexer keys of the local rows are
    packed into records and sent, the query heads are computed meanwhile, the records of all ranks are written to the
    pages, then come top-k, attention and the output projection.
    """

    def __init__(
        self,
        mla_config: MlaConfig,
        layer_id: int,
        parallelism_config: ParallelismConfig | None = None,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Make the layer.

        Args:
            mla_config: the model.
            layer_id: which layer's pages it reads and writes.
            parallelism_config: how the ranks share the work; None = one rank.
            group: the tensor-parallel ranks; None = this process alone.
            device, dtype: of the parameters.

        Raises:
            ValueError: the layer does not exist, or the configuration is not supported.
        """
        super().__init__()
        if parallelism_config is not None:
            require_supported(parallelism_config)
        self.mla_config = mla_config
        self.layer_id = layer_id
        self.group = CpGroup.of(group)
        config, heads = mla_config, mla_config.num_heads

        def linear(inputs: int, outputs: int, bias: bool = False) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=bias, device=device, dtype=dtype)

        def norm(width: int) -> nn.RMSNorm:
            return nn.RMSNorm(width, eps=config.rms_norm_eps, device=device, dtype=dtype)

        self.q_a_proj = linear(config.hidden_size, config.q_lora_rank, config.attention_bias)
        self.q_a_layernorm = norm(config.q_lora_rank)
        self.q_b_proj = linear(config.q_lora_rank, heads * config.qk_head_dim)
        compressed = config.kv_lora_rank + config.qk_rope_head_dim
        self.kv_a_proj_with_mqa = linear(config.hidden_size, compressed, config.attention_bias)
        self.kv_a_layernorm = norm(config.kv_lora_rank)
        self.kv_b_proj = linear(config.kv_lora_rank, heads * (config.qk_nope_head_dim + config.v_head_dim))
        self.o_proj = linear(heads * config.v_head_dim, config.hidden_size, config.attention_bias)
        self.indexer = Indexer(config, device, dtype) if config.has_indexer(layer_id) else None
        # No buffer: .to(dtype) would round it, and the layers of a model share it.
        self.refresh_rope_table()

    def refresh_rope_table(self) -> None:
        """Take the RoPE table of the device where the parameters are now; ``to`` and ``cuda`` do it by themselves."""
        self.cos_sin_cache = build_cos_sin_cache(self.mla_config, self.o_proj.weight.device)

    def _apply(self, fn: object, recurse: bool = True) -> MlaAttention:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.refresh_rope_table()
        return self

    def forward(
        self,
        hidden: Tensor,
        cache: PagedKvCache | UnquantisedKvCache,
        impl: SparseMlaImpl,
        plan: CpPlan,
        prev_topk_indices: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attention of one layer for this rank's rows, which are written to the cache first.

        Args:
            hidden: [L, hidden_size], the rows of ``plan.token_ids``; in decode all rows, whatever the head mode.
            cache: pages of the model, or of this layer alone (``cache.layer(layer_id)``), written in place; an
                ``UnquantisedKvCache`` if ``quantise`` is False.
            impl: from ``get_mla_impl``, shared by the layers of a model.
            plan: what ``impl.prepare`` made for this forward.
            prev_topk_indices: the picks of the last layer with an indexer, for layers without one.

        Returns:
            out [L, hidden_size] in the dtype of ``hidden``, and the picks int32 [L, index_topk]: positions in the row's
            request, ascending, then -1. Pads attend to nothing.

        Raises:
            ValueError: a missing or stale plan, no picks for a layer without an indexer, or another kind of cache.
            RuntimeError: gradients are enabled.
        """
        plan = require_current(plan)
        if torch.is_grad_enabled():
            self._require_inference()
            return self._forward(hidden, cache, impl, plan, prev_topk_indices)
        if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
            return self._forward(hidden, cache, impl, plan, prev_topk_indices)
        # Nothing below can need autograd: its kernel of our ops, in Python, would cost more than their launches.
        with torch._C._AutoDispatchBelowAutograd():
            return self._forward(hidden, cache, impl, plan, prev_topk_indices)

    def _forward(
        self,
        hidden: Tensor,
        cache: PagedKvCache | UnquantisedKvCache,
        impl: SparseMlaImpl,
        plan: CpPlan,
        prev_topk_indices: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        # Not the process groups themselves: torch.compile would guard on them. No two groups share a name.
        if impl.group.name != self.group.name or impl.group.size != self.group.size:
            raise ValueError(
                f"group: expected this layer to have the group of impl, {impl.group.size} ranks named "
                f"{impl.group.name!r}, got {self.group.size} named {self.group.name!r}"
            )
        if plan.head_mode == "batch_slice":
            hidden = take_local_rows(hidden, plan)
        if hidden.shape != (plan.req_ids.shape[0], self.mla_config.hidden_size):
            expected = [plan.req_ids.shape[0], self.mla_config.hidden_size]
            raise ValueError(f"hidden: expected shape {expected} (the plan's rows), got {list(hidden.shape)}")
        heads = self._heads_of(plan)
        if self.mla_config.quantise:
            if not isinstance(cache, PagedKvCache):
                raise ValueError(f"cache: expected a PagedKvCache, got {type(cache).__name__}")
            if self._takes_one_call(impl, plan):
                values, picks = self._attend_new_rows(hidden, heads, cache, impl, plan)
            else:
                q, picks = self._write_and_pick(hidden, heads, cache, impl, plan, prev_topk_indices)
                attended, _ = impl.forward(q, cache, self._pages_of(cache), picks, plan)
                del q  # as large as the attention's output, which is still there while it is projected
                values = project_values(attended, heads.w_vc)
        else:
            if not isinstance(cache, UnquantisedKvCache):
                raise ValueError(f"cache: expected an UnquantisedKvCache (quantise=False), got {type(cache).__name__}")
            attended, picks = self._attend_unquantised(hidden, heads, cache, plan, prev_topk_indices)
            values = project_values(attended, heads.w_vc)
        out = self._project(values, heads, plan)
        return (restore_rows(out, plan, self.group) if plan.head_mode == "batch_slice" else out), picks

    def _takes_one_call(self, impl: SparseMlaImpl, plan: CpPlan) -> bool:
        """Whether ``attend_new_rows`` serves: rows that no other rank needs, few enough that their inputs may live on,
        and no step that somebody has put in another's place.

        Such rows are bound by the host. Under a CUDA graph's capture decode runs its steps side by side instead, and
        compiled code is made for prefill and decode, not for few and many rows.
        """
        if type(self.indexer) is not Indexer or rows_are_split(plan) or not impl.is_plain():
            return False
        if torch.compiler.is_compiling():
            return not plan.is_prefill and is_plain(self.q_b_proj)
        if plan.is_prefill:
            return plan.req_ids.shape[0] <= FEW_ROWS
        return not runs_side_streams(plan.req_ids, plan.is_prefill)

    def _attend_new_rows(
        self, hidden: Tensor, heads: _Heads, cache: PagedKvCache, impl: SparseMlaImpl, plan: CpPlan
    ) -> tuple[Tensor, Tensor]:
        """Everything up to the values [L, heads.number * v_head_dim], and the picks."""
        indexer = self.indexer
        assert indexer is not None
        others = impl.new_rows_arguments(indexer.settings, self.cos_sin_cache, cache, self._pages_of(cache), plan)
        query_latent = self._query_latent(hidden)
        latent, k_pe = self._compressed(hidden)
        index_q, index_k = indexer.project_queries(query_latent), indexer.k_norm(indexer.wk(hidden))
        rows = (
            as_dtype(latent, torch.bfloat16),
            as_dtype(k_pe, torch.bfloat16),
            as_dtype(index_q, torch.bfloat16),
            as_dtype(index_k, torch.bfloat16),
        )
        w_index = indexer.weights_proj.weight
        if torch.compiler.is_compiling():
            weights = (self._query_weight(heads), heads.w_kc, heads.w_vc, w_index)
            values, picks = traced_decode_step(hidden, query_latent, *weights, heads.padded, *rows, *others)
            return values, picks
        queries = self._queries(query_latent, heads)
        q = absorb(queries, heads.w_kc, heads.padded)
        index_weights = linear_fp32(hidden, w_index)
        out, picks = direct.attend_new_rows(q, as_dtype(queries, torch.bfloat16), *rows, index_weights, *others)
        return project_values(out, heads.w_vc), picks

    def _write_and_pick(
        self,
        hidden: Tensor,
        heads: _Heads,
        cache: PagedKvCache,
        impl: SparseMlaImpl,
        plan: CpPlan,
        prev_topk_indices: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Write the rows of all ranks to the cache; the absorbed queries bf16 [L, heads.padded, 576], and the picks.

        Everything else that the projections give ends here, ahead of the attention.
        """
        positions, layer_id, indexer = plan.positions, self._pages_of(cache), self.indexer
        records = impl.op.new_kv_records(plan, indexer is not None)
        if indexer is None:
            picks = self._require_picks(prev_topk_indices)
            self._pack_latent(hidden, positions, records.mla)
            # Nothing but the latent is sent: the gather starts ahead of all query projections.
            pending = impl.start_kv_write(records, plan)
            query_latent = self._query_latent(hidden)
            q = self._absorbed_queries(query_latent, heads, positions, torch.bfloat16)
            impl.finish_kv_write(pending, cache, layer_id, plan)
        else:
            assert records.index is not None
            keys, heads_side = (SideStream(positions, plan.is_prefill, number) for number in (0, 1))
            keys.follow()
            with keys:
                index_k, weights = indexer.project_keys(hidden)
            heads_side.follow()
            with heads_side:
                self._pack_latent(hidden, positions, records.mla)
            query_latent = self._query_latent(hidden)
            heads_side.follow()
            index_q = indexer.project_queries(query_latent)
            keys.join()
            q_fp8, q_weights = indexer.quant_q_k_cp(
                as_dtype(index_q, torch.bfloat16),
                as_dtype(index_k, torch.bfloat16),
                weights,
                positions,
                self.cos_sin_cache,
                records.index,
            )
            heads_side.join()
            pending = impl.start_kv_write(records, plan)
            with heads_side:
                q = self._absorbed_queries(query_latent, heads, positions, torch.bfloat16)
            impl.finish_kv_write(pending, cache, layer_id, plan)
            picks = indexer._get_topk_ragged_cp(q_fp8, q_weights, cache, layer_id, plan)
            heads_side.join()
        return q, picks

    def _pages_of(self, cache: PagedKvCache) -> int:
        # Under torch.compile a number that differs between layers would be a graph of its own for each of them.
        return 0 if cache.num_layers == 1 else self.layer_id

    def _compressed(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The normed latent [L, 512] and the shared key part [L, 64] before RoPE."""
        config = self.mla_config
        compressed: Tensor = self.kv_a_proj_with_mqa(hidden)
        latent, k_pe = compressed.split_with_sizes([config.kv_lora_rank, config.qk_rope_head_dim], dim=-1)
        return self.kv_a_layernorm(latent), k_pe

    def _query_latent(self, hidden: Tensor) -> Tensor:
        latent: Tensor = self.q_a_layernorm(self.q_a_proj(hidden))
        return latent

    def _pack_latent(self, hidden: Tensor, positions: Tensor, mla_records: Tensor) -> None:
        latent, k_pe = self._compressed(hidden)
        direct.pack_mla_kv(
            as_dtype(latent, torch.bfloat16),
            as_dtype(k_pe, torch.bfloat16),
            positions,
            self.cos_sin_cache,
            mla_records,
            True,  # interleaved
            self.mla_config.scale_format,
        )

    def _attend_unquantised(
        self,
        hidden: Tensor,
        heads: _Heads,
        cache: UnquantisedKvCache,
        plan: CpPlan,
        prev_topk_indices: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """[L, heads.padded, 512] in the dtype of the model by plain PyTorch, and the picks."""
        config, positions, table = self.mla_config, plan.positions, self.cos_sin_cache
        latent, k_pe = self._compressed(hidden)
        query_latent = self._query_latent(hidden)
        rotated = unquantised.rotate(k_pe, positions, table, interleaved=True)
        self._write_unquantised(torch.cat([latent.to(rotated.dtype), rotated], dim=-1), cache.mla[self.layer_id], plan)
        if self.indexer is None:
            picks = self._require_picks(prev_topk_indices)
        else:
            index_q, (index_k, weights) = self.indexer.project_queries(query_latent), self.indexer.project_keys(hidden)
            index_q, index_k = self.indexer.apply_rope_and_rotate_q_k_cp(index_q, index_k, positions, table)
            self._write_unquantised(index_k, cache.indexer[self.layer_id], plan)
            picks = unquantised.select_topk(
                index_q, weights * config.index_weight_scale, cache.indexer[self.layer_id], plan, config.index_topk
            )
        q = self._absorbed_queries(query_latent, heads, positions, query_latent.dtype)
        return unquantised.attend(q, cache.mla[self.layer_id], picks, plan, config.softmax_scale), picks

    def _write_unquantised(self, values: Tensor, pages: Tensor, plan: CpPlan) -> None:
        unquantised.write_rows(all_gather_rows(values, self.group) if rows_are_split(plan) else values, pages, plan)

    def _query_weight(self, heads: _Heads) -> Tensor:
        weight, width = self.q_b_proj.weight, self.mla_config.qk_head_dim
        if heads.number == self.mla_config.num_heads:
            return weight
        return weight[heads.first * width : (heads.first + heads.number) * width]

    def _queries(self, query_latent: Tensor, heads: _Heads) -> Tensor:
        """[L, heads.number, qk_head_dim] before absorption and RoPE."""
        if heads.number == self.mla_config.num_heads:
            q = self.q_b_proj(query_latent)
        else:
            q = F.linear(query_latent, self._query_weight(heads))
        return q.view(q.shape[0], heads.number, self.mla_config.qk_head_dim)  # type: ignore[no-any-return]

    def _absorbed_queries(self, query_latent: Tensor, heads: _Heads, positions: Tensor, dtype: torch.dtype) -> Tensor:
        """``[q_nope @ W_kc | rope(q_pe)]`` [L, heads.padded, 576], built in one buffer; zeros in added heads."""
        config, count = self.mla_config, heads.number
        q = self._queries(query_latent, heads)
        q_nope, q_pe = q.split_with_sizes([config.qk_nope_head_dim, config.qk_rope_head_dim], dim=-1)

        width = config.kv_lora_rank + config.qk_rope_head_dim
        buffer: Tensor = q.new_empty((q.shape[0], heads.padded, width), dtype=dtype)
        own = buffer
        if heads.padded > count:
            buffer[:, count:].zero_()
            own = buffer[:, :count]
        absorbed, rope_part = own.split_with_sizes([config.kv_lora_rank, config.qk_rope_head_dim], dim=-1)
        bmm_into(absorbed.transpose(0, 1), q_nope.transpose(0, 1), heads.w_kc)
        if config.quantise:
            direct.rope_(rope_part, positions, self.cos_sin_cache, True, as_dtype(q_pe, dtype))  # interleaved
        else:
            rope_part.copy_(unquantised.rotate(q_pe, positions, self.cos_sin_cache, interleaved=True))
        return buffer

    def _project(self, values: Tensor, heads: _Heads, plan: CpPlan) -> Tensor:
        """[L, heads.number * v_head_dim] -> [L, hidden_size], summed over the ranks if they share the heads."""
        if plan.head_mode != "head_slice":
            projected: Tensor = self.o_proj(values)
            return projected
        width = self.mla_config.v_head_dim
        own = self.o_proj.weight[:, heads.first * width : (heads.first + heads.number) * width]
        out = all_reduce_sum(F.linear(values, own), self.group)
        return out if self.o_proj.bias is None else out + self.o_proj.bias

    def _heads_of(self, plan: CpPlan) -> _Heads:
        config = self.mla_config
        # W_kc, then W_vc of each head.
        rows = [config.qk_nope_head_dim, config.v_head_dim]
        weight = self.kv_b_proj.weight.view(config.num_heads, sum(rows), config.kv_lora_rank)
        count, first = config.num_heads, 0
        if plan.head_mode == "head_slice":
            count //= self.group.size
            first = self.group.rank * count
            weight = weight[first : first + count]
        w_kc, w_vc = weight.split_with_sizes(rows, dim=1)
        return _Heads(first, count, kernel_heads(count), w_kc, w_vc)

    def _require_picks(self, prev_topk_indices: Tensor | None) -> Tensor:
        if prev_topk_indices is None:
            raise ValueError(
                f"prev_topk_indices: expected the picks of the last layer with an indexer, as layer {self.layer_id} "
                "has none, got None"
            )
        return prev_topk_indices

    def _require_inference(self) -> None:
        if self.o_proj.weight.requires_grad:
            raise RuntimeError("MlaAttention is for inference: call it under torch.no_grad() or torch.inference_mode()")
