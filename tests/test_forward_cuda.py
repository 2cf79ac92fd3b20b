"""Whole layers on one CUDA device: no host synchronisation, and graphs whose batches change between replays."""

from collections.abc import Iterator

import pytest
import torch
from cp_harness import Rank, Scenario, States, assert_cache_equal, attention_inputs, mla_config, parallelism
from hf_reference import randomise, small_config
from torch import Tensor

from sparse_cp_ops.config import ParallelismConfig
from sparse_cp_ops.context_parallel import CpPlan
from sparse_cp_ops.kv_cache import PagedKvCache
from sparse_cp_ops.nn import MlaAttention, MlaConfig, get_mla_impl

pytestmark = pytest.mark.cuda


@pytest.fixture
def device_may_not_be_waited_for() -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    yield
    torch.cuda.set_sync_debug_mode(before)


@pytest.mark.usefixtures("device_may_not_be_waited_for")
@pytest.mark.parametrize("kind", ["deepseek_v32", "glm_moe_dsa"])
@torch.no_grad()
def test_plan_prefill_and_decode_never_wait_for_the_device(kind: str) -> None:
    fields = {"indexer_types": ["full", "shared"]} if kind == "glm_moe_dsa" else {}
    config = MlaConfig.from_hf(small_config(kind, num_hidden_layers=2, **fields), page_size=16, max_positions=512)
    layers = [MlaAttention(config, i) for i in range(2)]
    for i, layer in enumerate(layers):
        randomise(layer, seed=i)
        layer.to("cuda", torch.bfloat16)
    impl = get_mla_impl(config, ParallelismConfig())
    has_indexer = [config.has_indexer(layer) for layer in range(2)]
    caches = [PagedKvCache(2, 32, 16, "cuda", has_indexer) for _ in range(2)]
    table = torch.arange(32, dtype=torch.int32, device="cuda").view(2, 16)
    batches = (([70, 9], [0, 0], True), ([30, 1], [70, 9], True), ([1, 1], [100, 10], False))
    hidden = [torch.randn(sum(new_lens), 128, device="cuda").bfloat16() for new_lens, _, _ in batches]
    results: list[list[Tensor]] = []
    for cache, mode in zip(caches, ("default", "error"), strict=True):  # what is made at the first use is made first
        torch.cuda.set_sync_debug_mode(mode)
        outs = []
        for x, (new_lens, prefix_lens, is_prefill) in zip(hidden, batches, strict=True):
            plan = impl.prepare(attention_inputs(new_lens, prefix_lens, table, is_prefill))
            picks = None
            for layer in layers:
                x, picks = layer(x, cache, impl, plan, picks)
            outs.append(x)
        results.append(outs)
    torch.cuda.set_sync_debug_mode("default")
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second)
        assert first.isfinite().all()


def run_layers(rank: Rank, rows: list[States], plan: CpPlan) -> list[Tensor]:
    """A layer with an indexer and one that takes its picks."""
    first = rank.attend(0, rows[0], plan, rank.write(0, rows[0], plan), None)
    second = rank.attend(1, rows[1], plan, rank.write(1, rows[1], plan), first[2])
    return [first[0], first[1], second[0], second[1]]


@torch.no_grad()
def test_captured_layers_follow_new_batches() -> None:
    """One graph with room for three requests and 60 tokens, replayed for other batches, some behind a prefix."""
    scenario = Scenario([60, 60, 60], "cuda", mla_config())
    eager, captured = (Rank(scenario.config, parallelism(1), scenario.pages, "cuda") for _ in range(2))

    def plan_of(rank: Rank, new_lens: list[int], prefix_lens: list[int], **room: int) -> CpPlan:
        inputs = attention_inputs(new_lens, prefix_lens, scenario.block_table)
        return rank.op.planner.prepare(inputs, True, **room)

    plan = plan_of(captured, [20, 20, 20], [0, 0, 0], max_requests=3, local_rows=60, total_tokens=60)
    rows = [captured.rows(packed, plan) for packed in scenario.batch([20, 20, 20], [0, 0, 0])]
    run_layers(captured, rows, plan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run_layers(captured, rows, plan)
    for rank in (eager, captured):
        for pages in (*rank.cache.mla, *rank.cache.indexer):
            if pages is not None:
                pages.fill_(0xFF)
    for new_lens, prefix_lens in (
        ([20, 20, 20], [0, 0, 0]),
        ([31, 0, 1], [20, 20, 20]),
        ([1, 1, 1], [51, 20, 21]),
        ([0, 40, 0], [52, 20, 22]),
    ):
        batch = scenario.batch(new_lens, prefix_lens)
        new = plan_of(captured, new_lens, prefix_lens)
        plan.copy_(new)
        for layer, packed in enumerate(batch):
            for name, values in captured.rows(packed, plan).items():
                rows[layer][name].copy_(values)
        for result in results:
            result.fill_(torch.nan)
        graph.replay()
        alone = plan_of(eager, new_lens, prefix_lens)
        expected = run_layers(eager, [eager.rows(packed, alone) for packed in batch], alone)
        for mine, theirs in zip(results, expected, strict=True):
            assert torch.equal(mine[: sum(new_lens)], theirs)
        for out, lse in (results[:2], results[2:]):
            assert out[sum(new_lens) :].eq(0).all()
            assert lse[sum(new_lens) :].isneginf().all()
        assert_cache_equal(captured.cache, eager.cache)


@pytest.mark.parametrize("kind", ["deepseek_v32", "glm_moe_dsa"])
@torch.no_grad()
def test_captured_decode_steps_are_eager_ones(kind: str) -> None:
    """Four whole layers in one graph, where the queries have a stream of their own: the bits of eager steps."""
    fields = {"indexer_types": ["full", "shared"] * 2} if kind == "glm_moe_dsa" else {}
    config = MlaConfig.from_hf(small_config(kind, num_hidden_layers=4, **fields), page_size=16, max_positions=512)
    layers = [MlaAttention(config, i) for i in range(4)]
    for i, layer in enumerate(layers):
        randomise(layer, seed=i)
        layer.to("cuda", torch.bfloat16)
    impl = get_mla_impl(config, ParallelismConfig())
    cache = PagedKvCache(4, 48, 16, "cuda", [config.has_indexer(layer) for layer in range(4)])
    table = torch.randperm(48, device="cuda").int().view(3, 16)

    def step(hidden: Tensor, plan: CpPlan) -> Tensor:
        picks = None
        for layer in layers:
            out, picks = layer(hidden, cache, impl, plan, picks)
            hidden = hidden + out
        return hidden

    step(torch.randn(600, 128, device="cuda").bfloat16(), impl.prepare(attention_inputs([200] * 3, [0] * 3, table)))
    room = {"max_requests": 3, "local_rows": 3, "total_tokens": 3}
    plan = impl.prepare(attention_inputs([1] * 3, [199] * 3, table, False), **room)
    hidden = torch.randn(3, 128, device="cuda").bfloat16()
    step(hidden, plan)  # what is made at the first use is made outside of the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(hidden, plan)
    for prefix_lens in ([199, 199, 199], [0, 120, 63], [150, 7], [198]):
        requests = len(prefix_lens)
        plan.copy_(impl.prepare(attention_inputs([1] * requests, prefix_lens, table[:requests], False)))
        hidden.copy_(torch.randn(3, 128, device="cuda"))
        expected = step(hidden, plan)
        for _ in range(5):  # a race need not show each time
            out.fill_(torch.nan)
            graph.replay()
            assert torch.equal(out[:requests], expected[:requests])
