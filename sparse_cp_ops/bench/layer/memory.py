"""Part 5: what a layer allocates, listed by tensor at the moment of its peak."""

from __future__ import annotations

import linecache
from collections import Counter
from pathlib import Path
from typing import Any

import torch

import sparse_cp_ops
from sparse_cp_ops.bench.layer.model import Bench, FilledLayer
from sparse_cp_ops.bench.layer.ranks import simulated_communication

ROWS = 65536
RANKS = 2
_PACKAGE = Path(sparse_cp_ops.__file__).parent


def run(bench: Bench) -> dict[str, Any]:
    """Allocations of one rank's forward of 64K local rows, by line, and its peak."""
    rows = bench.tokens(ROWS)
    with torch.inference_mode(), simulated_communication(bench.device):
        filled = FilledLayer(bench, rows * RANKS)
        share = filled.share(rows * RANKS, rows * RANKS, 0, RANKS)
        share.run()
        if bench.device.type != "cuda":
            return {"rows": rows, "ranks": RANKS, "tensors": []}
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.memory._record_memory_history(context="all", stacks="python", max_entries=100_000)
        share.run()
        torch.cuda.synchronize()
        snapshot = torch.cuda.memory._snapshot()
        torch.cuda.memory._record_memory_history(enabled=None)
    peak = torch.cuda.max_memory_allocated() - before
    return {"rows": rows, "ranks": RANKS, "peak_bytes": peak, "tensors": at_peak(snapshot["device_traces"][0])}


def at_peak(trace: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Bytes by the line that allocated them: when the sum of all live allocations is largest, and the line's own most.

    Lines with most at the peak come first, then those whose tensors are gone by then or come later.
    """
    alive: dict[int, tuple[tuple[str, str], int]] = {}
    now, most, at_the_peak = Counter[tuple[str, str]](), Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    total, peak = 0, 0
    for event in trace:
        if event["action"] == "alloc":
            line, size = _line_of(event.get("frames", [])), event["size"]
            alive[event["addr"]] = line, size
            now[line] += size
            most[line] = max(most[line], now[line])
            total += size
            if total > peak:
                peak, at_the_peak = total, now.copy()
        elif event["action"] == "free_requested" and event["addr"] in alive:
            line, size = alive.pop(event["addr"])
            now[line] -= size
            total -= size
    ordered = sorted(most, key=lambda line: (-at_the_peak[line], -most[line]))
    return [
        {"bytes": at_the_peak[line], "most_bytes": most[line], "where": line[0], "line": line[1]} for line in ordered
    ]


def _line_of(frames: list[dict[str, Any]]) -> tuple[str, str]:
    """The innermost line of the package's modules that led to an allocation: "file:function" and its text."""
    own = [frame for frame in frames if _PACKAGE in Path(frame["filename"]).parents]
    modules = [frame for frame in own if Path(frame["filename"]).parent.name in ("nn", "context_parallel")]
    if not own:
        return "elsewhere", ""
    frame = (modules or own)[0]
    text = linecache.getline(frame["filename"], frame["line"]).strip()
    return f"{Path(frame['filename']).name}:{frame['name']}", text
