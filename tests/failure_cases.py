"""Ranks that fail in the middle of a forward. Each case is the last one of its group: some processes don't survive it.

With gloo the others get an error as soon as the connections close. NCCL notices nothing until the timeout of the
group; then its watchdog ends the process.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence

import pytest
import torch.distributed as dist
from cp_harness import attention_inputs
from distributed_cases import SHORT_TIMEOUT
from process_groups import Ending
from rank_process import GROUP_TIMEOUT, Case, new_rank, new_scenario, run, synchronize

from sparse_cp_ops.context_parallel import collectives as comm


def _a_second_layer_without_rank_0(fail: Callable[[], None], group: comm.CpGroup) -> None:
    scenario = new_scenario([20])
    # A forward under the long timeout first: what is loaded at the first use can take longer than the short one.
    run(new_rank(scenario, group), scenario, [20], [0])
    short = dist.new_group(timeout=SHORT_TIMEOUT)
    assert isinstance(short, dist.ProcessGroup)
    many = new_rank(scenario, comm.CpGroup.of(short))
    dist.barrier(group.process_group)
    plan = many.op.plan(attention_inputs([20], [0], scenario.block_table))
    rows = [many.rows(packed, plan) for packed in scenario.batch([20], [0])]
    _, _, picks = many.attend(0, rows[0], plan, many.write(0, rows[0], plan), None)
    synchronize()
    if group.rank == 0:
        fail()

    def second_layer() -> None:
        many.attend(1, rows[1], plan, many.write(1, rows[1], plan), picks)
        synchronize()

    with pytest.raises(RuntimeError):
        second_layer()


def a_rank_that_raises(group: comm.CpGroup) -> None:
    def fail() -> None:
        raise ZeroDivisionError("this rank fails on purpose")

    _a_second_layer_without_rank_0(fail, group)


def a_rank_that_is_killed(group: comm.CpGroup) -> None:
    _a_second_layer_without_rank_0(lambda: os.kill(os.getpid(), signal.SIGKILL), group)


def different_batches_on_gpus(group: comm.CpGroup) -> None:
    """A device-side assertion: no CUDA call works in these processes afterwards."""
    scenario = new_scenario([40])
    many = new_rank(scenario, group)

    def plan() -> None:
        many.op.plan(attention_inputs([20 + group.rank], [0], scenario.block_table))
        synchronize()

    with pytest.raises(RuntimeError):
        plan()


FAILING_RANK: list[Case] = [a_rank_that_raises, a_rank_that_is_killed]


def complaint(endings: Sequence[Ending], case: Case, device: str) -> str:
    """How the first rank ended that did not end as it should, or "".

    Rank 0 of a failing group fails on purpose. Everybody else sees an error within the timeout: as an exception or,
    with NCCL, by the watchdog's abort.
    """
    for rank, ending in enumerate(endings):
        report = ending.report(case)
        if rank == 0 and case in FAILING_RANK:
            killed = case is a_rank_that_is_killed
            fine = ending.status == -signal.SIGKILL if killed else "on purpose" in report and ending.status == 1
        else:
            aborted = device == "cuda" and not ending.reports and ending.status == -signal.SIGABRT
            fine = ending.seconds < GROUP_TIMEOUT.total_seconds() and (report == "" or aborted)
        if not fine:
            saw = report.strip().splitlines()[-1] if report else "an exception"
            return f"rank {rank}: {saw} after {ending.seconds:.1f} s, status {ending.status}"
    return ""
