"""A short run of store_stress.py; docs/cache_store.md has the command of the long one."""

import subprocess
import sys
from pathlib import Path

import pytest

STRESS = Path(__file__).with_name("store_stress.py")


def stress(*arguments: object, seconds: float, **least: int) -> None:
    """A run without a fault, so long and until so much has been done; a slow machine takes longer for that."""
    command = [sys.executable, str(STRESS), *map(str, arguments), "--minutes", str(seconds / 60)]
    command += ["--least", *(f"{name}={count}" for name, count in least.items())]
    result = subprocess.run(command, capture_output=True, text=True, timeout=280)  # of the 300 s of a test
    assert result.returncode == 0, result.stdout + result.stderr[-5000:]


def test_acknowledged_files_survive_kills_at_any_moment(tmp_path: Path) -> None:
    stress(f"file://{tmp_path}/store", seconds=15, kills=5, acknowledged=100, restored=100)


def test_damaged_and_evicted_files_are_never_wrong_pages(tmp_path: Path) -> None:
    stress(f"file://{tmp_path}/store", "--damage", seconds=15, kills=5, damaged=5, restored=100)


@pytest.mark.mooncake
def test_dying_servers_and_clients() -> None:
    stress("mooncake", seconds=60, kills=5, acknowledged=50, restored=50)
