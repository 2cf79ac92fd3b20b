"""Forwards of the op-level pipeline (records, gather, scatter, top-k, attention) on simulated ranks in one process.

Every rank has a module and caches of its own; the gather is replaced by reading the other ranks' blocks. Inputs of pad
rows are NaN and caches start as NaN bytes, so that whatever reads them shows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from builders import num_pages, random_block_table
from torch import Tensor

from sparse_cp_ops import ops
from sparse_cp_ops.config import CPRotateMethod, ParallelismConfig, PrefillCPConfig
from sparse_cp_ops.context_parallel.collectives import CpGroup, rows_are_split
from sparse_cp_ops.context_parallel.plan import CpPlan
from sparse_cp_ops.kv_cache import PagedKvCache
from sparse_cp_ops.nn import (
    AttentionInputs,
    Indexer,
    MlaConfig,
    PendingKvWrite,
    SparseMlaFp8CPOp,
    forward_planner,
    sparse_mla,
)
from sparse_cp_ops.nn.forward_planner import ForwardPlanner
from sparse_cp_ops.nn.rope import build_cos_sin_cache

HEADS = 8
INDEX_HEADS = 8
TOPK = 64
PAGE = 16
MAX_POSITIONS = 512


def mla_config(**changes: object) -> MlaConfig:
    """Two layers, the second without an indexer of its own."""
    fields: dict[str, object] = {
        "hidden_size": 96,
        "num_heads": HEADS,
        "q_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "index_n_heads": INDEX_HEADS,
        "index_topk": TOPK,
        "softmax_scale": 0.1,
        "num_layers": 2,
        "max_positions": MAX_POSITIONS,
        "page_size": PAGE,
        "indexer_types": ("full", "shared"),
    }
    return MlaConfig(**{**fields, **changes})  # type: ignore[arg-type]


def parallelism(
    size: int,
    rank: int = 0,
    method: CPRotateMethod = CPRotateMethod.ALL_GATHER_WITH_OVERLAP,
    min_tokens: int = 0,
    **changes: object,
) -> ParallelismConfig:
    """A tensor-parallel group under context parallelism, whatever the batch size."""
    cp = PrefillCPConfig(method=method, min_tokens=min_tokens, min_kv_work=0, **changes)  # type: ignore[arg-type]
    return ParallelismConfig(tp_size=size, tp_rank=rank, world_size=size, world_rank=rank, prefill_cp_config=cp)


def attention_inputs(
    new_lens: Sequence[int], prefix_lens: Sequence[int], block_table: Tensor, is_prefill: bool = True
) -> AttentionInputs:
    return AttentionInputs(
        is_prefill,
        torch.tensor(new_lens, dtype=torch.int32),
        torch.tensor(prefix_lens, dtype=torch.int32),
        block_table,
    )


States = dict[str, Tensor]


def random_states(tokens: int, device: str = "cpu", heads: int = HEADS, index_heads: int = INDEX_HEADS) -> States:
    """What the projections of a layer would give for a request's tokens."""
    shapes = {
        "compressed_kv": (512,),
        "k_pe": (64,),
        "q": (heads, 576),
        "index_q": (index_heads, 128),
        "index_k": (128,),
        "index_weights": (index_heads,),
    }
    # Drawn on the device: states of the size of a model's take seconds on the CPU.
    states = {name: torch.randn(tokens, *shape, device=device).bfloat16() for name, shape in shapes.items()}
    states["index_weights"] = states["index_weights"].float()
    return states


def packed_states(
    requests: Sequence[States], new_lens: Sequence[int], prefix_lens: Sequence[int], device: str = "cpu"
) -> States:
    """The new tokens of a batch, request after request."""
    if not requests:
        return random_states(0, device)
    batch = list(zip(requests, new_lens, prefix_lens, strict=True))
    return {
        name: torch.cat([states[name][prefix : prefix + new] for states, new, prefix in batch]) for name in requests[0]
    }


def rows_with_nan_pads(packed: Tensor, token_ids: Tensor) -> Tensor:
    rows = torch.full((token_ids.shape[0], *packed.shape[1:]), torch.nan, dtype=packed.dtype, device=packed.device)
    rows[token_ids >= 0] = packed[token_ids[token_ids >= 0].long()]
    return rows


class SimulatedGather:
    """Stands in for BlockGather: blocks of all ranks of one layer, read when all of them have been started."""

    started: dict[int, Tensor]

    def __init__(
        self, group: CpGroup, block_bytes: int, device: torch.device, max_registered_bytes: int, borrower: int
    ) -> None:
        assert block_bytes % 16 == 0
        self.group = group
        self.own = torch.empty(block_bytes, dtype=torch.uint8, device=device)

    def start(self, overlap: bool) -> None:
        type(self).started[self.group.rank] = self.own

    def wait(self) -> Tensor:
        return torch.stack([type(self).started[rank] for rank in range(self.group.size)])


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tensors of a few rows: a second thread only waits for the first one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def simulated_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    SimulatedGather.started = {}
    monkeypatch.setattr(sparse_mla, "BlockGather", SimulatedGather)
    monkeypatch.setattr(forward_planner, "require_agreement", lambda *_: None)


def poisoned_cache(config: MlaConfig, pages: int, device: str = "cpu") -> PagedKvCache:
    cache = PagedKvCache(
        config.num_layers,
        pages,
        config.page_size,
        device,
        [config.has_indexer(layer) for layer in range(config.num_layers)],
    )
    for layer_pages in (*cache.mla, *cache.indexer):
        if layer_pages is not None:
            layer_pages.fill_(255)
    return cache


@dataclass
class Result:
    """Outputs of every layer in packed order, as one rank alone would have them."""

    out: list[Tensor] = field(default_factory=list)  # [T, H, 512]
    lse: list[Tensor] = field(default_factory=list)  # [T, H]
    picks: list[Tensor] = field(default_factory=list)  # [T, topk]

    def assert_bitwise(self, other: Result, rows: slice | Tensor = slice(None)) -> None:
        """``self`` equals the given rows of ``other``."""
        for mine, theirs in zip(
            (*self.out, *self.lse, *self.picks), (*other.out, *other.lse, *other.picks), strict=True
        ):
            expected = theirs[rows]
            assert mine.shape == expected.shape
            assert not mine.isnan().any()
            assert torch.equal(mine, expected)


@dataclass
class Written:
    """What a layer's first half leaves for its second half."""

    pending: PendingKvWrite
    q_fp8: Tensor
    q_weights: Tensor


class Rank:
    """One rank: module, indexer and caches."""

    def __init__(
        self, config: MlaConfig, cp: ParallelismConfig, pages: int, device: str, group: CpGroup | None = None
    ) -> None:
        self.config = config
        self.group = group or (CpGroup(cp.tp_size, cp.tp_rank, "simulated") if cp.tp_size > 1 else CpGroup())
        self.op = SparseMlaFp8CPOp(config, cp, planner=ForwardPlanner(config, cp, self.group))
        self.indexer = Indexer(config, device).requires_grad_(False)
        self.cache = poisoned_cache(config, pages, device)
        self.table = build_cos_sin_cache(config, device)

    def write(self, layer: int, rows: States, plan: CpPlan) -> Written:
        """Quantise this rank's rows and start the gather."""
        config = self.config
        records = self.op.new_kv_records(plan, config.has_indexer(layer))
        ops.pack_mla_kv(
            rows["compressed_kv"], rows["k_pe"], plan.positions, self.table, records.mla, True, config.scale_format
        )
        q_fp8 = q_weights = torch.empty(0)
        if records.index is not None:
            q_fp8, q_weights = self.indexer.quant_q_k_cp(
                rows["index_q"], rows["index_k"], rows["index_weights"], plan.positions, self.table, records.index
            )
        return Written(self.op.start_kv_write(records, plan), q_fp8, q_weights)

    def attend(
        self, layer: int, rows: States, plan: CpPlan, written: Written, picks: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Scatter, pick if the layer has an indexer, attend: out, lse, picks of this rank's rows."""
        self.op.finish_kv_write(written.pending, self.cache, layer, plan)
        if self.config.has_indexer(layer):
            picks = self.indexer._get_topk_ragged_cp(written.q_fp8, written.q_weights, self.cache, layer, plan)
        assert picks is not None
        out, lse = self.op(rows["q"], self.cache, layer, picks, plan)
        return out, lse, picks

    def rows(self, packed: States, plan: CpPlan) -> States:
        """This rank's rows of a layer's packed states, pads NaN."""
        return {name: rows_with_nan_pads(state, plan.token_ids) for name, state in packed.items()}


class Ranks:
    """All ranks of a group, forward by forward."""

    def __init__(
        self, size: int, pages: int, device: str = "cpu", config: MlaConfig | None = None, **cp_changes: object
    ) -> None:
        self.config = config or mla_config()
        self.ranks = [
            Rank(self.config, parallelism(size, rank, **cp_changes), pages, device)  # type: ignore[arg-type]
            for rank in range(size)
        ]
        self.plans: list[CpPlan] = []

    def forward(self, inputs: AttentionInputs, layers: Sequence[States]) -> Result:
        """Run one batch through all layers on all ranks; ``layers`` holds the packed states of each layer."""
        self.plans = plans = [rank.op.plan(inputs) for rank in self.ranks]
        result = Result()
        picks: list[Tensor | None] = [None] * len(plans)
        for layer, packed in enumerate(layers):
            rows = [rank.rows(packed, plan) for rank, plan in zip(self.ranks, plans, strict=True)]
            written = [self.ranks[i].write(layer, rows[i], plan) for i, plan in enumerate(plans)]
            done = [self.ranks[i].attend(layer, rows[i], plan, written[i], picks[i]) for i, plan in enumerate(plans)]
            for plan, (out, lse, picked) in zip(plans, done, strict=True):
                pads = plan.token_ids < 0
                assert out[pads].eq(0).all()
                assert lse[pads].eq(-torch.inf).all()
                assert picked[pads].eq(-1).all()
            outs, lses, last_picks = zip(*done, strict=True)
            for collected, per_rank in ((result.out, outs), (result.lse, lses), (result.picks, last_picks)):
                collected.append(self.restored(per_rank))
            picks = list(last_picks)
        return result

    def restored(self, per_rank: Sequence[Tensor]) -> Tensor:
        """Packed order from the rows of all ranks; if rows aren't split, every rank must have the same."""
        plan = self.plans[0]
        if rows_are_split(plan):
            return torch.cat(per_rank)[plan.restore.long()]
        for other in per_rank[1:]:
            assert torch.equal(other, per_rank[0])
        return per_rank[0][plan.restore.long()]

    def assert_caches_equal(self, other: Ranks) -> None:
        """Every rank's caches hold the bytes of ``other``'s."""
        for rank in self.ranks:
            assert_cache_equal(rank.cache, other.ranks[0].cache)


def assert_cache_equal(cache: PagedKvCache, expected: PagedKvCache) -> None:
    """The same bytes, NaN bytes where nobody wrote included."""
    for mine, theirs in zip((*cache.mla, *cache.indexer), (*expected.mla, *expected.indexer), strict=True):
        assert (mine is None) == (theirs is None)
        assert mine is None or theirs is None or torch.equal(mine, theirs)


class Scenario:
    """Requests with their tokens' states in every layer, and their pages."""

    def __init__(self, totals: Sequence[int], device: str = "cpu", config: MlaConfig | None = None) -> None:
        self.config = config or mla_config()
        self.totals = list(totals)
        heads, index_heads = self.config.num_heads, self.config.index_n_heads
        self.layers = [[random_states(total, device, heads, index_heads) for total in totals] for _ in range(2)]
        self.block_table = random_block_table(list(totals), self.config.page_size).to(device)
        self.pages = num_pages(list(totals), self.config.page_size)
        self.device = device

    def ranks(self, size: int, **changes: object) -> Ranks:
        return Ranks(size, self.pages, self.device, self.config, **changes)  # type: ignore[arg-type]

    def batch(self, new_lens: Sequence[int], prefix_lens: Sequence[int]) -> list[States]:
        return [packed_states(requests, new_lens, prefix_lens, self.device) for requests in self.layers]

    def run(self, ranks: Ranks, new_lens: Sequence[int], prefix_lens: Sequence[int], is_prefill: bool = True) -> Result:
        inputs = attention_inputs(new_lens, prefix_lens, self.block_table, is_prefill)
        return ranks.forward(inputs, self.batch(new_lens, prefix_lens))

    def rows(self, new_lens: Sequence[int], prefix_lens: Sequence[int]) -> torch.Tensor:
        """Rows of the one-shot run of all totals that a batch of chunks corresponds to."""
        starts = [0, *itertools.accumulate(self.totals)]
        return torch.cat(
            [
                torch.arange(start + prefix, start + prefix + new)
                for start, new, prefix in zip(starts, new_lens, prefix_lens, strict=False)
            ]
        ).to(self.device)
