"""Part 3, torch.compile: graphs over many lengths, and times beside eager ones."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sparse_cp_ops.bench.layer.host import DecodeModel
from sparse_cp_ops.bench.layer.model import Bench, lens
from sparse_cp_ops.bench.timing import measure
from sparse_cp_ops.context_parallel.plan import CpPlan
from sparse_cp_ops.nn import AttentionInputs

LENGTHS = 50
PREFILL_ROWS = (256, 2048, 8192)
DECODE_ROWS = 16


def run(bench: Bench) -> dict[str, Any]:
    """Graphs that 50 lengths of at least 2 need in prefill and in decode, and compiled against eager times.

    "graph" times are those of the device alone: the same call in a CUDA graph.
    """
    model = DecodeModel(bench, layers=1, requests=LENGTHS + 2)
    prefill_cases = [_prefill(model, bench.tokens(rows)) for rows in PREFILL_ROWS]
    with torch.inference_mode():
        prefill = _Compiled(model)
        longest = bench.tokens(PREFILL_ROWS[-1])
        lengths = [2 + i * (longest - 2) // (LENGTHS - 1) for i in range(LENGTHS)]
        for length in lengths:
            prefill(*_prefill(model, length)())
        decode = _Compiled(model)
        for requests in range(2, 2 + LENGTHS):
            decode(*_decode(model, requests)())
        return {
            "lengths": LENGTHS,
            "prefill_graphs": prefill.graphs,
            "prefill_compile_s": prefill.seconds,
            "decode_graphs": decode.graphs,
            "decode_compile_s": decode.seconds,
            "times": [
                {"kind": "prefill", **_times(bench, model, prefill, case)} for case in prefill_cases
            ] + [{"kind": "decode", **_times(bench, model, decode, _decode(model, DECODE_ROWS))}],
        }  # fmt: skip


class _Compiled:
    """The layer compiled on its own, with a count of the graphs and the time that their making took."""

    def __init__(self, model: DecodeModel) -> None:
        self.model, self.graphs, self.seconds = model, 0, 0.0
        torch._dynamo.reset()

        def backend(graph: torch.fx.GraphModule, examples: list[Tensor]) -> Any:
            from torch._inductor.compile_fx import compile_fx

            self.graphs += 1
            return compile_fx(graph, examples)

        self._layer = torch.compile(model.layers[0], fullgraph=True, backend=backend)

    def __call__(self, hidden: Tensor, plan: CpPlan) -> Tensor:
        before, start = self.graphs, time.perf_counter()
        out, _ = self._layer(hidden, self.model.cache, self.model.impl, plan)
        if self.graphs > before:
            self.seconds += time.perf_counter() - start
        return out  # type: ignore[no-any-return]


Case = Callable[[], tuple[Tensor, CpPlan]]


def _prefill(model: DecodeModel, rows: int) -> Case:
    """One prompt in the pages of the first request."""
    table = model.block_table[:1]

    def made() -> tuple[Tensor, CpPlan]:
        return model.hidden(rows), model.impl.prepare(AttentionInputs(True, lens([rows]), lens([0]), table))

    return made


def _decode(model: DecodeModel, requests: int) -> Case:
    return lambda: (model.hidden(requests), model.impl.prepare(model.inputs([model.keys] * requests)))


def _times(bench: Bench, model: DecodeModel, compiled: _Compiled, case: Case) -> dict[str, Any]:
    hidden, plan = case()
    layer = model.layers[0]
    with torch.inference_mode():
        expected, _ = layer(hidden, model.cache, model.impl, plan)
        difference = (compiled(hidden, plan) - expected).float().norm() / expected.float().norm()
        found = {"rows": hidden.shape[0], "relative_difference": float(difference)}
        for name, call in (
            ("eager", lambda: layer(hidden, model.cache, model.impl, plan)),
            ("compiled", lambda: compiled(hidden, plan)),
        ):
            found[f"{name}_us"] = measure(call, bench.device, bench.seconds / 4).median_us
            if bench.device.type == "cuda":
                found[f"{name}_graph_us"] = measure(call, bench.device, bench.seconds / 4, graph=True).median_us
        return found
