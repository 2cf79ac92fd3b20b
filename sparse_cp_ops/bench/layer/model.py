"""The layers that are measured, with their caches filled by themselves, and one rank's share of a forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from sparse_cp_ops.bench.layer.ranks import SimulatedRanks, context_parallel, registered_blocks
from sparse_cp_ops.config import ParallelismConfig
from sparse_cp_ops.context_parallel.plan import CpPlan
from sparse_cp_ops.kv_cache import INDEX_RECORD_BYTES, MLA_RECORD_BYTES, PagedKvCache
from sparse_cp_ops.nn import (
    AttentionInputs,
    MlaAttention,
    MlaConfig,
    SparseMlaImpl,
    YarnScaling,
    get_mla_impl,
    mla_softmax_scale,
)

_YARN = YarnScaling(factor=40.0, original_max_position_embeddings=4096, mscale=1.0, mscale_all_dim=1.0)
# DeepSeek-V3.2-Exp, inference/config_671B_v3.2.json.
V32 = MlaConfig(
    hidden_size=7168,
    num_heads=128,
    q_lora_rank=1536,
    qk_nope_head_dim=128,
    v_head_dim=128,
    index_n_heads=64,
    index_topk=2048,
    softmax_scale=mla_softmax_scale(192, _YARN),
    num_layers=4,
    max_positions=163_840,
    yarn=_YARN,
)
# The same structure for rehearsals on a CPU.
TINY = MlaConfig(
    hidden_size=64,
    num_heads=8,
    q_lora_rank=32,
    qk_nope_head_dim=32,
    v_head_dim=32,
    index_n_heads=8,
    index_topk=64,
    softmax_scale=0.1,
    num_layers=4,
    max_positions=8192,
)


@dataclass(frozen=True)
class Bench:
    """What every part of the benchmark needs to know: where, which dimensions, how long.

    ``scale`` divides token counts: 1 on a GPU, 128 in a rehearsal with :data:`TINY`.
    """

    device: torch.device
    config: MlaConfig = V32
    scale: int = 1
    seconds: float = 0.5

    def tokens(self, count: int) -> int:
        """A token count of the real benchmark, scaled down for a rehearsal."""
        return max(2, count // self.scale)


def random_layer(bench: Bench, layer_id: int = 0, parallelism: ParallelismConfig | None = None) -> MlaAttention:
    """A layer with torch's default random weights in bf16, made on the device."""
    torch.manual_seed(layer_id)
    return MlaAttention(bench.config, layer_id, parallelism, device=bench.device, dtype=torch.bfloat16)


def random_pages(requests: int, tokens: int, bench: Bench) -> Tensor:
    """Block table i32 [requests, pages]: pages of all requests in random order."""
    pages = -(-tokens // bench.config.page_size)
    return torch.randperm(requests * pages, device=bench.device).int().view(requests, pages)


def lens(values: Sequence[int]) -> Tensor:
    """Lengths as AttentionInputs takes them."""
    return torch.tensor(values, dtype=torch.int32)


class FilledLayer:
    """A layer and one request whose tokens are all in its cache, written by the layer itself in chunks.

    Forwards of the last tokens then write what is there already, on one rank or on any rank of several.
    """

    def __init__(self, bench: Bench, tokens: int, chunk: int = 8192) -> None:
        self.bench = bench
        self.layer = random_layer(bench)
        self.block_table = random_pages(1, tokens, bench)
        self.cache = PagedKvCache(1, self.block_table.shape[1], bench.config.page_size, bench.device)
        self.hidden = torch.randn(tokens, bench.config.hidden_size, device=bench.device, dtype=torch.bfloat16)
        for start in range(0, tokens, chunk):
            self.share(min(chunk, tokens - start), start + min(chunk, tokens - start)).run()

    def share(self, new: int, keys: int, rank: int = 0, size: int = 1, split: str = "interleave") -> Share:
        """Rank ``rank``'s share of a forward of ``new`` tokens that end at ``keys``."""
        group = SimulatedRanks(rank, size)
        parallelism = context_parallel(rank, size, split) if size > 1 else ParallelismConfig()
        impl = get_mla_impl(self.bench.config, parallelism, cast(dist.ProcessGroup, group))
        plan = impl.prepare(AttentionInputs(True, lens([new]), lens([keys - new]), self.block_table))
        rows = self.hidden[keys - new : keys].index_select(0, plan.token_ids.clamp(min=0))
        layer = self.layer
        if size > 1:
            layer = MlaAttention(self.bench.config, 0, parallelism, cast(dist.ProcessGroup, group), device="meta")
            layer.load_state_dict(self.layer.state_dict(keep_vars=True), assign=True)
            layer.refresh_rope_table()
            self._fill_blocks(registered_blocks(group, self._blocks_bytes(plan), self.bench.device), plan)
        return Share(layer, impl, plan, self.cache, rows, group)

    @staticmethod
    def _block_bytes(plan: CpPlan) -> int:
        return -(-plan.local_rows * (MLA_RECORD_BYTES + INDEX_RECORD_BYTES) // 16) * 16

    def _blocks_bytes(self, plan: CpPlan) -> int:
        return self._block_bytes(plan) * plan.cp_size

    def _fill_blocks(self, memory: Tensor, plan: CpPlan) -> None:
        """What the ranks send: the records of their rows, out of the filled cache."""
        size = self.bench.config.page_size
        pages, offsets = self.block_table[0][plan.gathered_positions.long() // size], plan.gathered_positions % size
        mla = self.cache.mla[0][pages.long(), offsets.long()]
        index = self.cache.indexer[0]
        assert index is not None
        keys = index[:, : size * 128].view(-1, size, 128)[pages.long(), offsets.long()]
        scales = index[:, size * 128 :].view(-1, size, 4)[pages.long(), offsets.long()]
        blocks, rows = memory.view(plan.cp_size, -1), plan.local_rows
        first = rows * MLA_RECORD_BYTES
        blocks[:, :first] = mla.view(plan.cp_size, -1)
        blocks[:, first : first + rows * INDEX_RECORD_BYTES] = torch.cat([keys, scales], 1).view(plan.cp_size, -1)


@dataclass(frozen=True)
class Share:
    """One rank's forward of one layer, ready to run any number of times."""

    layer: MlaAttention
    impl: SparseMlaImpl
    plan: CpPlan
    cache: PagedKvCache
    hidden: Tensor
    group: SimulatedRanks  # kept: the registered buffer goes with it

    def run(self) -> tuple[Tensor, Tensor]:
        """The layer's output [L, hidden_size] and picks."""
        return self.layer(self.hidden, self.cache, self.impl, self.plan)  # type: ignore[no-any-return]
