"""Part 1: where a layer's time goes, on one rank and on each of several."""

from __future__ import annotations

import itertools
import statistics
from dataclasses import asdict, replace
from typing import Any

import torch

from sparse_cp_ops.bench.layer import trace
from sparse_cp_ops.bench.layer.model import Bench, FilledLayer, Share
from sparse_cp_ops.bench.layer.ranks import simulated_communication
from sparse_cp_ops.bench.layer.trace import Interval
from sparse_cp_ops.bench.timing import few_us, measure

SHAPES = ((8192, 65536), (4096, 32768))  # local rows, keys at the end of the chunk
SIZES = (1, 2, 4, 8)
# A kernel's start after the end of the one before it: less is the device's own time between dependent kernels.
GAP_US = 3.0


def run(bench: Bench) -> dict[str, Any]:
    """Times of all ranks of all sizes; the parts and the intervals of the slowest rank of each size; one with the fast
    modes."""
    cases = []
    with torch.inference_mode(), simulated_communication(bench.device):
        for rows, keys in SHAPES:
            filled = FilledLayer(bench, bench.tokens(keys))
            for size in SIZES:
                cases.append(_case(bench, filled, bench.tokens(rows), size))
            del filled
            fast = replace(bench, config=replace(bench.config, precision="f16", attention_precision="fp8"))
            cases.append({**_case(fast, FilledLayer(fast, bench.tokens(keys)), bench.tokens(rows), 1), "fast": True})
    return {"cases": cases}


def _case(bench: Bench, filled: FilledLayer, rows: int, size: int) -> dict[str, Any]:
    keys = filled.hidden.shape[0]
    times = []
    for rank in range(size):
        share = filled.share(rows * size, keys, rank, size)
        times.append(few_us(share.run, bench.device, 5))
    slowest = filled.share(rows * size, keys, times.index(max(times)), size)
    forwards = _record(bench, slowest)
    # The forward whose length is the median one is the picture; sums are medians over all of them.
    ordered = sorted(forwards, key=lambda intervals: intervals[-1].end)
    return {
        "rows": rows,
        "keys": keys,
        "ranks": size,
        "layer_us": max(times),
        "ranks_us": times,
        "parts_us": {part: statistics.median(_sum(f, part) for f in forwards) for part in trace.PARTS},
        "kernels": {part: sum(i.part == part for i in ordered[0]) for part in trace.PARTS},
        "idle_us": statistics.median(sum(gap["us"] for gap in gaps(f, 0.0)) for f in forwards),
        "exposed_gather_us": statistics.median(exposed_gather_us(f) for f in forwards),
        "gaps": gaps(ordered[len(ordered) // 2], GAP_US),
        "intervals": [asdict(i) for i in ordered[len(ordered) // 2]],
    }


def _record(bench: Bench, share: Share) -> list[list[Interval]]:
    measure(share.run, bench.device, bench.seconds)  # clocks of a busy device
    return trace.record(share.run, share.layer, 8 if bench.device.type == "cuda" else 2, bench.device)[1:]


def _sum(forward: list[Interval], part: str) -> float:
    return sum(interval.duration for interval in forward if interval.part == part)


def gaps(forward: list[Interval], at_least_us: float) -> list[dict[str, Any]]:
    """Times in which the layer's own stream does nothing, between its first and last kernel, and why.

    "waits for the gather": the other stream's gather ends when the gap does. "host": the kernel behind the gap was
    enqueued after the one ahead of it had ended. "device": the rest, launch latency between dependent kernels.
    """
    own = [interval for interval in forward if interval.part != trace.GATHER]
    gather_ends = [interval.end for interval in forward if interval.part == trace.GATHER]
    found = []
    end = own[0].end if own else 0.0
    for before, after in itertools.pairwise(own):
        end = max(end, before.end)
        if after.start - end > at_least_us:
            reason = "device"
            if after.part == trace.WRITE and any(end < moment <= after.start for moment in gather_ends):
                reason = "waits for the gather"
            elif after.launched > end:
                reason = "host"
            found.append(
                {"before": before.part, "after": after.part, "at": end, "us": after.start - end, "why": reason}
            )
    return found


def exposed_gather_us(forward: list[Interval]) -> float:
    """Time in which the layer waits for the gather and computes nothing."""
    return float(sum(gap["us"] for gap in gaps(forward, 0.0) if gap["why"] == "waits for the gather"))
