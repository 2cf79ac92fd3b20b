"""One rank of a group of processes: what it runs, and forwards of the op-level pipeline on it."""

from __future__ import annotations

import datetime
import json
import os
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from cp_harness import Rank, Scenario, States, attention_inputs, parallelism
from torch import Tensor

from sparse_cp_ops.context_parallel import CpPlan
from sparse_cp_ops.context_parallel import collectives as comm
from sparse_cp_ops.nn import MlaConfig

# Between the first and the last rank that reaches a collective, where nobody has failed: four processes that import
# torch or compile on two slow cores do so up to half a minute apart.
GROUP_TIMEOUT = datetime.timedelta(seconds=60)

NCCL_ENVIRONMENT = {
    # Multicast needs a switch that not every host gives to everybody.
    "NCCL_NVLS_ENABLE": "0",
    # After a timeout torch's watchdog sleeps four times the time that it leaves for dumps, 60 s by default, before it
    # ends the process.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "250",
}

# A case gets the group, and fails by raising on any rank.
Case = Callable[[comm.CpGroup], None]

_device = "cpu"


def device() -> str:
    """ "cpu" or "cuda": where the ranks of this process group work."""
    return _device


def run_cases(rank: int, size: int, cases: Sequence[Case], folder: str, device: str) -> None:
    """Run the cases in order on one rank; writes what happened to ``folder/<rank>.json``: case -> "" or a traceback."""
    global _device
    _device = device
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)  # fresh memory is filled with NaN
    join_group(rank, size, folder, device)
    results: dict[str, str] = {}
    for case in cases:
        torch.manual_seed(0)
        try:
            case(comm.CpGroup.of(dist.group.WORLD))
            results[case.__name__] = ""
        except BaseException:
            results[case.__name__] = traceback.format_exc()
        # After every case: the next one may end the process.
        Path(folder, f"{rank}.json").write_text(json.dumps(results))
        if results[case.__name__]:
            os._exit(1)  # the others are in a collective: leaving lets them see it at once
    try:
        synchronize()
    except RuntimeError:
        os._exit(1)  # a case ended in a device-side assertion: nothing can be destroyed any more
    dist.destroy_process_group()


def join_group(rank: int, size: int, folder: str, device: str) -> None:
    """Make the default group of ``size`` processes that share ``folder``; NCCL where the device is a GPU."""
    if device == "cuda":
        os.environ.update(NCCL_ENVIRONMENT)
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=size,
        timeout=GROUP_TIMEOUT,
        device_id=torch.device("cuda", rank) if device == "cuda" else None,
    )


def synchronize() -> None:
    """Wait for the GPU, where there is one: an error of a collective surfaces there at the latest."""
    if _device == "cuda":
        torch.cuda.synchronize()


def new_scenario(totals: Sequence[int], config: MlaConfig | None = None) -> Scenario:
    return Scenario(totals, _device, config)


def new_rank(scenario: Scenario, group: comm.CpGroup, **changes: object) -> Rank:
    config = parallelism(group.size, group.rank, **changes)  # type: ignore[arg-type]
    return Rank(scenario.config, config, scenario.pages, _device, group)


def one_rank(scenario: Scenario) -> Rank:
    return Rank(scenario.config, parallelism(1), scenario.pages, _device)


def layers(rank: Rank, rows: Sequence[States], plan: CpPlan) -> list[Tensor]:
    """Both layers of this rank's rows; the second one reuses the picks of the first."""
    results: list[Tensor] = []
    picks = None
    for layer in range(2):
        out, lse, picks = rank.attend(layer, rows[layer], plan, rank.write(layer, rows[layer], plan), picks)
        results += [out, lse, picks]
    return results


def run(
    rank: Rank,
    scenario: Scenario,
    new_lens: Sequence[int],
    prefix_lens: Sequence[int],
    is_prefill: bool = True,
    step: Callable[[Rank, Sequence[States], CpPlan], list[Tensor]] = layers,
) -> list[Tensor]:
    """out, lse and picks of both layers in packed order, on every rank."""
    plan = rank.op.plan(attention_inputs(new_lens, prefix_lens, scenario.block_table, is_prefill))
    rows = [rank.rows(packed, plan) for packed in scenario.batch(new_lens, prefix_lens)]
    return [comm.restore_rows(local, plan, rank.group) for local in step(rank, rows, plan)]


def assert_bitwise(results: Sequence[Tensor], expected: Sequence[Tensor], rows: Tensor | None = None) -> None:
    for mine, theirs in zip(results, expected, strict=True):
        assert not mine.isnan().any()
        assert torch.equal(mine, theirs if rows is None else theirs[rows])
