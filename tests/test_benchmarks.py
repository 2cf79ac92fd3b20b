"""The benchmark scripts start, and those with small sizes run to the end on the CPU (cp_scaling.py: its own tests)."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = [path for path in sorted(ROOT.glob("benchmarks/*.py")) if "argparse" in path.read_text()]


def run(script: Path, *arguments: object) -> str:
    command = [sys.executable, str(script), *map(str, arguments)]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=200, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_every_script_explains_itself(script: Path) -> None:
    text = run(script, "--help")
    assert f"python benchmarks/{script.name}" in text


def test_indexer_f16() -> None:
    printed = run(ROOT / "benchmarks" / "indexer_f16.py", "--rows", 8, "--keys", 1024, "--topk", 128)
    for vectors in ("random", "peaked"):
        assert float(re.findall(rf"{vectors}: picks of f16 that fp32 does not make ([\d.]+) %", printed)[0]) < 1.0


def test_cache_store_rehearsal(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    printed = run(ROOT / "benchmarks" / "cache_store.py", "--tiny", "--device", "cpu", "--json", report)
    assert "from memory" in printed
    assert "from files" in printed
    assert json.loads(report.read_text())
