"""The profiler's trace of a layer, as intervals that each belong to a named part of the layer."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from sparse_cp_ops.context_parallel import collectives
from sparse_cp_ops.nn import MlaAttention, mla_attention
from sparse_cp_ops.ops import direct

PROJECTIONS, INDEX_PROJECTIONS, OUTPUT = "q and kv projections", "indexer projections", "output projection"
NORMS, RECORDS, CASTS = "norms", "RoPE, quantise, pack", "copies and casts"
GATHER, WRITE, INDEXER, ATTENTION = "gather (modelled)", "cache write", "indexer scores + top-k", "sparse attention"
PARTS = (PROJECTIONS, INDEX_PROJECTIONS, OUTPUT, INDEXER, ATTENTION, RECORDS, NORMS, CASTS, WRITE, GATHER)
GEMMS = (PROJECTIONS, INDEX_PROJECTIONS, OUTPUT)
SMALL = (RECORDS, NORMS, CASTS, WRITE)  # work that is neither GEMM nor indexer nor attention
_MARK = "part: "
_ITERATION = "layer"
# cuBLAS: nvjet_*, *gemm*, cutlass_*, and the sum over a split K.
_GEMM_KERNEL = re.compile(r"gemm|nvjet|cutlass|splitk|gemv|dot_kernel", re.IGNORECASE)

OPS = {
    "pack_mla_kv": RECORDS,
    "quant_q_k_cp": RECORDS,
    "rope_": RECORDS,
    "write_kv_cache": WRITE,
    "indexer_topk_ragged_cp": INDEXER,
    "sparse_mla_fp8_cp": ATTENTION,
}
_MODULES = {
    "q_a_proj": PROJECTIONS,
    "kv_a_proj_with_mqa": PROJECTIONS,
    "q_a_layernorm": NORMS,
    "kv_a_layernorm": NORMS,
    "indexer.k_norm": NORMS,
}
_METHODS = {
    "_absorbed_queries": PROJECTIONS,
    "_project": OUTPUT,
    "indexer.project_queries": INDEX_PROJECTIONS,
    "indexer.project_keys": INDEX_PROJECTIONS,
}


@dataclass(frozen=True)
class Interval:
    """A kernel, copy or memset (on a CPU: a marked range); microseconds since the first one of its forward."""

    part: str
    name: str
    start: float
    duration: float
    stream: int
    launched: float  # when the host enqueued it, on the same clock

    @property
    def end(self) -> float:
        """When it ends."""
        return self.start + self.duration


def _marked(part: str, call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def marked(*args: Any, **kwargs: Any) -> Any:
        with record_function(_MARK + part):
            return call(*args, **kwargs)

    return marked


@contextlib.contextmanager
def marked_parts(layer: MlaAttention) -> Iterator[None]:
    """Profiler ranges around the layer's parts while the context is open; the innermost one counts."""
    with contextlib.ExitStack() as stack:

        def replace(owner: Any, name: str, part: str) -> None:
            stack.enter_context(mock.patch.object(owner, name, _marked(part, getattr(owner, name))))

        for name, part in OPS.items():
            replace(direct, name, part)
        replace(collectives, "_all_gather_single", GATHER)
        replace(mla_attention, "project_values", OUTPUT)
        for path, part in {**_MODULES, **_METHODS}.items():
            *owners, name = path.split(".")
            owner = layer.get_submodule(".".join(owners))
            if path in _MODULES:
                replace(owner.get_submodule(name), "forward", part)
            else:
                replace(owner, name, part)
        yield


def record(run: Callable[[], object], layer: MlaAttention, repeats: int, device: torch.device) -> list[list[Interval]]:
    """Intervals of each of ``repeats`` forwards, in the order in which they start.

    They are enqueued back to back; run some before, so that clocks are those of a busy device.
    """
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    with marked_parts(layer), profile(activities=activities) as profiler, torch.inference_mode():
        for _ in range(repeats):
            with record_function(_ITERATION):
                run()
        if device.type == "cuda":
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return parse(events, device.type == "cuda")


def parse(events: list[dict[str, Any]], on_device: bool) -> list[list[Interval]]:
    """Forwards of a Chrome trace that :func:`record` made."""
    ranges = [e for e in events if e.get("cat") == "user_annotation"]
    forwards = sorted((e for e in ranges if e["name"] == _ITERATION), key=lambda e: e["ts"])
    marks = [e for e in ranges if e["name"].startswith(_MARK)]
    if on_device:
        launches = {
            e["args"]["correlation"]: e["ts"]
            for e in events
            if e.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in e.get("args", {})
        }
        work = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
        timed = [(e, launches.get(e["args"]["correlation"], e["ts"]), e["args"].get("stream", 0)) for e in work]
    else:
        timed = [
            (e, e["ts"], 0) for e in marks if not any(_inside(other["ts"], e) for other in marks if other is not e)
        ]
    found = []
    for forward in forwards:
        own = [(e, launched, stream) for e, launched, stream in timed if _inside(launched, forward)]
        first = min((e["ts"] for e, _, _ in own), default=0.0)
        inner_marks = [e for e in marks if _inside(e["ts"], forward)]
        intervals = [
            Interval(
                _part_of(e["name"], launched, inner_marks), e["name"], e["ts"] - first, e["dur"], stream,
                launched - first,
            )
            for e, launched, stream in own
        ]  # fmt: skip
        found.append(sorted(intervals, key=lambda interval: interval.start))
    return found


def _inside(moment: float, event: dict[str, Any]) -> bool:
    return bool(event["ts"] <= moment <= event["ts"] + event["dur"])


def _part_of(name: str, launched: float, marks: list[dict[str, Any]]) -> str:
    around = [mark for mark in marks if _inside(launched, mark)]
    part = str(min(around, key=lambda mark: mark["dur"])["name"]).removeprefix(_MARK) if around else CASTS
    # Inside the projections' methods there are copies and casts beside the products.
    if part in GEMMS and not (name.startswith(_MARK) or _GEMM_KERNEL.search(name)):
        return CASTS
    return part
