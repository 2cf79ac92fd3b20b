"""Writing a layer's records to the caches of all ranks, and sparse attention over them."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sparse_cp_ops.config import CPRotateMethod, FMHAType, ParallelismConfig
from sparse_cp_ops.context_parallel.collectives import BlockGather, CpGroup, TracedBlockGather, rows_are_split
from sparse_cp_ops.context_parallel.plan import CpPlan
from sparse_cp_ops.kv_cache import INDEX_RECORD_BYTES, MLA_RECORD_BYTES, PagedKvCache
from sparse_cp_ops.nn.forward_planner import ForwardPlanner, require_supported, runs_context_parallel
from sparse_cp_ops.nn.inputs import AttentionInputs
from sparse_cp_ops.nn.mla_config import MlaConfig
from sparse_cp_ops.ops import direct

logger = logging.getLogger(__name__)


def require_current(plan: CpPlan | None) -> CpPlan:
    """The plan, if it belongs to the running forward.

    Raises:
        ValueError: there is none, it was not made by ``prepare``, or a later ``prepare`` has replaced it.
    """
    if plan is None:
        raise ValueError("plan: expected the CpPlan that prepare made for this forward, got None")
    # A flag and not a comparison of generations: under torch.compile an int that changes every forward recompiles.
    if plan.lease is None:
        raise ValueError("plan: expected a plan made by prepare, got one without a generation")
    if not plan.lease.current:
        raise ValueError(f"plan: expected the plan of the latest prepare, got the stale generation {plan.generation}")
    return plan


def require_own(plan: CpPlan | None, planner: ForwardPlanner) -> CpPlan:
    """The plan, if it belongs to the running forward of the impl that has this planner.

    Raises:
        ValueError: as :func:`require_current`, or another impl's ``prepare`` made it.
    """
    plan = require_current(plan)
    assert plan.lease is not None
    if plan.lease.planner_id != planner.planner_id:
        raise ValueError(f"plan: expected one that this impl's prepare made, got generation {plan.generation}")
    return plan


def require_fitting_pages(cache: PagedKvCache, layer_id: int, plan: CpPlan) -> None:
    """Refuse a cache with another page size than the plan's, and a number that is no layer."""
    if cache.page_size != plan.page_size:
        raise ValueError(f"cache: expected page_size {plan.page_size} as in the plan, got {cache.page_size}")
    cache.require_layer(layer_id)


def require_indexer_pages(cache: PagedKvCache, layer_id: int, plan: CpPlan) -> tuple[Tensor, Tensor]:
    """The layer's indexer pages and the plan's block table, if there are both."""
    pages, block_table = cache.indexer[layer_id], plan.block_table
    if pages is None or block_table is None:
        missing = "indexer pages in the cache" if pages is None else "a block table in the plan"
        raise ValueError(f"layer {layer_id}: expected {missing}, got none")
    return pages, block_table


def batch_invariant(plan: CpPlan) -> bool:
    """Few rows want their keys split over the row count, which costs batch invariance."""
    return plan.is_prefill or torch.are_deterministic_algorithms_enabled()


@dataclass(eq=False)
class KvRecords:
    """The records of this rank's rows in one layer, to be filled by ``pack_mla_kv`` and ``quant_q_k_cp``.

    Attributes:
        mla: uint8 [L, 656].
        index: uint8 [L, 132], None for a layer without an indexer.
        gather: what sends them to the other ranks; None if nothing is sent.
    """

    mla: Tensor
    index: Tensor | None
    gather: BlockGather | TracedBlockGather | None


@dataclass(eq=False)
class PendingKvWrite:
    """A layer's records on their way to the other ranks."""

    records: KvRecords
    plan: CpPlan
    traced_blocks: Tensor | None


class SparseMlaFp8CPOp(nn.Module):
    """One layer's cache write and sparse attention. Holds no state of a forward: all of that is in the plan."""

    def __init__(
        self,
        mla_config: MlaConfig,
        parallelism_config: ParallelismConfig,
        group: dist.ProcessGroup | None = None,
        planner: ForwardPlanner | None = None,
    ) -> None:
        """Prepare the op.

        Args:
            mla_config: the model.
            parallelism_config: how the ranks share the work.
            group: the ranks; None = this process alone.
            planner: what makes the plans, if it is shared with other layers.
        """
        super().__init__()
        self.planner = planner or ForwardPlanner(mla_config, parallelism_config, CpGroup.of(group))
        self.group = self.planner.group
        self.softmax_scale = mla_config.softmax_scale
        self.precision = mla_config.attention_precision
        self._max_registered_bytes = parallelism_config.prefill_cp_config.comm_buffer_size
        self._overlap = parallelism_config.prefill_cp_config.method.name == "ALL_GATHER_WITH_OVERLAP"
        self._split_prefill = runs_context_parallel(parallelism_config)

    def plan(self, inputs: AttentionInputs) -> CpPlan:
        """The plan of the next forward; earlier ones become stale."""
        return self.planner.prepare(inputs, self._split_prefill)

    def new_kv_records(self, plan: CpPlan, has_indexer: bool) -> KvRecords:
        """Room for the records of this rank's rows; those that are sent share one block ``[L x 656 | L x 132]``."""
        plan = require_current(plan)
        like, rows = plan.req_ids, plan.req_ids.shape[0]
        # Rows are equal in number on all ranks: without any, all of them skip the gather.
        if not rows_are_split(plan) or rows == 0:
            own = like.new_empty((rows, MLA_RECORD_BYTES), dtype=torch.uint8)
            keys = like.new_empty((rows, INDEX_RECORD_BYTES), dtype=torch.uint8) if has_indexer else None
            return KvRecords(own, keys, None)
        row_bytes = MLA_RECORD_BYTES + (INDEX_RECORD_BYTES if has_indexer else 0)
        block_bytes = (rows * row_bytes + 15) // 16 * 16
        gather: BlockGather | TracedBlockGather
        if torch.compiler.is_compiling():
            block = like.new_empty(block_bytes, dtype=torch.uint8)
            gather = TracedBlockGather(self.group, block)
        else:
            borrower = self.planner.planner_id
            gather = BlockGather(self.group, block_bytes, like.device, self._max_registered_bytes, borrower)
            block = gather.own
        return KvRecords(*_record_views(block, rows, has_indexer), gather)

    def start_kv_write(self, records: KvRecords, plan: CpPlan) -> PendingKvWrite:
        """Send the records to the other ranks: the one gather of the layer. It runs while the caller goes on.

        Args:
            records: from :meth:`new_kv_records`, filled.
            plan: the forward's plan.

        Raises:
            TypeError: other records than those of :meth:`new_kv_records`.
            ValueError: a missing or stale plan.
        """
        plan = require_current(plan)
        if not isinstance(records, KvRecords):
            raise TypeError(f"records: expected KvRecords of new_kv_records, got {type(records).__name__}")
        traced_blocks = None
        if isinstance(records.gather, TracedBlockGather):
            traced_blocks = records.gather.start()
        elif records.gather is not None:
            records.gather.start(self._overlap)
        return PendingKvWrite(records, plan, traced_blocks)

    def finish_kv_write(self, pending: PendingKvWrite, cache: PagedKvCache, layer_id: int, plan: CpPlan) -> None:
        """Wait for the records of all ranks and scatter them into this rank's cache, in place.

        Args:
            pending: from :meth:`start_kv_write`.
            cache: the model's caches.
            layer_id: which layer's pages to write.
            plan: the forward's plan.

        Raises:
            ValueError: a missing or stale plan, a write of another forward, or a cache with another page size.
        """
        plan = require_current(plan)
        if pending.plan is not plan:
            raise ValueError("pending: expected a write that was started with this plan")
        require_fitting_pages(cache, layer_id, plan)
        records = pending.records
        mla, index = records.mla, records.index
        if records.gather is not None:
            if isinstance(records.gather, TracedBlockGather):
                assert pending.traced_blocks is not None
                blocks = records.gather.wait(pending.traced_blocks)
            else:
                blocks = records.gather.wait()
            mla, index = _record_views(blocks, records.mla.shape[0], records.index is not None)
        direct.write_kv_cache(
            mla,
            index,
            plan.gathered_req_ids,
            plan.gathered_positions,
            plan.block_table,
            cache.mla[layer_id],
            cache.indexer[layer_id] if index is not None else None,
        )

    def forward(
        self, q: Tensor, cache: PagedKvCache, layer_id: int, topk_indices: Tensor | None, plan: CpPlan
    ) -> tuple[Tensor, Tensor]:
        """Sparse attention of this rank's rows.

        Args:
            q: bf16 [L, H, 576], absorbed, RoPE applied.
            cache: the model's caches; this layer's pages are written.
            layer_id: which layer's pages to read.
            topk_indices: int32 [L, topk], request-local positions, -1 behind the last.
            plan: the forward's plan.

        Returns:
            out bf16 [L, H, 512] and lse float32 [L, H]; 0 and -inf for pads.
        """
        plan = require_current(plan)
        if topk_indices is None:
            raise ValueError("topk_indices: expected the picks of this or of an earlier layer, got None")
        cache.require_layer(layer_id)
        out, lse = direct.sparse_mla_fp8_cp(
            q,
            cache.mla[layer_id],
            topk_indices,
            plan.block_table,
            plan.req_ids,
            plan.kv_lens,
            self.softmax_scale,
            self.precision,
            batch_invariant(plan),
        )
        return out, lse


def _record_views(blocks: Tensor, rows: int, has_indexer: bool) -> tuple[Tensor, Tensor | None]:
    """Blocks [..., bytes] -> MLA records [..., rows, 656] and indexer records [..., rows, 132], without a copy."""
    ranks, mla_bytes = blocks.shape[:-1], rows * MLA_RECORD_BYTES
    mla = blocks[..., :mla_bytes].view(*ranks, rows, MLA_RECORD_BYTES)
    if not has_indexer:
        return mla, None
    index_bytes = rows * INDEX_RECORD_BYTES
    return mla, blocks[..., mla_bytes : mla_bytes + index_bytes].view(*ranks, rows, INDEX_RECORD_BYTES)


class SparseMlaImpl:
    """Attention of a model on ranks that all hold all rows of a batch: decode, or no context parallelism."""

    split_prefill = False

    def __init__(
        self, mla_config: MlaConfig, parallelism_config: ParallelismConfig, group: dist.ProcessGroup | None = None
    ) -> None:
        if not self.support_parallelism_config(parallelism_config):
            require_supported(parallelism_config)
            raise ValueError(f"{type(self).__name__}: parallelism_config: not supported: {parallelism_config}")
        self.mla_config = mla_config
        self.group = CpGroup.of(group)
        _require_fitting_group(mla_config, parallelism_config, self.group)
        self.planner = ForwardPlanner(mla_config, parallelism_config, self.group)
        self.op = SparseMlaFp8CPOp(mla_config, parallelism_config, planner=self.planner)
        # The last arguments of attend_new_rows; read once, because each field of a config costs the host.
        self._attention_settings = (mla_config.softmax_scale, mla_config.attention_precision)
        self._forwards_itself = type(self).forward is SparseMlaImpl.forward

    @classmethod
    def support_prefill_cp(cls) -> bool:
        """Whether prefill rows can be split among ranks."""
        return cls.split_prefill

    @classmethod
    def support_parallelism_config(cls, config: ParallelismConfig) -> bool:
        """Whether this class runs the configuration as it says."""
        cp = config.prefill_cp_config
        return not cp.kv_cache_sharded and cp.method not in (CPRotateMethod.ALLTOALL, CPRotateMethod.UNKNOWN)

    @classmethod
    def fmha_type(cls) -> FMHAType:
        """Which attention implementation this is."""
        return FMHAType.SPARSE_FLASHMLA

    def prepare(
        self,
        inputs: AttentionInputs,
        max_requests: int | None = None,
        local_rows: int | None = None,
        total_tokens: int | None = None,
    ) -> CpPlan:
        """Plan one forward: context parallelism or not, the head mode, rows and generation. Call it on every rank.

        Args:
            inputs: the batch, the same on all ranks; only read.
            max_requests, local_rows, total_tokens: room for CUDA graphs, see :meth:`CpPlan.build`.

        Raises:
            ValueError: an unsupported configuration, lengths that don't fit, or ranks with different inputs.
        """
        return self.planner.prepare(inputs, self.split_prefill, max_requests, local_rows, total_tokens)

    def new_kv_records(self, plan: CpPlan, layer_id: int) -> KvRecords:
        """Room for the records of this rank's rows, see :meth:`SparseMlaFp8CPOp.new_kv_records`."""
        return self.op.new_kv_records(require_own(plan, self.planner), self.mla_config.has_indexer(layer_id))

    def start_kv_write(self, records: KvRecords, plan: CpPlan) -> PendingKvWrite:
        """See :meth:`SparseMlaFp8CPOp.start_kv_write`."""
        return self.op.start_kv_write(records, require_own(plan, self.planner))

    def finish_kv_write(self, pending: PendingKvWrite, cache: PagedKvCache, layer_id: int, plan: CpPlan) -> None:
        """See :meth:`SparseMlaFp8CPOp.finish_kv_write`."""
        self.op.finish_kv_write(pending, cache, layer_id, require_own(plan, self.planner))

    def forward(
        self, q: Tensor, cache: PagedKvCache, layer_id: int, topk_indices: Tensor | None, plan: CpPlan
    ) -> tuple[Tensor, Tensor]:
        """See :meth:`SparseMlaFp8CPOp.forward`.

        Raises:
            RuntimeError: the op returned no result.
        """
        result = self.op(q, cache, layer_id, topk_indices, require_own(plan, self.planner))
        if result is None:
            raise RuntimeError(f"{type(self.op).__name__}: the attention of layer {layer_id} returned no result")
        out, lse = result
        return out, lse

    def is_plain(self) -> bool:
        """Whether ``forward`` is that of this class and its op has no hooks: then one call may take their place."""
        op = self.op
        return (
            self._forwards_itself and type(op) is SparseMlaFp8CPOp and not (op._forward_hooks or op._forward_pre_hooks)
        )

    def new_rows_arguments(
        self, settings: tuple[Any, ...], cos_sin_cache: Tensor, cache: PagedKvCache, layer_id: int, plan: CpPlan
    ) -> tuple[Any, ...]:
        """What ``ops.attend_new_rows`` takes from ``positions`` on, for rows that no other rank needs.

        ``settings``: those of the layer's indexer, ``Indexer.settings``.

        Raises:
            ValueError: a missing or stale plan, one whose rows are split, a cache with another page size, or a layer
                without indexer pages.
        """
        plan = require_own(plan, self.planner)
        if rows_are_split(plan):
            raise ValueError("plan: expected one whose rows this rank computes alone, got rows split among ranks")
        require_fitting_pages(cache, layer_id, plan)
        pages, block_table = require_indexer_pages(cache, layer_id, plan)
        return (
            plan.positions,
            cos_sin_cache,
            plan.req_ids,
            plan.kv_lens,
            block_table,
            cache.mla[layer_id],
            pages,
            *settings,
            *self._attention_settings,
            batch_invariant(plan),
        )


class SparseMlaCpImpl(SparseMlaImpl):
    """Attention of a model under context parallelism: during prefill each rank computes its own rows."""

    split_prefill = True

    @classmethod
    def support_parallelism_config(cls, config: ParallelismConfig) -> bool:
        """Whether this class runs the configuration as it says."""
        return super().support_parallelism_config(config) and runs_context_parallel(config)

    @classmethod
    def fmha_type(cls) -> FMHAType:
        """Which attention implementation this is."""
        return FMHAType.CP_SPARSE_FLASHMLA


def get_mla_impl(
    mla_config: MlaConfig, parallelism_config: ParallelismConfig, group: dist.ProcessGroup | None = None
) -> SparseMlaImpl:
    """The attention of a model under a configuration: make one a model and share it between the layers.

    An impl has one current plan. A model that works on several batches by turns has an impl for each of them.

    Args:
        mla_config: the model.
        parallelism_config: how the ranks share the work.
        group: the tensor-parallel ranks; None = this process alone, nothing is communicated.

    Returns:
        :class:`SparseMlaCpImpl` if the configuration runs context parallelism and there are ranks to share the rows,
        else :class:`SparseMlaImpl`.

    Raises:
        ValueError: a method that is not implemented, a sharded cache, or a group that doesn't fit the configuration.
    """
    require_supported(parallelism_config)
    if group is None and runs_context_parallel(parallelism_config):
        logger.warning("context parallelism is configured, but group is None: this process computes all rows itself")
    use_cp = group is not None and SparseMlaCpImpl.support_parallelism_config(parallelism_config)
    return (SparseMlaCpImpl if use_cp else SparseMlaImpl)(mla_config, parallelism_config, group)


def _require_fitting_group(mla_config: MlaConfig, config: ParallelismConfig, group: CpGroup) -> None:
    cp = config.prefill_cp_config
    if group.process_group is None:
        return
    for name, expected, got in (("size", config.tp_size, group.size), ("rank", config.tp_rank, group.rank)):
        if expected != got:
            raise ValueError(f"group: expected {name} {expected} as tp_{name} of parallelism_config, got {got}")
    if cp.is_enabled() and cp.prefill_cp_size not in (0, group.size):
        raise ValueError(f"prefill_cp_config.prefill_cp_size: expected 0 or {group.size}, got {cp.prefill_cp_size}")
    if cp.decode_mode == "head_slice" and mla_config.num_heads % group.size:
        raise ValueError(
            "prefill_cp_config.decode_mode: head_slice needs a number of heads that the ranks divide, "
            f"got {mla_config.num_heads} heads on {group.size} ranks"
        )
