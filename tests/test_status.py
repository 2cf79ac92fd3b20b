import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import sparse_cp_ops
from sparse_cp_ops import _load


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sparse_cp_ops", *arguments], capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize("arguments", [[], ["status"]])
def test_status_says_what_is_built_and_why_not(arguments: list[str]) -> None:
    result = run(*arguments)
    assert result.returncode == 0, result.stderr
    assert sparse_cp_ops.__version__ in result.stdout
    assert torch.__version__ in result.stdout
    for library in ("_C ", "_config", "_C_cuda"):
        assert library in result.stdout
    assert _load.CUDA_STATUS.loaded or _load.CUDA_STATUS.reason in result.stdout


NO_NVCC = "import pathlib, shutil, os; pathlib.Path.is_file = lambda path: False; shutil.which = lambda name: None; "


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("2", "SPARSE_CP_OPS_CUDA: expected auto, 0 or 1, got '2'"),
        ("1", "SPARSE_CP_OPS_CUDA=1, but nvcc was not found"),
    ],
)
def test_the_build_refuses_what_it_cannot_do(value: str, message: str) -> None:
    setup = Path(__file__).resolve().parents[1] / "setup.py"
    script = f"{NO_NVCC}import runpy, sys; sys.argv = ['setup.py', '--name']; runpy.run_path({str(setup)!r})"
    environment = {**os.environ, "SPARSE_CP_OPS_CUDA": value}
    command = [sys.executable, "-c", script]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=setup.parent, env=environment)
    assert result.returncode == 1
    assert message in result.stderr
