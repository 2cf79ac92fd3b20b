"""SparseCpModel on real gloo processes. A group of them runs all of its cases once; each test looks at one case."""

import pytest
from process_groups import run_group
from transformers_cases import FOUR_RANKS, TWO_RANKS


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return run_group(2, TWO_RANKS, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return run_group(4, FOUR_RANKS, tmp_path_factory.mktemp("four"))


@pytest.mark.parametrize("case", [case.__name__ for case in TWO_RANKS])
def test_two_ranks(two_ranks: dict[str, list[str]], case: str) -> None:
    assert not any(two_ranks[case]), "\n".join(two_ranks[case])


@pytest.mark.parametrize("case", [case.__name__ for case in FOUR_RANKS])
def test_four_ranks(four_ranks: dict[str, list[str]], case: str) -> None:
    assert not any(four_ranks[case]), "\n".join(four_ranks[case])
