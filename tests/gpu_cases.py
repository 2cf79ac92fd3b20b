"""What runs on every rank of test_distributed.py where the ranks are GPUs: NCCL, graphs, registered buffers."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import torch
import torch.distributed as dist
from cp_harness import Rank, Scenario, States, assert_cache_equal, attention_inputs, mla_config
from distributed_cases import (
    ANY_DEVICE,
    chunks_and_decode,
    compiled_steps_are_one_graph,
    prefill_of_mixed_batches,
    two_batches_are_interleaved,
    user_buffer_config,
)
from rank_process import Case, assert_bitwise, device, layers, new_rank, new_scenario, one_rank, run

from sparse_cp_ops.context_parallel import CpPlan
from sparse_cp_ops.context_parallel import collectives as comm


def registered_buffers_change_no_bit(group: comm.CpGroup) -> None:
    """Gathers that fit the buffer use it, larger ones don't; results are those of one rank either way."""
    config = user_buffer_config(group, True, comm_buffer_size=32 << 10)
    assert comm.init_user_buffers_environment(config, group.process_group, "cuda", strict=True)
    assert comm.init_user_buffers_environment(config, group.process_group, "cuda")
    registered = comm._registered_buffer(group)
    assert registered is not None
    for length, fits in ((12, True), (90, False), (13, True)):
        scenario = new_scenario([length])
        one, many = one_rank(scenario), Rank(mla_config(), config, scenario.pages, device(), group)
        plan = many.op.plan(attention_inputs([length], [0], scenario.block_table))
        records = many.op.new_kv_records(plan, True)
        assert (registered._borrower is not None) is fits
        del records
        assert_bitwise(run(many, scenario, [length], [0]), run(one, scenario, [length], [0]))
        assert_cache_equal(many.cache, one.cache)
        assert registered._borrower is None


def captured_prefill_follows_new_lengths(group: comm.CpGroup) -> None:
    """One CUDA graph a split with room for 40 tokens, replayed for other batches, some behind a prefix: the bits of
    eager runs on one rank, cache bytes included."""
    for split in ("zigzag", "interleave"):
        _captured_prefill(new_scenario([40, 40]), group, split)


def _captured_prefill(scenario: Scenario, group: comm.CpGroup, split: str) -> None:
    many = new_rank(scenario, group, split=split)
    rows_of_20 = many.op.plan(attention_inputs([20, 20], [0, 0], scenario.block_table)).local_rows

    def planned(new_lens: Sequence[int], prefix_lens: Sequence[int] = (0, 0)) -> CpPlan:
        inputs = attention_inputs(new_lens, prefix_lens, scenario.block_table)
        return many.op.planner.prepare(inputs, True, max_requests=2, local_rows=rows_of_20, total_tokens=40)

    plan = planned([20, 20])
    rows = [many.rows(packed, plan) for packed in scenario.batch([20, 20], [0, 0])]
    layers(many, rows, plan)  # what is made at the first use is made outside of the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = layers(many, rows, plan)
    for new_lens, behind in (([20, 20], None), ([31, 2], [0, 0]), ([9, 0], [31, 2]), ([0, 5], None), ([1, 0], None)):
        if behind is None:  # else the pages of the replay before hold the prefix
            one = one_rank(scenario)
            for pages in (*many.cache.mla, *many.cache.indexer):
                if pages is not None:
                    pages.fill_(0xFF)  # as the harness makes them
        prefix_lens = behind or [0, 0]
        new = planned(new_lens, prefix_lens)
        plan.copy_(new)
        for layer, packed in enumerate(scenario.batch(new_lens, prefix_lens)):
            for name, values in many.rows(packed, new).items():
                rows[layer][name].copy_(values)
        graph.replay()
        restored = [comm.restore_rows(local, new, group)[: sum(new_lens)] for local in results]
        assert_bitwise(restored, run(one, scenario, new_lens, prefix_lens))
        assert_cache_equal(many.cache, one.cache)


def nothing_waits_for_the_device(group: comm.CpGroup) -> None:
    """Planning and all steps of a forward, without one host synchronisation."""
    scenario = new_scenario([70, 9])
    many = new_rank(scenario, group, decode_mode="batch_slice")
    rows: list[States] = []
    for new_lens, prefix, is_prefill in (([70, 9], [0, 0], True), ([1, 1], [60, 8], False)):
        inputs = attention_inputs(new_lens, prefix, scenario.block_table, is_prefill)
        for checked in (False, True):  # warm first: handles, streams and communicators are made at the first use
            if checked:
                torch.cuda.set_sync_debug_mode("error")
            plan = many.op.plan(inputs)
            if not checked:
                rows = [many.rows(packed, plan) for packed in scenario.batch(new_lens, prefix)]
            out = layers(many, rows, plan)[0]
            comm.gather_last_tokens(out, plan, group) if is_prefill else comm.restore_rows(out, plan, group)
            torch.cuda.set_sync_debug_mode("default")


def prefill_at_the_dimensions_of_a_model(group: comm.CpGroup) -> None:
    """The heads and top-k of DeepSeek-V3.2, which have kernels of their own, in one piece and in chunks."""
    config = mla_config(num_heads=128, index_n_heads=64, index_topk=2048, page_size=64, max_positions=4096)
    totals, zeros = [2500, 1, 700], [0, 0, 0]
    scenario = new_scenario(totals, config)
    one = one_rank(scenario)
    expected = run(one, scenario, totals, zeros)
    for split in ("zigzag", "interleave"):
        for chunks in ([totals], [[2100, 0, 3], [400, 1, 697]]):
            many, done = new_rank(scenario, group, split=split), zeros
            for chunk in chunks:
                assert_bitwise(run(many, scenario, chunk, done), expected, scenario.rows(chunk, done))
                done = [start + new for start, new in zip(done, chunk, strict=True)]
            assert done == totals
            assert_cache_equal(many.cache, one.cache)


def everything_over_registered_buffers(group: comm.CpGroup) -> None:
    """A group whose gathers all fit its buffer."""
    ranks = dist.new_group()
    assert isinstance(ranks, dist.ProcessGroup)
    registered_group = comm.CpGroup.of(ranks)
    config = user_buffer_config(registered_group, True)
    assert comm.init_user_buffers_environment(config, ranks, torch.device("cuda", group.rank), strict=True)
    for case in (
        prefill_of_mixed_batches,
        chunks_and_decode,
        two_batches_are_interleaved,
        captured_prefill_follows_new_lengths,
        nothing_waits_for_the_device,
    ):
        case(registered_group)
    registered = comm._registered_buffer(registered_group)
    assert registered is not None
    assert registered._last_stream is not None  # somebody took it


def groups_with_registered_buffers_come_and_go(group: comm.CpGroup) -> None:
    """Destroying a group whose buffer is in use leaves the process alive, and the next group gets a buffer again."""
    before = len(comm._registered_buffers)
    for _ in range(2):
        ranks = dist.new_group()
        assert isinstance(ranks, dist.ProcessGroup)
        own = comm.CpGroup.of(ranks)
        config = user_buffer_config(own, True)
        assert comm.init_user_buffers_environment(config, ranks, "cuda", strict=True)
        prefill_of_mixed_batches(own)
        dist.destroy_process_group(ranks)
        del ranks, own
        gc.collect()
        torch.cuda.empty_cache()
    assert len(comm._registered_buffers) == before


def buffers_of_different_sizes_are_not_used(group: comm.CpGroup) -> None:
    config = user_buffer_config(group, True, comm_buffer_size=(1 + group.rank) << 20)
    assert not comm.init_user_buffers_environment(config, group.process_group, "cuda")
    assert comm._registered_buffer(group) is None


# Each list is a group of processes of its own: what fails in one leaves the others alone.
GPU_GROUPS: list[list[Case]] = [
    [*ANY_DEVICE, prefill_at_the_dimensions_of_a_model],
    [compiled_steps_are_one_graph],
    [nothing_waits_for_the_device, captured_prefill_follows_new_lengths],
    [
        buffers_of_different_sizes_are_not_used,
        registered_buffers_change_no_bit,
        everything_over_registered_buffers,
        groups_with_registered_buffers_come_and_go,
    ],
]
