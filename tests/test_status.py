import subprocess
import sys

import torch

import sparse_cp_ops
from sparse_cp_ops import _load


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sparse_cp_ops", *arguments], capture_output=True, text=True, timeout=120
    )


def test_status_says_what_is_built_and_why_not() -> None:
    result = run()
    assert result.returncode == 0, result.stderr
    assert sparse_cp_ops.__version__ in result.stdout
    assert torch.__version__ in result.stdout
    for library in ("_C ", "_config", "_C_cuda"):
        assert library in result.stdout
    assert _load.CUDA_STATUS.loaded or _load.CUDA_STATUS.reason in result.stdout


def test_bench_names_what_it_knows_when_nothing_matches() -> None:
    result = run("bench", "--device", "cpu", "--op", "no_such_op")
    assert result.returncode == 2
    assert "sparse_mla_fp8_cp" in result.stderr
