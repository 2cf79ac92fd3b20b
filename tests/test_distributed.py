"""Real processes over gloo, and over NCCL where there are several GPUs: one a rank.

A group of them runs all of its cases once; each test looks at one case.
"""

from pathlib import Path

import pytest
import torch
from distributed_cases import FOUR_RANKS, TWO_RANKS
from failure_cases import FAILING_RANK, complaint, different_batches_on_gpus
from gpu_cases import GPU_GROUPS
from process_groups import EXIT_STATUS, results_of, run_group, run_groups, start_group, wait_for_group
from rank_process import Case

several_gpus = pytest.param("cuda", marks=pytest.mark.two_gpus)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return run_group(2, TWO_RANKS, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return run_group(4, FOUR_RANKS, tmp_path_factory.mktemp("four"))


@pytest.fixture(scope="module")
def all_gpus(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    folder = tmp_path_factory.mktemp("gpus")
    statuses: list[str] = []
    results: dict[str, list[str]] = {EXIT_STATUS: statuses}
    for endings, cases in zip(
        run_groups(torch.cuda.device_count(), GPU_GROUPS, folder, "cuda"), GPU_GROUPS, strict=True
    ):
        of_group = results_of(endings, cases)
        statuses += of_group.pop(EXIT_STATUS)
        results |= of_group
    return results


@pytest.mark.parametrize("case", [*(case.__name__ for case in TWO_RANKS), EXIT_STATUS])
def test_two_ranks(two_ranks: dict[str, list[str]], case: str) -> None:
    assert not any(two_ranks[case]), "\n".join(two_ranks[case])


@pytest.mark.parametrize("case", [*(case.__name__ for case in FOUR_RANKS), EXIT_STATUS])
def test_four_ranks(four_ranks: dict[str, list[str]], case: str) -> None:
    assert not any(four_ranks[case]), "\n".join(four_ranks[case])


@pytest.mark.two_gpus
@pytest.mark.parametrize("case", [*(case.__name__ for cases in GPU_GROUPS for case in cases), EXIT_STATUS])
def test_gpus(all_gpus: dict[str, list[str]], case: str) -> None:
    assert not any(all_gpus[case]), "\n".join(all_gpus[case])


@pytest.mark.parametrize("device", ["cpu", several_gpus])
@pytest.mark.parametrize("case", FAILING_RANK, ids=lambda case: case.__name__)
def test_a_rank_that_fails_takes_the_others_out_of_their_collectives(tmp_path: Path, case: Case, device: str) -> None:
    size = torch.cuda.device_count() if device == "cuda" else 2
    endings = wait_for_group(start_group(size, [case], tmp_path, device), tmp_path)
    assert complaint(endings, case, device) == ""


@pytest.mark.two_gpus
def test_different_batches_on_gpus_end_in_an_error_on_all_ranks(tmp_path: Path) -> None:
    case = different_batches_on_gpus
    endings = wait_for_group(start_group(torch.cuda.device_count(), [case], tmp_path, "cuda"), tmp_path)
    assert complaint(endings, case, "cuda") == ""
