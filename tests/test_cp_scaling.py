"""benchmarks/cp_scaling.py: the command over gloo, how it judges what ranks report, and what it writes."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import cp_scaling_rank
import pytest
import torch
from cp_harness import one_thread  # noqa: F401  (fixture)
from cp_scaling import Checks, main, parse_batch
from cp_scaling_rank import Batch, model
from cp_scaling_report import NOT_MEASURED, OK, Results, exposed_share, gather_cells, layer_cells
from failure_cases import a_rank_that_is_killed, a_rank_that_raises, complaint, different_batches_on_gpus
from process_groups import Ending
from rank_process import GROUP_TIMEOUT, Case

from sparse_cp_ops.nn import MlaAttention

COMMAND = Path(__file__).resolve().parents[1] / "benchmarks" / "cp_scaling.py"


def run_command(output: Path, ranks: int, *arguments: str) -> tuple[dict[str, object], str]:
    """JSON and Markdown of a run that must end well."""
    words = ["--device", "cpu", "--ranks", str(ranks), "--output", str(output), *arguments]
    result = subprocess.run([sys.executable, str(COMMAND), *words], capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout + result.stderr
    return json.loads(output.with_suffix(".json").read_text()), output.with_suffix(".md").read_text()


@pytest.mark.slow
def test_all_parts_on_two_ranks(tmp_path: Path) -> None:
    cases = ["prefill_of_mixed_batches", "a_rank_that_raises", "a_rank_that_is_killed"]
    content, text = run_command(tmp_path / "CPUx2", 2, "--tokens", "96", "3", "16+64", "--cases", *cases)
    assert content["correctness"] == {"prefill_of_mixed_batches": OK, "exit_status": OK}
    assert list(content["failures"]) == cases[1:]
    for row, batch in zip(content["rows"], ([3, 0], [96, 0], [16, 64]), strict=True):
        assert [row["tokens"], row["prefix"]] == batch
        names = ["one_gpu_ms", "zigzag_ms", "zigzag_silent_ms", "in_line_ms", "interleave_ms", "interleave_silent_ms"]
        for name in [*names, *([] if row["prefix"] else ["packed_gather_ms", "bf16_gathers_ms"])]:
            assert len(row[name]) == 2
            assert min(row[name]) > 0, name
        assert row["difference"] < 2.0**-7  # the GEMMs of bf16 round differently with the row count
        assert row["block_bytes"] % 16 == 0 if "block_bytes" in row else row["prefix"]
        assert all(cell != NOT_MEASURED for cell in layer_cells(row)[:8])
    assert content["notes"] == []
    left_out = "nothing_waits_for_the_device, captured_prefill_follows_new_lengths"
    for part in ("bits of one rank", "attention layer on 2 ranks", "| 16 + 64 |", "One gather", "Time line", left_out):
        assert part in text
    assert (tmp_path / "CPUx2.png").read_bytes().startswith(b"\x89PNG")
    assert len(content["timeline"]["exposed"]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [4, 8])
def test_ranks_without_rows(tmp_path: Path, ranks: int) -> None:
    Results(tmp_path / "CPUx2", 2, []).write()
    parts = ["--parts", "correctness", "--cases", "prefill_of_mixed_batches"]
    content, text = run_command(tmp_path / f"CPUx{ranks}", ranks, *parts)
    assert content["correctness"] == {"prefill_of_mixed_batches": OK, "exit_status": OK}
    assert "Fewer ranks: [CPUx2](CPUx2.md)." in text


def test_cases_are_chosen_by_device_part_and_name() -> None:
    gpus = Checks.of("cuda", ["correctness", "failure"], None)
    assert gpus.failing == [a_rank_that_raises, a_rank_that_is_killed, different_batches_on_gpus]
    assert gpus.left_out == []
    cpu = Checks.of("cpu", ["failure"], ["a_rank_that_raises"])
    assert (cpu.groups, cpu.failing) == ([], [a_rank_that_raises])
    chosen = Checks.of("cpu", ["correctness", "failure"], ["chunks_and_decode"])
    assert [[case.__name__ for case in group] for group in chosen.groups] == [["chunks_and_decode"]]
    assert chosen.failing == []
    assert set(cpu.left_out) == set(chosen.left_out) >= {"captured_prefill_follows_new_lengths"}
    with pytest.raises(ValueError, match=r"expected some of prefill_of_mixed_batches, .* got of_no_name"):
        Checks.of("cpu", ["correctness"], ["of_no_name"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--ranks 1", "--ranks: expected at least 2, got 1"),
        ("--tokens 16 x", "--tokens: expected NEW or NEW.PREFIX, at least one new token and 2147483647 .* 'x'"),
        ("--tokens 0", "--tokens: expected .*, got '0'"),
        ("--tokens 0+16", "--tokens: expected .*, got '0\\+16'"),
        ("--tokens 8+", "--tokens: expected .*, got '8\\+'"),
        ("--tokens=-5", "--tokens: expected .*, got '-5'"),
        ("--tokens 2147483647+1", "--tokens: expected .*, got '2147483647\\+1'"),
        ("--budget-seconds nan", "--budget-seconds: expected a number of seconds above 0, got 'nan'"),
        ("--output results/x.md", "--output: expected a path without a suffix, got 'results/x.md'"),
        ("--cases of_no_name", "--cases: expected some of prefill_of_mixed_batches, .* got of_no_name"),
        ("--parts scaling --cases chunks_and_decode", "--cases: none of chunks_and_decode belongs to --parts scaling"),
        ("--parts failure --cases chunks_and_decode", "--cases: none of chunks_and_decode belongs to --parts failure"),
    ],
)
def test_wrong_arguments_end_the_run_before_it_begins(
    arguments: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(COMMAND), "--device", "cpu", *arguments.split()])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert re.search(message, capsys.readouterr().err.replace("\n", " "))
    assert list(tmp_path.iterdir()) == []


def test_batches_of_the_command_line() -> None:
    assert [parse_batch(text) for text in ("1", "128+65536", "2147483647")] == [(1, 0), (128, 65536), (2**31 - 1, 0)]


ON_PURPOSE = Ending({"a_rank_that_raises": "ZeroDivisionError: this rank fails on purpose"}, 1, 0.0)
TOO_LATE = GROUP_TIMEOUT.total_seconds() + 1
SAW_IT = {"a_rank_that_raises": "", "a_rank_that_is_killed": "", "different_batches_on_gpus": ""}


@pytest.mark.parametrize(
    ("case", "device", "endings", "expected"),
    [
        (a_rank_that_raises, "cpu", [ON_PURPOSE, Ending(SAW_IT, 0, 2.0)], ""),
        (a_rank_that_raises, "cuda", [ON_PURPOSE, Ending({}, -signal.SIGABRT, 5.0)], ""),
        (a_rank_that_is_killed, "cuda", [Ending({}, -signal.SIGKILL, 0.0), Ending({}, -signal.SIGABRT, 5.0)], ""),
        (different_batches_on_gpus, "cuda", [Ending(SAW_IT, 1, 0.0), Ending({}, -signal.SIGABRT, 0.1)], ""),
        # gloo ends nobody; nor is a hang, a late error, a clean end without the error or another signal what should be.
        (a_rank_that_raises, "cpu", [ON_PURPOSE, Ending({}, -signal.SIGABRT, 2.0)], "rank 1: the process ended with"),
        (a_rank_that_raises, "cuda", [ON_PURPOSE, Ending({}, None, 240.0)], "rank 1: the process did not end in time"),
        (a_rank_that_raises, "cpu", [ON_PURPOSE, Ending(SAW_IT, 0, TOO_LATE)], "rank 1: an exception after"),
        (a_rank_that_raises, "cuda", [ON_PURPOSE, Ending({}, 0, 1.0)], "rank 1: the process ended with status 0"),
        (a_rank_that_raises, "cuda", [ON_PURPOSE, Ending({}, -signal.SIGSEGV, 1.0)], "rank 1: the process ended with"),
        (a_rank_that_raises, "cpu", [Ending(SAW_IT, 0, 0.0), Ending(SAW_IT, 0, 1.0)], "rank 0: an exception"),
        (a_rank_that_is_killed, "cpu", [Ending(SAW_IT, 0, 0.0), Ending(SAW_IT, 0, 1.0)], "rank 0: an exception"),
    ],
)
def test_complaint(case: Case, device: str, endings: list[Ending], expected: str) -> None:
    found = complaint(endings, case, device)
    assert found.startswith(expected)
    assert bool(found) == bool(expected)


FULL_ROW = {
    "tokens": 32768,
    "prefix": 0,
    "one_gpu_ms": [70.0, 69.0],
    "zigzag_ms": [36.0, 35.0],
    "interleave_ms": [34.5, 34.0],
    "zigzag_silent_ms": [35.0, 33.0],
    "interleave_silent_ms": [34.0, 34.0],
    "in_line_ms": [37.0, 36.0],
    "registered_ms": [36.5, 36.0],
    "one_gpu_gib": 11.25,
    "rank_gib": 6.0,
    "difference": 0.001,
    "clock_mhz": [1700.0, 1800.0],
    "block_bytes": 12_910_592,
    "packed_gather_ms": [0.08, 0.07],
    "registered_gather_ms": [0.06, 0.06],
    "bf16_gathers_ms": [0.16, 0.15],
}


def test_cells_of_a_row_with_everything_and_of_one_that_was_cut_short() -> None:
    assert layer_cells(FULL_ROW) == [
        *("32768", "69.00", "36.00", "34.50", "2.00x", "2.8 %", "1.4 %", "37.00", "36.50"),
        *("1.029", "1.000", "11.2", "6.0", "1.0e-03", "1700-1800"),
    ]
    assert gather_cells(FULL_ROW, 2) == ["32768", "12.91", "80", "161.4", "60", "160", "2.00x"]
    begun = {"tokens": 8, "prefix": 4, "one_gpu_ms": [1.5]}
    assert layer_cells(begun) == ["8 + 4", "1.5", *[NOT_MEASURED] * 13]
    assert gather_cells(begun, 2) == ["8", *[NOT_MEASURED] * 6]


def test_results_keep_what_a_later_run_leaves_out(tmp_path: Path) -> None:
    first = Results(tmp_path / "X", 2, ["correctness", "failure", "scaling"])
    first.correctness, first.failures, first.conditions = {"case": OK}, {"a": "b"}, {"date": "then"}
    first.add_row(FULL_ROW)
    first.draw_timeline(8, [[("nccl", 0, 10, 1), ("gemm", 5, 10, 2)]] * 2)
    first.note_missing([(32768, 0), (512, 65536)])
    first.write()
    assert "Not measured: 512 + 65536 tokens." in first.markdown()
    assert "rank 0: 33.3 %, rank 1: 33.3 %" in first.markdown()
    again = Results(tmp_path / "X", 2, ["correctness"])
    assert again.correctness == {}
    again.correctness = first.correctness
    assert again.markdown() == first.markdown()
    assert Results(tmp_path / "X", 2, ["scaling"]).rows == []


@pytest.mark.parametrize("content", ["", '{"rows": [', "[]", "\x00"])
def test_another_file_in_place_of_results_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "X.json"
    file.write_text(content)
    with pytest.raises(ValueError, match=r"expected results of an earlier run in .*X\.json"):
        Results(tmp_path / "X", 2, [])
    assert file.read_text() == content


def test_exposed_share_is_the_time_of_gathers_alone() -> None:
    assert exposed_share([]) == 0.0
    assert exposed_share([("ncclDevKernel", 0, 40, 1), ("gemm", 10, 20, 2), ("gemm", 50, 50, 2)]) == 20.0


@pytest.mark.usefixtures("one_thread")
def test_one_gpu_runs_long_batches_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    config = model("cpu", 512)
    layer = MlaAttention(config, 0, dtype=torch.bfloat16).requires_grad_(False)
    batch = Batch(SimpleNamespace(config=config, device=torch.device("cpu"), layer=layer), 130, 70)  # type: ignore[arg-type]
    with torch.inference_mode():
        at_once = batch.whole()()
        expected = [pages.clone() for pages in (batch.cache.mla[0], batch.cache.indexer[0]) if pages is not None]
        monkeypatch.setattr(cp_scaling_rank, "CHUNK_TOKENS", 50)
        in_chunks = batch.whole()()
    assert in_chunks.shape == at_once.shape
    assert (in_chunks - at_once).float().norm() < 2.0**-7 * at_once.float().norm()
    for pages, of_all in zip((batch.cache.mla[0], batch.cache.indexer[0]), expected, strict=True):
        assert pages is not None
        assert (pages != of_all).float().mean() < 0.01  # a rounding of the projections
