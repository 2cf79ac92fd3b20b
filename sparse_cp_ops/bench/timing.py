"""Timing: CUDA events or graph replays on the GPU, a monotonic clock on the CPU; medians and spread."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Timing:
    """Times of one call in microseconds: median and the 10th and 90th percentile of ``repeats`` calls."""

    median_us: float
    p10_us: float
    p90_us: float
    repeats: int
    method: str


def _summary(times_us: list[float], method: str) -> Timing:
    ordered = sorted(times_us)
    last = len(ordered) - 1
    return Timing(
        statistics.median(ordered), ordered[round(0.1 * last)], ordered[round(0.9 * last)], len(ordered), method
    )


def _measure_cpu(run: Callable[[], object], seconds: float) -> Timing:
    run()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 5 or (time.perf_counter() < end and len(times) < 200):
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) * 1e6)
    return _summary(times, "clock")


def _measure_events(run: Callable[[], object], seconds: float) -> Timing:
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    times: list[float] = []
    end = time.perf_counter() + seconds
    # Batches of event pairs without a sync in between: long enough runs reach the power-limited clock.
    while len(times) < 20 or (time.perf_counter() < end and len(times) < 2000):
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(20)]
        for start, stop in events:
            start.record()
            run()
            stop.record()
        torch.cuda.synchronize()
        times += [start.elapsed_time(stop) * 1e3 for start, stop in events]
    return _summary(times, "events")


def _measure_graph(run: Callable[[], object], seconds: float) -> Timing:
    """Time of a call inside a CUDA graph: replays of a graph of ``copies`` calls, so that launch gaps vanish."""
    copies = 10
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(copies):
            run()
    timing = _measure_events(graph.replay, seconds)
    return Timing(
        timing.median_us / copies, timing.p10_us / copies, timing.p90_us / copies, timing.repeats, f"graph of {copies}"
    )


def measure(run: Callable[[], object], device: torch.device, seconds: float = 0.5, graph: bool = False) -> Timing:
    """Median time of ``run()``; with ``graph`` its time inside a replayed CUDA graph (CUDA only)."""
    with torch.inference_mode():
        if device.type == "cpu":
            return _measure_cpu(run, seconds)
        with torch.cuda.device(device):  # events and graphs belong to streams of the current device
            return (_measure_graph if graph else _measure_events)(run, seconds)


def few_us(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median time of ``repeats`` calls behind one that is not timed, for calls too long to be run hundreds of times.

    Calls of less than 5 ms are timed several at once. The device is not idle in between, so its clock stays.
    """
    if device.type == "cpu":
        return measure(run, device, 0.0).median_us
    with torch.inference_mode(), torch.cuda.device(device):
        times, at_once = [], 1
        for _ in range(repeats + 1):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(at_once):
                run()
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop) * 1e3 / at_once)
            at_once = max(1, min(10, int(5e3 / max(times[-1], 1.0))))
    return float(statistics.median(times[1:]))
