"""Part 3: what the host pays: plans, eager layers beside the bare GEMM and norm calls, graphs, torch.compile."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from sparse_cp_ops.bench.layer import trace
from sparse_cp_ops.bench.layer.model import Bench, lens, random_layer, random_pages
from sparse_cp_ops.bench.timing import measure
from sparse_cp_ops.config import ParallelismConfig
from sparse_cp_ops.context_parallel.plan import CpPlan
from sparse_cp_ops.kv_cache import PagedKvCache
from sparse_cp_ops.nn import AttentionInputs, MlaAttention, SparseMlaImpl, get_mla_impl
from sparse_cp_ops.ops import direct

LAYERS = 4
REQUESTS = 16
KEYS = 8192  # of each decoding request
_IN_A_ROW = 5


def host_us(call: Callable[[], object], device: torch.device) -> float:
    """Host time of a call in microseconds, of five in a row: too few to fill the launch queue of a device.

    The lowest decile, not the median: a machine with other tenants adds to host times, and never takes off.
    """
    repeats = 40 if device.type == "cuda" else 3  # a CPU computes within the call
    times = []
    for _ in range(repeats):
        _synchronize(device)
        start = time.perf_counter()
        for _ in range(_IN_A_ROW):
            call()
        times.append((time.perf_counter() - start) / _IN_A_ROW)
    return sorted(times)[repeats // 10] * 1e6


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


@contextlib.contextmanager
def no_synchronisation(device: torch.device) -> Iterator[None]:
    """Any call that makes the host wait for the device raises."""
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")


class DecodeModel:
    """The attention layers of a small model, decoding; residuals and norms between them, no MLPs."""

    def __init__(self, bench: Bench, layers: int = LAYERS, requests: int = REQUESTS) -> None:
        self.bench, self.requests = bench, requests
        self.keys = bench.tokens(KEYS)
        self.layers = [random_layer(bench, i) for i in range(layers)]
        self.block_table = random_pages(requests, self.keys + 64, bench)
        self.cache = PagedKvCache(layers, self.block_table.numel(), bench.config.page_size, bench.device)
        self.impl: SparseMlaImpl = get_mla_impl(bench.config, ParallelismConfig())
        self.norm = torch.nn.RMSNorm(bench.config.hidden_size, device=bench.device, dtype=torch.bfloat16)

    def inputs(self, kv_lens: list[int], is_prefill: bool = False) -> AttentionInputs:
        """One new token a request, at the end of its keys."""
        return AttentionInputs(
            is_prefill, lens([1] * len(kv_lens)), lens([n - 1 for n in kv_lens]), self.block_table[: len(kv_lens)]
        )

    def hidden(self, rows: int) -> Tensor:
        return torch.randn(rows, self.bench.config.hidden_size, device=self.bench.device, dtype=torch.bfloat16)

    def step(self, hidden: Tensor, plan: CpPlan) -> Tensor:
        """Hidden states behind the last layer."""
        for layer in self.layers:
            attended, _ = layer(self.norm(hidden), self.cache, self.impl, plan)
            hidden = hidden + attended
        return hidden


def bare_calls(layer: MlaAttention, hidden: Tensor) -> Callable[[], object]:
    """The layer's GEMM and norm calls alone, on tensors that are there already."""
    config, rows = layer.mla_config, hidden.shape[0]
    indexer = layer.indexer
    assert indexer is not None

    def made(*shape: int, dtype: torch.dtype = hidden.dtype) -> Tensor:
        return torch.randn(shape, device=hidden.device, dtype=dtype)

    latent, query_latent, key = made(rows, config.kv_lora_rank), made(rows, config.q_lora_rank), made(rows, 128)
    wide, weight = hidden.float(), indexer.weights_proj.weight.float()
    kv_b = layer.kv_b_proj.weight.view(config.num_heads, -1, config.kv_lora_rank)
    w_kc, w_vc = kv_b[:, : config.qk_nope_head_dim], kv_b[:, config.qk_nope_head_dim :].mT
    q_nope = made(rows, config.num_heads, config.qk_nope_head_dim).transpose(0, 1)
    q = made(rows, config.num_heads, 576)[..., :512].transpose(0, 1)
    attended = made(rows, config.num_heads, 512).transpose(0, 1)
    values = made(rows, config.num_heads, config.v_head_dim)

    def calls() -> None:
        layer.kv_a_layernorm(latent)
        layer.kv_a_proj_with_mqa(hidden)
        layer.q_a_layernorm(query_latent)
        layer.q_a_proj(hidden)
        layer.q_b_proj(query_latent)
        indexer.wq_b(query_latent)
        indexer.k_norm(key)
        indexer.wk(hidden)
        F.linear(wide, weight)
        torch.bmm(q_nope, w_kc, out=q)
        torch.bmm(attended, w_vc, out=values.transpose(0, 1))
        layer.o_proj(values.flatten(1))

    return calls


def run(bench: Bench) -> dict[str, Any]:
    """Host times in microseconds, decode steps, and what torch.compile makes of the layer."""
    with torch.inference_mode():
        model = DecodeModel(bench)
        return {
            "layers": LAYERS,
            "requests": REQUESTS,
            "keys": model.keys,
            **_eager(bench, model),
            **(_graph(bench, model) if bench.device.type == "cuda" else {}),
        }


def _eager(bench: Bench, model: DecodeModel) -> dict[str, Any]:
    inputs, hidden = model.inputs([model.keys] * REQUESTS), model.hidden(REQUESTS)
    plan = model.impl.prepare(inputs)
    layer, device = model.layers[0], bench.device
    model.step(hidden, plan)
    with no_synchronisation(device):
        model.step(hidden, model.impl.prepare(inputs))
        model.step(hidden, model.impl.prepare(model.inputs([model.keys] * REQUESTS, is_prefill=True)))
    prepare = host_us(lambda: model.impl.prepare(inputs), device)
    plan = model.impl.prepare(inputs)
    # In turns, so that a change of the host's clock meets both.
    pairs = [
        (
            host_us(lambda: layer(hidden, model.cache, model.impl, plan), device),
            host_us(bare_calls(layer, hidden), device),
        )
        for _ in range(3)
    ]
    return {
        "prepare_us": prepare,
        "layer_us": min(ours for ours, _ in pairs),
        "bare_calls_us": min(bare for _, bare in pairs),
        "ops_us": _op_times(lambda: layer(hidden, model.cache, model.impl, plan), device),
        "synchronisations": 0,  # one would have raised above
    }


def _op_times(forward: Callable[[], object], device: torch.device) -> dict[str, float]:
    """Host time of each of the package's ops in a forward, called alone with the arguments it has there."""
    calls = arguments_of_ops(forward)
    return {name: host_us(functools.partial(getattr(direct, name), *given), device) for name, given in calls.items()}


def arguments_of_ops(forward: Callable[[], object]) -> dict[str, tuple[Any, ...]]:
    """What each of the package's ops was given last in a forward of a layer."""
    calls: dict[str, tuple[Any, ...]] = {}
    with contextlib.ExitStack() as stack:
        for name in ("attend_new_rows", *trace.OPS):
            op = getattr(direct, name)

            def remembered(*args: Any, _name: str = name, _op: Any = op) -> Any:
                calls[_name] = args
                return _op(*args)

            stack.enter_context(mock.patch.object(direct, name, remembered))
        forward()
    return calls


def _graph(bench: Bench, model: DecodeModel) -> dict[str, Any]:
    """A decode step of all layers in one graph, replayed with other lengths; each replay against an eager step."""
    lengths = [[model.keys - i * k % model.keys for i in range(REQUESTS)] for k in (0, 7, 1, 311)]
    room = {"max_requests": REQUESTS, "local_rows": REQUESTS, "total_tokens": REQUESTS}
    plan = model.impl.prepare(model.inputs(lengths[0]), **room)
    hidden = model.hidden(REQUESTS)
    for _ in range(2):
        model.step(hidden, plan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = model.step(hidden, plan)
    largest = 0.0
    for kv_lens in lengths:
        fresh = model.impl.prepare(model.inputs(kv_lens))
        hidden.copy_(model.hidden(REQUESTS))
        expected = model.step(hidden, fresh)
        plan.copy_(fresh)
        out.fill_(torch.nan)
        graph.replay()
        largest = max(largest, float((out - expected).abs().max()))
    eager = measure(lambda: model.step(hidden, plan), bench.device, bench.seconds / 4)
    replay = measure(graph.replay, bench.device, bench.seconds / 4)

    def next_step() -> None:
        plan.copy_(model.impl.prepare(model.inputs(lengths[1])))
        graph.replay()

    return {
        "graph_difference": largest,
        "eager_step_us": eager.median_us,
        "graph_step_us": replay.median_us,
        "refill_and_replay_host_us": host_us(next_step, bench.device),
    }
