"""Fixtures of all tests: the devices of this machine and poisoned memory."""

import os
from collections.abc import Iterator

import pytest
import torch

import sparse_cp_ops  # noqa: F401  (registers the ops)
from sparse_cp_ops import _load

HAS_CUDA = _load.CUDA_STATUS.loaded


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> str:
    """Every test that takes this fixture runs on the CPU and, where there is one, on the CUDA device."""
    return str(request.param)


LEFT_OUT = pytest.StashKey[dict[str, int]]()
NEEDS = {
    "cuda": (HAS_CUDA, f"need a CUDA device ({_load.CUDA_STATUS.reason})"),
    "mooncake": ("SPARSE_CP_OPS_MOONCAKE" in os.environ, "need Mooncake's servers (make test-mooncake)"),
    "two_gpus": (HAS_CUDA and torch.cuda.device_count() >= 2, "need two CUDA devices"),
}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that this machine can't run are left out, and counted in the last lines."""
    config.stash[LEFT_OUT] = {}
    for marker, (available, _) in NEEDS.items():
        if not available:
            count = len(items)
            items[:] = [item for item in items if not item.get_closest_marker(marker)]
            config.stash[LEFT_OUT][marker] = count - len(items)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for marker, count in config.stash.get(LEFT_OUT, {}).items():
        if count:
            terminalreporter.write_line(f"{count} tests left out: they {NEEDS[marker][1]}")


@pytest.fixture(autouse=True)
def poisoned_memory(request: pytest.FixtureRequest) -> Iterator[None]:
    """torch.empty returns NaN (floats) or the largest integer, so that an element nobody wrote shows.

    torch fills fresh tensors in deterministic mode; tests about the other mode switch it off themselves.
    """
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.manual_seed(0)
    yield
    torch.use_deterministic_algorithms(before)
