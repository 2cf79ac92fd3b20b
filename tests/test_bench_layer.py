"""The layer benchmark: its model of ranks, its reading of traces and histories, and a rehearsal of every part."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cp_harness import one_thread  # noqa: F401  (fixture)

from sparse_cp_ops.__main__ import main
from sparse_cp_ops.bench.layer import goals, memory, ranks, timeline, trace
from sparse_cp_ops.bench.layer.model import TINY, Bench, FilledLayer
from sparse_cp_ops.bench.layer.trace import Interval

pytestmark = pytest.mark.usefixtures("one_thread")


def test_modelled_gather_follows_its_table() -> None:
    for received, microseconds in ranks.GATHER_TABLE:
        assert ranks.modelled_gather_us(received) == pytest.approx(microseconds)
    assert ranks.modelled_gather_us(0) == 0.0
    assert ranks.modelled_gather_us(1) == 45.0
    assert ranks.modelled_gather_us((12_910_592 + 25_821_184) // 2) == pytest.approx((78 + 133) / 2)
    # One more step of the last slope.
    assert ranks.modelled_gather_us(2 * 51_642_368 - 25_821_184) == pytest.approx(2 * 248 - 133)


@pytest.mark.parametrize("split", ["zigzag", "interleave"])
@pytest.mark.parametrize("size", [2, 8])
def test_shares_of_simulated_ranks_are_the_rows_of_one_rank(size: int, split: str, device: str) -> None:
    bench = Bench(torch.device(device), TINY, 64)
    with torch.inference_mode(), ranks.simulated_communication(bench.device):
        filled = FilledLayer(bench, 300, chunk=100)
        before = filled.cache.mla[0].clone(), filled.cache.indexer[0].clone()  # type: ignore[union-attr]
        expected, expected_picks = filled.share(200, 300).run()
        for rank in range(size):
            share = filled.share(200, 300, rank, size, split)
            out, picks = share.run()
            valid = share.plan.token_ids >= 0
            rows = share.plan.token_ids[valid].long()
            same = (picks[valid] == expected_picks[rows]).all(dim=1)
            assert same.float().mean() > 0.9  # bf16 products of another row count may move a score across another
            difference = (out[valid][same] - expected[rows][same]).float().norm() / expected.float().norm()
            assert difference < 2.0**-8
            # Every record was written: its own rows as they were up to a rounding, the others' bytes exactly.
            others = torch.ones(300, dtype=torch.bool, device=device)
            others[100 + rows] = False
            for pages, kept in zip((filled.cache.mla[0], filled.cache.indexer[0]), before, strict=True):
                assert pages is not None
                changed = (pages != kept).view(pages.shape[0], -1).float().mean()
                assert changed < 0.01


def event(cat: str, name: str, ts: float, dur: float, **args: object) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "args": args}


def test_trace_kernels_belong_to_the_innermost_mark() -> None:
    events = [
        event("user_annotation", "layer", 0, 100),
        event("user_annotation", f"part: {trace.OUTPUT}", 10, 50),
        event("user_annotation", f"part: {trace.NORMS}", 20, 5),
        event("cuda_runtime", "cudaLaunchKernel", 12, 2, correlation=1),
        event("cuda_runtime", "cudaLaunchKernel", 22, 2, correlation=2),
        event("cuda_driver", "cuLaunchKernelEx", 40, 2, correlation=3),
        event("cuda_runtime", "cudaLaunchKernel", 70, 2, correlation=4),
        event("cuda_runtime", "cudaLaunchKernel", 170, 2, correlation=5),
        event("kernel", "nvjet_sm90", 200, 30, correlation=1, stream=7),
        event("kernel", "layer_norm", 231, 4, correlation=2, stream=7),
        event("kernel", "copy_kernel", 236, 4, correlation=3, stream=7),
        event("gpu_memset", "Memset", 241, 1, correlation=4, stream=7),
        event("kernel", "of no forward", 300, 1, correlation=5, stream=7),
    ]
    (forward,) = trace.parse(events, on_device=True)
    assert [(i.part, i.start, i.duration, i.launched) for i in forward] == [
        (trace.OUTPUT, 0, 30, -188),
        (trace.NORMS, 31, 4, -178),
        (trace.CASTS, 36, 4, -160),  # in the output projection, but no GEMM
        (trace.CASTS, 41, 1, -130),
    ]


def interval(part: str, start: float, end: float, launched: float = -1.0) -> Interval:
    return Interval(part, part, start, end - start, 7, launched)


def test_gaps_are_explained() -> None:
    forward = [
        interval(trace.PROJECTIONS, 0, 10),
        interval(trace.GATHER, 5, 25),
        interval(trace.WRITE, 26, 30),  # behind the gather
        interval(trace.INDEXER, 34, 40, launched=33),  # the host was late
        interval(trace.ATTENTION, 42, 50),
        interval(trace.OUTPUT, 50.5, 60),
    ]
    found = timeline.gaps(forward, 1.0)
    assert [(gap["at"], gap["us"], gap["why"]) for gap in found] == [
        (10, 16, "waits for the gather"),
        (30, 4, "host"),
        (40, 2, "device"),
    ]
    assert timeline.exposed_gather_us(forward) == 16
    hidden = [interval(trace.PROJECTIONS, 0, 10), interval(trace.GATHER, 1, 9), interval(trace.WRITE, 12, 13)]
    assert timeline.exposed_gather_us(hidden) == 0


def test_memory_at_the_peak_by_line() -> None:
    line = {"filename": str(memory._PACKAGE / "nn" / "indexer.py"), "name": "project", "line": 1}
    op = {"filename": str(memory._PACKAGE / "ops" / "_rope_.py"), "name": "rope_", "line": 1}
    history = [
        {"action": "alloc", "addr": 1, "size": 10, "frames": [op, line]},
        {"action": "alloc", "addr": 2, "size": 20, "frames": [line]},
        {"action": "free_requested", "addr": 1, "size": 10},
        {"action": "free_completed", "addr": 1, "size": 10},
        {"action": "alloc", "addr": 3, "size": 15, "frames": [{"filename": "/a.py", "name": "f", "line": 1}]},
        {"action": "free_requested", "addr": 2, "size": 20},
        {"action": "free_requested", "addr": 9, "size": 99},  # from before the recording
        {"action": "alloc", "addr": 1, "size": 1, "frames": []},
    ]

    def found(events: list[dict[str, Any]]) -> list[tuple[int, int, str]]:
        return [(entry["bytes"], entry["most_bytes"], entry["where"]) for entry in memory.at_peak(events)]

    assert found(history) == [(20, 30, "indexer.py:project"), (15, 16, "elsewhere")]
    assert found(history[:2]) == [(30, 30, "indexer.py:project")]
    assert found([*history, {"action": "alloc", "addr": 7, "size": 25, "frames": [op]}]) == [
        (25, 25, "_rope_.py:rope_"),
        (16, 16, "elsewhere"),
        (0, 30, "indexer.py:project"),
    ]


def test_goals_are_compared_as_they_are_shown() -> None:
    part = {"conditions": {"device": "a GPU, 9 SMs"}, "tiny": False, "bare_calls_us": 100.0}
    fast = part | {"prepare_us": 50.4, "layer_us": 125.4}
    slow = part | {"prepare_us": 50.6, "layer_us": 225.0}
    assert [(bound, value, how) for _, bound, value, how in goals.rows({"host": fast})] == [
        ("50 us", "50 us", "met"),
        ("25 us", "25 us", "met"),
    ]
    assert [(value, how.split(" ")[0]) for _, _, value, how in goals.rows({"host": slow})] == [
        ("51 us", "**missed.**"),
        ("125 us", "**missed.**"),
    ]
    assert all(len(how) > 30 for *_, how in goals.rows({"host": slow}))  # says why
    assert not list(goals.rows({"host": fast | {"tiny": True}}))
    assert not list(goals.rows({"host": fast | {"conditions": {"device": "a CPU, AVX512"}}}))


QUICK_PARTS = ("timeline", "host", "balance", "break_even", "memory", "decode", "end_to_end")


@pytest.mark.slow
def test_a_rehearsal_writes_every_section(tmp_path: Path, device: str) -> None:
    results, report = tmp_path / "layer.json", tmp_path / "layer.md"
    options = [option for part in QUICK_PARTS for option in ("--part", part)]
    arguments = ["--tiny", "--seconds", "0.001", "--device", device, "--json", str(results)]
    assert main(["bench-layer", *arguments, *options]) == 0
    found = json.loads(results.read_text())
    assert set(found) == set(QUICK_PARTS)
    assert all(share["slowest_over_mean"] >= 1 for share in found["balance"]["shares"])
    assert found["end_to_end"]["relative_difference"] < found["end_to_end"]["bound"]
    assert found["end_to_end"]["prefix_hit"] == 128
    arguments = ["--report-only", "--json", str(results), "--markdown", str(report), "--pictures", str(tmp_path)]
    assert main(["bench-layer", *arguments]) == 0
    text = report.read_text()
    assert text.count("\n## ") == len(QUICK_PARTS) + 1
    assert text.split("## torch.compile")[1].split("##")[0].strip() == "Not measured."
    assert {picture.stem for picture in tmp_path.glob("*.png")} == {
        "layer_timeline",
        "layer_balance",
        "layer_break_even",
    }
