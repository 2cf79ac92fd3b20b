"""What runs on every rank of test_distributed.py, on any device. A case fails by raising on any rank."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import logging

import pytest
import torch
import torch.distributed as dist
from cp_harness import MAX_POSITIONS, PAGE, assert_cache_equal, attention_inputs, mla_config, parallelism
from rank_process import Case, assert_bitwise, device, layers, new_rank, new_scenario, one_rank, run
from store_harness import FakeBackend, holds, small_cache, store_pages, wipe
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from sparse_cp_ops.cache_store import CacheStore, PrefixCache, restore_prefixes
from sparse_cp_ops.config import CPRotateMethod, ParallelismConfig
from sparse_cp_ops.context_parallel import collectives as comm
from sparse_cp_ops.nn import SparseMlaCpImpl, get_mla_impl

# What a rank may take to see that another one has failed, in the cases about failures. Behind a barrier: ranks that
# start at different moments must not fail for that.
SHORT_TIMEOUT = datetime.timedelta(seconds=4)


# ---- the same bits as one rank ----


def prefill_of_mixed_batches(group: comm.CpGroup) -> None:
    for method in (CPRotateMethod.ALL_GATHER, CPRotateMethod.ALL_GATHER_WITH_OVERLAP):
        for split in ("zigzag", "interleave"):
            for new_lens in ([1], [3, 70, 1], [0, 5], [40, 41]):
                scenario = new_scenario(new_lens)
                one, many = one_rank(scenario), new_rank(scenario, group, method=method, split=split)
                zeros = [0] * len(new_lens)
                assert_bitwise(run(many, scenario, new_lens, zeros), run(one, scenario, new_lens, zeros))
                assert_cache_equal(many.cache, one.cache)


def chunks_and_decode(group: comm.CpGroup) -> None:
    for decode_mode, split in (("replicated", "zigzag"), ("batch_slice", "interleave")):
        totals = [80, 23, 1 + 2 * PAGE]
        scenario = new_scenario(totals)
        one, many = one_rank(scenario), new_rank(scenario, group, decode_mode=decode_mode, split=split)
        expected = run(one, scenario, totals, [0, 0, 0])
        done = [0, 0, 0]
        # The second chunk is one token behind a prefix: the other ranks have none.
        chunks = ([50, 0, 3], [1, 0, 0], [19, 13, 20])
        for chunk, is_prefill in [*((chunk, True) for chunk in chunks), *[([1, 1, 1], False)] * 10]:
            result = run(many, scenario, chunk, done, is_prefill)
            assert_bitwise(result, expected, scenario.rows(chunk, done))
            done = [start + new for start, new in zip(done, chunk, strict=True)]
        assert done == totals
        assert_cache_equal(many.cache, one.cache)


def an_abandoned_gather_leaves_nothing_behind(group: comm.CpGroup) -> None:
    scenario = new_scenario([20])
    many = new_rank(scenario, group)
    plan = many.op.plan(attention_inputs([20], [0], scenario.block_table))
    many.write(0, many.rows(scenario.batch([20], [0])[0], plan), plan)
    one = one_rank(scenario)
    assert_bitwise(run(many, scenario, [20], [0]), run(one, scenario, [20], [0]))
    assert_cache_equal(many.cache, one.cache)


def two_batches_are_interleaved(group: comm.CpGroup) -> None:
    """Two batches in flight, with a planner each: both gathers of a layer run before the first one is waited for."""
    scenario = new_scenario([21, 40])
    batches = (([20, 3], [0, 0]), ([1, 37], [20, 3]))  # the second one is behind the first one's tokens
    many = [new_rank(scenario, group) for _ in batches]
    many[1].cache = many[0].cache
    plans = [
        rank.op.plan(attention_inputs(*batch, scenario.block_table)) for rank, batch in zip(many, batches, strict=True)
    ]
    rows = [
        [rank.rows(packed, plan) for packed in scenario.batch(*batch)]
        for rank, plan, batch in zip(many, plans, batches, strict=True)
    ]
    results: list[list[Tensor]] = [[], []]
    picks: list[Tensor | None] = [None, None]
    for layer in range(2):
        written = [many[i].write(layer, rows[i][layer], plans[i]) for i in range(2)]
        for i in range(2):
            *attended, picks[i] = many[i].attend(layer, rows[i][layer], plans[i], written[i], picks[i])
            results[i] += [comm.restore_rows(local, plans[i], group) for local in (*attended, picks[i])]
    one = one_rank(scenario)
    for mine, batch in zip(results, batches, strict=True):
        assert_bitwise(mine, run(one, scenario, *batch))
    assert_cache_equal(many[0].cache, one.cache)
    # A plan still ends with the next one of its own planner, and with that alone.
    many[0].op.plan(attention_inputs([1, 1], [0, 0], scenario.block_table))
    with pytest.raises(ValueError, match="stale"):
        many[0].op.new_kv_records(plans[0], True)
    many[1].op.new_kv_records(plans[1], True)


def compiled_steps_are_one_graph(group: comm.CpGroup) -> None:
    """The functional gather, fullgraph, at most 2 recompiles over many lengths, and the bits of one rank."""
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(layers, fullgraph=True, backend=counter)
    for length in range(2, 30):
        scenario = new_scenario([length, 3])
        one, many = one_rank(scenario), new_rank(scenario, group, split=("zigzag", "interleave")[length % 2])
        lens, zeros = [length, 3], [0, 0]
        with torch.no_grad():
            results = run(many, scenario, lens, zeros, step=compiled)
            assert_bitwise(results, run(one, scenario, lens, zeros))
        assert_cache_equal(many.cache, one.cache)
    assert counter.frame_count <= 3, counter.frame_count


# ---- the other collectives ----


def sums_and_gathers_of_rows(group: comm.CpGroup) -> None:
    ranks = torch.arange(group.size, dtype=torch.float32, device=device())
    x = torch.arange(6, dtype=torch.float32, device=device()).view(2, 3)
    for function in (lambda f: f, lambda f: torch.compile(f, fullgraph=True, backend="aot_eager")):
        summed = function(lambda x: comm.all_reduce_sum(x * (group.rank + 1), group))(x)
        assert torch.equal(summed, x * (ranks + 1).sum())
        transposed = function(lambda x: comm.all_reduce_sum(x.t() + 0, group))(x)
        assert torch.equal(transposed, x.t() * group.size)
        gathered = function(lambda x: comm.all_gather_rows((x + group.rank).t(), group))(x)
        assert torch.equal(gathered, torch.cat([(x + rank).t() for rank in range(group.size)]))
    assert comm.all_gather_rows(x[:0], group).shape == (0, 3)


def hidden_states_at_the_end_of_the_model(group: comm.CpGroup) -> None:
    for split in ("zigzag", "interleave"):
        for new_lens in ([5, 0, 17, 1], [1], [3, 2], [0, 4, 0], [0], []):
            scenario = new_scenario([max(1, new) for new in new_lens])
            many = new_rank(scenario, group, split=split)
            plan = many.op.plan(attention_inputs(new_lens, [0] * len(new_lens), scenario.block_table))
            hidden = torch.randn(sum(new_lens), 4, 3).bfloat16().to(device())
            hidden[::2] = -0.0
            local = comm.take_local_rows(hidden, plan)
            assert local.shape[0] == plan.local_rows
            assert_same_bits(comm.gather_hidden_states(local, plan, group), hidden)
            last = torch.zeros(len(new_lens), 4, 3, dtype=torch.bfloat16, device=device())
            for request, new in enumerate(new_lens):
                if new:
                    last[request] = hidden[sum(new_lens[: request + 1]) - 1]
            assert_same_bits(comm.gather_last_tokens(local, plan, group), last)
            # In decode, and in prefill below the threshold, every rank has all rows already.
            whole = new_rank(scenario, group, min_tokens=1000).op.plan(
                attention_inputs(new_lens, [0] * len(new_lens), scenario.block_table)
            )
            assert comm.gather_hidden_states(hidden, whole, group) is hidden
            assert_same_bits(comm.gather_last_tokens(hidden, whole, group), last)


def plans_with_room(group: comm.CpGroup) -> None:
    scenario = new_scenario([9, 5])
    many = new_rank(scenario, group, split="interleave")
    inputs = attention_inputs([9, 5], [0, 0], scenario.block_table)
    plan = many.op.planner.prepare(inputs, True, max_requests=4, local_rows=16, total_tokens=20)
    hidden, zeros = torch.randn(14, 3, device=device()), torch.zeros(6, 3, device=device())
    local = torch.full((16, 3), torch.nan, device=device())
    local[plan.token_ids >= 0] = hidden[plan.token_ids[plan.token_ids >= 0].long()]
    assert_same_bits(comm.gather_hidden_states(local, plan, group), torch.cat([hidden, zeros]))
    last = torch.stack([hidden[8], hidden[13], *zeros[:2]])
    assert_same_bits(comm.gather_last_tokens(local, plan, group), last)


def assert_same_bits(mine: Tensor, expected: Tensor) -> None:
    assert mine.shape == expected.shape
    assert torch.equal(mine.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))


def user_buffer_config(group: comm.CpGroup, use_ub_comm: bool, comm_buffer_size: int = 1 << 20) -> ParallelismConfig:
    cp = parallelism(group.size, group.rank, comm_buffer_size=comm_buffer_size).prefill_cp_config
    return ParallelismConfig(
        tp_size=group.size,
        tp_rank=group.rank,
        world_size=group.size,
        world_rank=group.rank,
        prefill_cp_config=cp,
        use_ub_comm=use_ub_comm,
    )


def user_buffers_need_cuda(group: comm.CpGroup) -> None:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    comm.logger.addHandler(handler)
    comm.logger.setLevel(logging.INFO)
    pg, config, with_buffers = group.process_group, *(user_buffer_config(group, use) for use in (False, True))
    for cp, some_group, reason in (
        (config, pg, "use_ub_comm is not set"),
        (with_buffers, None, "the group has no other rank"),
        (with_buffers, pg, "the device is cpu, not CUDA"),
    ):
        assert comm.init_user_buffers_environment(cp, some_group, "cpu") is False
        assert reason in messages[-1]
        with pytest.raises(RuntimeError, match=reason):
            comm.init_user_buffers_environment(cp, some_group, "cpu", strict=True)
    comm.logger.removeHandler(handler)


# ---- errors surface on all ranks ----


def different_batches_are_refused(group: comm.CpGroup) -> None:
    scenario = new_scenario([40, 40])
    many = new_rank(scenario, group, decode_mode="batch_slice")
    odd = group.rank == group.size - 1
    good, table = ([20, 3], [0, 1]), scenario.block_table
    differs = f"the same batch on all {group.size} ranks, but rank {group.rank} has"
    # What the odd rank has, and what it says if that is wrong whatever the others have.
    for other, refusal in (
        (([21, 3], [0, 1]), None),
        (([20, 3], [0, 2]), None),
        (([23], [0]), None),
        (([20, 3, 0], [0, 1, 0]), None),
        (([20, -1], [0, 1]), r"new_lens\[1\]: expected a length >= 0"),
        (([MAX_POSITIONS, 3], [0, 1]), "block_table: expected"),
    ):
        lens, prefix = other if odd else good
        inputs = attention_inputs(lens, prefix, table[[0, 1, 0]][: len(lens)])
        with pytest.raises(ValueError, match=refusal if odd and refusal else differs):
            many.op.plan(inputs)
    # The same lengths, but pages that were found for other tokens.
    prefix_cache = PrefixCache(8, PAGE)
    prefix_cache.match_prefix([1] * (PAGE + 1) + [2 + odd])
    inputs = dataclasses.replace(attention_inputs(*good, table), decisions=prefix_cache.decisions)
    with pytest.raises(ValueError, match="prefix-cache decisions"):
        many.op.plan(inputs)
    # The same lengths, but a table that is too narrow for them.
    with pytest.raises(ValueError, match="block_table" if odd else differs):
        many.op.plan(attention_inputs(*good, table[:, : 1 if odd else None]))
    # All ranks refuse the same: everybody says why.
    with pytest.raises(ValueError, match=r"new_lens\[1\]: expected a length >= 0"):
        many.op.plan(attention_inputs([20, -1], [0, 1], table))
    inputs = attention_inputs([1, 1 - odd], [5, 5], table, is_prefill=False)
    with pytest.raises(ValueError, match="the same batch"):
        many.op.plan(inputs)
    # Nobody waits for anybody now: the next forward is a good one.
    assert_bitwise(run(many, scenario, [20, 3], [0, 0]), run(one_rank(scenario), scenario, [20, 3], [0, 0]))


def ranks_agree_on_what_a_store_has(group: comm.CpGroup) -> None:
    """The last rank does not see one page and reads a damaged one: all of them go on with what every rank has."""
    odd = group.rank == group.size - 1
    backend = FakeBackend()
    writing = CacheStore(small_cache(), 1 << 20, "", backend)
    prompts = [[9] * (5 * PAGE), [8] * (3 * PAGE + 1), [7] * PAGE]
    first, second = (writing.page_keys(prompt) for prompt in prompts[:2])
    store_pages(writing, first)
    store_pages(writing, second)
    if odd:
        del backend.content[first[3]]
        backend.content[second[1]] = bytes(len(backend.content[second[1]]))
    store = CacheStore(small_cache(12), 1 << 20, "", backend)
    prefix_cache = PrefixCache(12, PAGE, store.fingerprint)
    wipe(store.cache)
    held = restore_prefixes(prefix_cache, store, prompts, group)
    assert [len(pages) for pages in held] == [3, 1, 0]
    for keys, pages in zip((first, second), held, strict=False):
        assert all(holds(store.cache, key, page) for key, page in zip(keys, pages, strict=False))
    digest = int.from_bytes(prefix_cache.decisions[:7])
    assert comm.agree_on_minimum([digest, -digest], group, torch.device("cpu")) == [digest, -digest]
    # The device has them now.
    assert prefix_cache.match_prefix(prompts[0]) == held[0]
    # Ranks with different numbers of prompts: an error on all of them, and nothing is held.
    available = prefix_cache.available
    for count in (0, 1):
        with pytest.raises(ValueError, match=f"as many on all ranks, got {count + 2} to {count + 3}"):
            restore_prefixes(prefix_cache, store, [[6] * PAGE] * (count + odd), group)
    assert prefix_cache.available == available
    many = [group.rank * 1000 + value for value in range(100)]
    for given in (many[:61], many[:62], many, []):
        assert comm.agree_on_minimum(given, group, torch.device("cpu")) == list(range(len(given)))


def a_rank_that_fails_to_restore_is_an_error_on_all(group: comm.CpGroup) -> None:
    """Within the collective that is there anyway: the next one, of the restore behind it, is not disturbed."""
    odd = group.rank == group.size - 1
    prompts = [[9] * (3 * PAGE), [8] * (2 * PAGE)]
    store = CacheStore(small_cache(), 1 << 20, "", FakeBackend())
    for prompt in prompts:
        store_pages(store, store.page_keys(prompt))

    def fail(*_: object) -> int:
        raise ZeroDivisionError("on purpose")

    def try_to_restore(prefix_cache: PrefixCache, own: CacheStore | None = store) -> None:
        restore_prefixes(prefix_cache, own, prompts, group)

    prefix_cache = PrefixCache(12, PAGE, store.fingerprint)
    failed = f"rank {group.size - 1} has failed"
    for step in ("page_keys", "match", "read"):
        with pytest.MonkeyPatch.context() as patched:
            if odd:
                patched.setattr(store, step, fail)
            with pytest.raises(ZeroDivisionError if odd else RuntimeError, match="on purpose" if odd else failed):
                try_to_restore(prefix_cache)
    with pytest.raises(ValueError if odd else RuntimeError, match="got another one" if odd else failed):
        try_to_restore(PrefixCache(12, PAGE, b"another" if odd else store.fingerprint))
    for lacking in (odd, not odd):
        with pytest.raises(ValueError, match="store: expected one on all ranks or on none of them"):
            try_to_restore(prefix_cache, None if lacking else store)
    assert restore_prefixes(prefix_cache, None, prompts, group) == [[], []]
    assert prefix_cache.available == 12
    # All ranks decided alike in spite of it.
    held = restore_prefixes(prefix_cache, store, prompts, group)
    assert [len(pages) for pages in held] == [2, 1]
    digest = int.from_bytes(prefix_cache.decisions[:7])
    assert comm.agree_on_minimum([digest, -digest], group, torch.device("cpu")) == [digest, -digest]


def get_mla_impl_checks_the_group(group: comm.CpGroup) -> None:
    impl = get_mla_impl(mla_config(), parallelism(group.size, group.rank), group.process_group)
    assert type(impl) is SparseMlaCpImpl
    assert impl.group == group
    with pytest.raises(ValueError, match=f"expected size {group.size + 1} as tp_size"):
        get_mla_impl(mla_config(), parallelism(group.size + 1, group.rank), group.process_group)


def a_rank_that_fails_between_two_collectives(group: comm.CpGroup) -> None:
    """It raises after its planning; the others see an error within the timeout of the group, not a hang."""
    short = dist.new_group(timeout=SHORT_TIMEOUT)
    assert isinstance(short, dist.ProcessGroup)
    scenario = new_scenario([20])
    many = new_rank(scenario, comm.CpGroup.of(short))
    dist.barrier(group.process_group)
    plan = many.op.plan(attention_inputs([20], [0], scenario.block_table))
    rows = many.rows(scenario.batch([20], [0])[0], plan)
    if group.rank == 0:
        with contextlib.suppress(ZeroDivisionError):
            raise ZeroDivisionError
    else:
        with pytest.raises(RuntimeError):
            many.attend(0, rows, plan, many.write(0, rows, plan), None)
    # Rank 0 was alive until all others had their error: it stands for no connection that has closed.
    dist.barrier(group.process_group)


ANY_DEVICE: list[Case] = [
    prefill_of_mixed_batches,
    chunks_and_decode,
    an_abandoned_gather_leaves_nothing_behind,
    two_batches_are_interleaved,
    sums_and_gathers_of_rows,
    hidden_states_at_the_end_of_the_model,
    plans_with_room,
    get_mla_impl_checks_the_group,
]
FOUR_RANKS: list[Case] = [
    *ANY_DEVICE,
    user_buffers_need_cuda,
    different_batches_are_refused,
    ranks_agree_on_what_a_store_has,
    a_rank_that_fails_to_restore_is_an_error_on_all,
]
TWO_RANKS: list[Case] = [*FOUR_RANKS, compiled_steps_are_one_graph, a_rank_that_fails_between_two_collectives]
# All of them for processes that run side by side, as GPU_GROUPS are.
CPU_GROUPS: list[list[Case]] = [
    FOUR_RANKS,
    [compiled_steps_are_one_graph],
    [a_rank_that_fails_between_two_collectives],
]
