"""Threads of the cache store when the interpreter ends."""

import subprocess
import sys

import pytest

SCRIPT = """
import time, torch
from sparse_cp_ops.cache_store.io_thread import IoThread

def work():
    x = torch.randn(300, 300)
    for _ in range(400):
        x = (x @ x).clamp(-1, 1)

thread = IoThread("work")
thread.submit({call})
"""


@pytest.mark.parametrize("call", ["work", "lambda: time.sleep(3600)"])
def test_the_interpreter_ends_while_a_call_runs(call: str) -> None:
    """A daemon thread that comes back from C++ while the interpreter ends would abort the process; one that never comes
    back must not keep it."""
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(call=call)], capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 0, ended.stderr
