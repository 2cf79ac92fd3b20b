"""Groups of processes for the distributed tests: start one, wait for it, collect what its ranks report."""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import rank_process
from rank_process import Case

# Start of the processes, compilation and all cases, on two slow cores.
DEADLINE = 240


@dataclass(frozen=True)
class Ending:
    """How a rank ended.

    Attributes:
        reports: case -> "" or a traceback; cases that the process did not finish are missing.
        status: exit status, negative for a signal; None if it had to be killed after the deadline.
        seconds: from the end of the group's first process to the end of this one.
    """

    reports: dict[str, str]
    status: int | None
    seconds: float

    def report(self, case: Case) -> str:
        """What happened in a case, or how the process ended before it could tell."""
        how = "did not end in time" if self.status is None else f"ended with status {self.status}"
        return self.reports.get(case.__name__, f"the process {how}")


# Stands beside the cases in the results of a group: whether its processes ended as they should.
EXIT_STATUS = "exit_status"


def run_group(size: int, cases: Sequence[Case], folder: Path, device: str = "cpu") -> dict[str, list[str]]:
    """What happened in each case on each rank, and at the end: "" or what went wrong."""
    return results_of(wait_for_group(start_group(size, cases, folder, device), folder), cases)


def run_groups(
    size: int,
    groups: Sequence[Sequence[Case]],
    folder: Path,
    device: str,
    seconds: float = DEADLINE,
    at_once: int | None = None,
) -> list[list[Ending]]:
    """How the ranks of several groups ended that run side by side, at most ``at_once`` of them at a time."""
    deadline = time.monotonic() + seconds
    at_once = at_once or len(groups)
    ended: list[list[Ending]] = []
    for first in range(0, len(groups), at_once):
        batch = groups[first : first + at_once]
        folders = [folder / str(first + number) for number in range(len(batch))]
        for own in folders:
            own.mkdir()
        started = [start_group(size, cases, own, device) for cases, own in zip(batch, folders, strict=True)]
        left = max(0.0, deadline - time.monotonic())
        with ThreadPoolExecutor(len(batch)) as pool:
            ended += pool.map(wait_for_group, started, folders, [left] * len(batch))
    return ended


def results_of(endings: Sequence[Ending], cases: Sequence[Case]) -> dict[str, list[str]]:
    """Case -> "" or what went wrong on each rank; under EXIT_STATUS how the processes ended."""
    results = {case.__name__: [ending.report(case) for ending in endings] for case in cases}
    results[EXIT_STATUS] = ["" if ending.status == 0 else f"status {ending.status}" for ending in endings]
    return results


def start_group(size: int, cases: Sequence[Case], folder: Path, device: str = "cpu") -> list[BaseProcess]:
    """Ranks that run the cases in order; they share ``folder``."""
    context = multiprocessing.get_context("spawn")
    processes: list[BaseProcess] = [
        context.Process(target=rank_process.run_cases, args=(rank, size, cases, str(folder), device))
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    return processes


def wait_for_group(processes: Sequence[BaseProcess], folder: Path, seconds: float = DEADLINE) -> list[Ending]:
    """How the ranks of a group ended; those that take longer are killed."""
    deadline = time.monotonic() + seconds
    ended: dict[int, float] = {}
    while len(ended) < len(processes):
        running = {process.sentinel: rank for rank, process in enumerate(processes) if rank not in ended}
        ready = connection.wait(list(running), max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        ended |= {running[sentinel]: time.monotonic() for sentinel in ready}  # type: ignore[index]
    endings = []
    for rank, process in enumerate(processes):
        if rank not in ended:
            process.kill()
        process.join()
        path = folder / f"{rank}.json"
        reports = json.loads(path.read_text()) if path.exists() else {}
        seconds = ended.get(rank, time.monotonic()) - min(ended.values(), default=deadline)
        endings.append(Ending(reports, process.exitcode if rank in ended else None, seconds))
    return endings
