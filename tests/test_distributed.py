"""Real processes over gloo, and over NCCL where there are two GPUs.

A group of them runs all of its cases once; each test looks at one case.
"""

import json
import multiprocessing
import time
from collections.abc import Sequence
from pathlib import Path

import distributed_cases
import pytest
from distributed_cases import FAILING_RANK, FOUR_RANKS, TWO_GPUS, TWO_RANKS, Case

# Start of the processes, compilation and all cases, on two slow cores.
DEADLINE = 240


def run_group(size: int, cases: Sequence[Case], folder: Path, device: str = "cpu") -> dict[str, list[str]]:
    """What happened in each case on each rank: "" or a traceback."""
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=distributed_cases.run_cases, args=(rank, size, cases, str(folder), device))
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    end = time.monotonic() + DEADLINE
    for process in processes:
        process.join(max(0.1, end - time.monotonic()))
    for process in processes:
        if process.is_alive():
            process.kill()
            process.join()
    reports = []
    for rank in range(size):
        path = folder / f"{rank}.json"
        reports.append(json.loads(path.read_text()) if path.exists() else {})
    return {case.__name__: [report.get(case.__name__, "it did not get there") for report in reports] for case in cases}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return run_group(2, TWO_RANKS, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return run_group(4, FOUR_RANKS, tmp_path_factory.mktemp("four"))


@pytest.fixture(scope="module")
def two_gpus(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return run_group(2, TWO_GPUS, tmp_path_factory.mktemp("gpus"), "cuda")


@pytest.mark.parametrize("case", [case.__name__ for case in TWO_RANKS])
def test_two_ranks(two_ranks: dict[str, list[str]], case: str) -> None:
    assert not any(two_ranks[case]), "\n".join(two_ranks[case])


@pytest.mark.parametrize("case", [case.__name__ for case in FOUR_RANKS])
def test_four_ranks(four_ranks: dict[str, list[str]], case: str) -> None:
    assert not any(four_ranks[case]), "\n".join(four_ranks[case])


@pytest.mark.two_gpus
@pytest.mark.parametrize("case", [case.__name__ for case in TWO_GPUS])
def test_two_gpus(two_gpus: dict[str, list[str]], case: str) -> None:
    assert not any(two_gpus[case]), "\n".join(two_gpus[case])


def test_a_rank_that_dies_takes_the_others_out_of_their_collectives(tmp_path: Path) -> None:
    dead, alive = run_group(2, FAILING_RANK, tmp_path)["a_rank_that_dies"]
    assert "this rank fails on purpose" in dead
    assert alive == ""
