"""A short run of store_stress.py; docs/cache_store.md has the command of the long one."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

STRESS = Path(__file__).with_name("store_stress.py")


def stress(*arguments: object, seconds: float) -> dict[str, int]:
    """Counts of a run without a fault."""
    command = [sys.executable, str(STRESS), *map(str, arguments), "--minutes", str(seconds / 60)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 150)
    assert result.returncode == 0, result.stdout + result.stderr[-5000:]
    counts: dict[str, int] = ast.literal_eval(result.stdout[: result.stdout.index("}") + 1])
    return counts


def test_acknowledged_files_survive_kills_at_any_moment(tmp_path: Path) -> None:
    counts = stress(f"file://{tmp_path}/store", seconds=15)
    assert counts["kills"] >= 5
    assert counts["acknowledged"] >= 100
    assert counts["restored"] >= 100


def test_damaged_and_evicted_files_are_never_wrong_pages(tmp_path: Path) -> None:
    counts = stress(f"file://{tmp_path}/store", "--damage", seconds=15)
    assert counts["kills"] >= 5
    assert sum(counts.get(kind, 0) for kind in ("truncated", "flipped", "deleted", "garbage")) >= 5
    assert counts["restored"] >= 100


@pytest.mark.mooncake
def test_dying_servers_and_clients() -> None:
    counts = stress("mooncake", seconds=60)
    assert counts["kills"] >= 5
    assert counts["acknowledged"] >= 50
    assert counts["restored"] >= 50
