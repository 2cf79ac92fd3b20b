"""``python -m sparse_cp_ops bench``: what it refuses before it measures anything, what it writes, what it times."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sparse_cp_ops.__main__ import main
from sparse_cp_ops.bench import cases, ceilings
from sparse_cp_ops.bench.cases import Case, Work
from sparse_cp_ops.bench.peers import Peers
from sparse_cp_ops.bench.timing import few_us, measure


def test_writes_what_it_measured(tmp_path: Path) -> None:
    files = {"json": tmp_path / "a.json", "markdown": tmp_path / "a.md", "roofline": tmp_path / "a.png"}
    options = [word for kind, path in files.items() for word in (f"--{kind}", str(path))]
    chosen = ["--op", "rope_", "--op", "expand_cp_plan", "--match", "1 rows", "--no-peers"]
    command = [sys.executable, "-m", "sparse_cp_ops", "bench", "--device", "cpu", "--seconds", "0.01"]
    result = subprocess.run([*command, *chosen, *options], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    content = json.loads(files["json"].read_text())
    assert {row["op"] for row in content["rows"]} == {"rope_", "expand_cp_plan"}
    assert all(row["timing"]["median_us"] > 0 for row in content["rows"])
    assert set(content["ceilings"]) >= {"copy"}
    for op in ("rope_", "expand_cp_plan"):
        assert f"| {op} | 1 rows |" in files["markdown"].read_text()
        assert op in result.stdout
    assert files["roofline"].read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--op", "no_such_op"], "--op: no cases on cpu for no_such_op; there are sparse_mla_fp8_cp, "),
        (["--op", "rope_", "--op", "no_such_op"], "--op: no cases on cpu for no_such_op; "),
        (["--op", "rope_", "--match", "H=7"], "--match: no shape contains 'H=7'; there are 1 rows, 128 rows, "),
        (["--device", "meta"], r"--device: expected cpu.*, got 'meta'"),
        (["--device", "cuda:99"], r"--device: expected cpu.*, got 'cuda:99'"),
        (["--device", "one"], r"--device: expected cpu.*, got 'one'"),
        (["--seconds", "0"], "--seconds: expected a number of seconds above 0, got '0'"),
        (["--seconds", "nan"], "--seconds: expected a number of seconds above 0, got 'nan'"),
        (["--peer-seconds", "-1"], "--peer-seconds: expected a number of seconds above 0, got '-1'"),
        (["--json", "no_folder/a.json"], "--json: expected a file in a folder that exists, got 'no_folder/a.json'"),
        (["--markdown", "."], "--markdown: expected a file in a folder that exists, got '.'"),
        (["--roofline", "no_folder/a.png"], "--roofline: expected a file in a folder that exists"),
        (["--roofline", "a.xyz"], "--roofline: expected a name that ends in .png, got 'a.xyz'"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_measured(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ceilings, "measure_ceilings", lambda device: pytest.fail("measures"))
    try:
        status = main(["bench", *([] if "--device" in arguments else ["--device", "cpu"]), *arguments])
    except SystemExit as stop:
        status = int(str(stop.code))
    assert status == 2
    error = capsys.readouterr().err
    assert [line for line in error.splitlines() if re.search(message, line)], error


def test_a_case_that_fails_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def too_large(device: torch.device, peers: Peers) -> Work:
        torch.empty(2**60)
        raise AssertionError("there is no such memory")

    def small(device: torch.device, peers: Peers) -> Work:
        return Work(lambda: torch.ones(1), 4.0)

    monkeypatch.setattr(cases, "all_cases", lambda kind: [Case("op", "huge", too_large), Case("op", "tiny", small)])
    monkeypatch.setattr(ceilings, "measure_ceilings", lambda device: {"copy": 1e9})
    file = tmp_path / "a.json"
    assert main(["bench", "--device", "cpu", "--no-peers", "--seconds", "0.01", "--json", str(file)]) == 1
    content = json.loads(file.read_text())
    assert [row["shape"] for row in content["rows"]] == ["tiny"]
    assert content["conditions"]["not measured"].startswith("op huge (RuntimeError: ")
    assert "not measured op huge (RuntimeError: " in " ".join(capsys.readouterr().out.split())


@pytest.mark.two_gpus
@pytest.mark.parametrize("graph", [False, True])
def test_another_device_than_the_current_one_is_timed(graph: bool) -> None:
    """Events of the current device would find the other one's product of 2.2e12 FLOP done in no time."""
    matrix = torch.randn(10240, 10240, device="cuda:1").bfloat16()
    torch.cuda.set_device(0)
    microseconds = measure(lambda: matrix @ matrix, torch.device("cuda:1"), 0.05, graph).median_us
    assert microseconds > 300  # 7e15 FLOP/s
    assert few_us(lambda: matrix @ matrix, torch.device("cuda:1"), 3) > 300
    assert torch.cuda.current_device() == 0
