"""What the host pays for the package: plans, an attention layer beside its bare GEMM and norm calls, each op alone.

    python benchmarks/host.py [--device cuda]

Without rows nothing is computed: what is left is Python, dispatching, argument checks and allocating. Two ranks have a
row each, as without rows they skip the gather; it copies at once, so their overhead holds its and the ops' computing.
Times are of batches of calls in a row: the lowest decile (other work on the machine only adds) and the median. Goals:
50 us for a plan without expand_cp_plan, which is a kernel of its own; 25 us for a layer above its bare calls.
"""

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from typing import cast
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import sparse_cp_ops
from sparse_cp_ops.bench.layer.host import arguments_of_ops, bare_calls
from sparse_cp_ops.bench.layer.model import TINY, Bench, lens, random_layer
from sparse_cp_ops.bench.layer.ranks import SimulatedRanks, context_parallel
from sparse_cp_ops.config import ParallelismConfig
from sparse_cp_ops.context_parallel import CpPlan, collectives
from sparse_cp_ops.kv_cache import PagedKvCache
from sparse_cp_ops.nn import AttentionInputs, MlaAttention, get_mla_impl
from sparse_cp_ops.ops import CpPlanRows, direct, expand_cp_plan

CALLS_IN_A_ROW = 20
MODES = {"inference_mode": torch.inference_mode, "no_grad": torch.no_grad}


class Host:
    """Prints host times of calls on one device."""

    def __init__(self, device: torch.device, batches: int) -> None:
        self.device, self.batches = device, batches

    def time(self, name: str, call: Callable[[], object]) -> float:
        """Lowest decile in microseconds, printed beside the median."""
        times = []
        for _ in range(self.batches + 1):
            if self.device.type == "cuda":
                torch.cuda.synchronize()  # outside the measured time: a full launch queue would be measured instead
            start = time.perf_counter()
            for _ in range(CALLS_IN_A_ROW):
                call()
            times.append((time.perf_counter() - start) / CALLS_IN_A_ROW * 1e6)
        times = sorted(times[1:])
        lowest = times[len(times) // 10]
        print(f"  {name:<44} {lowest:>8.1f} {statistics.median(times):>8.1f}", flush=True)
        return lowest


def plans(host: Host) -> None:
    rows = expand_cp_plan(torch.zeros(1, 2, dtype=torch.int32), 0, 1, "zigzag", 1, 1)

    def no_expansion(*_: object) -> CpPlanRows:
        return rows

    for requests, tokens in ((1, 100), (64, 1), (64, 10_000)):
        build = functools.partial(
            CpPlan.build,
            lens([tokens] * requests),
            lens([4096] * requests),
            cp_rank=1,
            cp_size=8,
            block_table=torch.zeros(requests, -(-(tokens + 4096) // 64), dtype=torch.int32, device=host.device),
            max_positions=163_840,
            device=host.device,
        )
        name = f"CpPlan.build, {requests} x {tokens} tokens"
        with mock.patch.object(direct, "expand_cp_plan", new=no_expansion):
            host.time(f"{name}, no expansion", build)
        if requests * tokens <= 100:
            host.time(name, build)


class Layer:
    """A small layer with its pages, on one rank or as one of two simulated ones; one request, no prefix."""

    def __init__(self, device: torch.device, size: int = 1) -> None:
        self.bench = Bench(device, TINY)
        self.cache = PagedKvCache(1, 8, TINY.page_size, device)
        self.block_table = torch.arange(8, dtype=torch.int32, device=device).view(1, 8)
        group = cast(dist.ProcessGroup, SimulatedRanks(0, size))
        parallelism = context_parallel(0, size) if size > 1 else ParallelismConfig()
        self.impl = get_mla_impl(TINY, parallelism, group)
        self.layer = random_layer(self.bench)
        if size > 1:
            self.layer = MlaAttention(TINY, 0, parallelism, group, device, torch.bfloat16)

    def inputs(self, tokens: int, is_prefill: bool) -> AttentionInputs:
        return AttentionInputs(is_prefill, lens([tokens]), lens([0]), self.block_table)

    def forward(self, rows: int, is_prefill: bool) -> Callable[[], object]:
        made = self.impl.prepare(self.inputs(rows * self.impl.group.size, is_prefill))
        hidden = torch.randn(rows, TINY.hidden_size, device=self.bench.device, dtype=torch.bfloat16)
        return lambda: self.layer(hidden, self.cache, self.impl, made)


class _Counted(TorchDispatchMode):
    """Counts the ops that are called from Python."""

    def __init__(self) -> None:
        super().__init__()
        self.package, self.others = 0, 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if op.namespace == "sparse_cp_ops":
            self.package += 1
        else:
            self.others += 1
        return op(*args, **kwargs or {})


class _Done:
    """A gather that has ended when it starts."""

    def wait(self) -> None:
        pass


def _all_gather_at_once(output: Tensor, own: Tensor, group: object = None, async_op: bool = False) -> _Done:
    """Every rank sends the same."""
    for block in output.view(2, -1):
        if block.data_ptr() != own.data_ptr():
            block.copy_(own.view(-1))
    return _Done()


def layers(host: Host) -> None:
    one, two = Layer(host.device), Layer(host.device, 2)
    with mock.patch.object(collectives, "_all_gather_single", _all_gather_at_once):
        for name, layer, inputs in (
            ("decode", one, one.inputs(1, False)),
            ("prefill", one, one.inputs(2, True)),
            ("prefill on 2 ranks", two, two.inputs(2, True)),
        ):
            host.time(f"prepare, {name}", functools.partial(layer.impl.prepare, inputs))
        for requests in (1, 2):
            room = one.impl.prepare(one.inputs(1, False), requests, requests, requests)
            refill = functools.partial(room.copy_, one.impl.prepare(one.inputs(1, False)))
            host.time(f"copy_ into room for {requests} requests", refill)
        for rows, name, layer, is_prefill in (
            (0, "decode", one, False),
            (0, "prefill", one, True),
            (1, "prefill", one, True),
            (1, "prefill on 2 ranks", two, True),
        ):
            hidden = torch.randn(rows, TINY.hidden_size, device=host.device, dtype=torch.bfloat16)
            bare = host.time(f"bare GEMM and norm calls, {rows} rows", bare_calls(one.layer, hidden))
            above = host.time(f"layer, {name}, {rows} rows", layer.forward(rows, is_prefill)) - bare
            print(f"  {'':<44} {above:>8.1f} above the bare calls")
    forward = one.forward(1, False)
    with _Counted() as counted:
        forward()
    print(f"  ops called by a decoding layer: {counted.package} of the package, {counted.others} of torch")


def ops(host: Host) -> None:
    """Each op as its typed wrapper and as the op itself, with the tensors of a layer without rows."""
    for name, given in arguments_of_ops(Layer(host.device).forward(0, False)).items():
        with torch._C._AutoDispatchBelowAutograd():  # as in a layer
            host.time(f"{name}, wrapper", functools.partial(getattr(sparse_cp_ops.ops, name), *given))
            host.time(f"{name}, op", functools.partial(getattr(direct, name), *given))
    x = torch.zeros(0, 64, device=host.device)
    host.time("for scale: aten view, slice, empty", lambda: (x.view(0, 64), x[:, :32], torch.empty_like(x)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batches", type=int, default=100)
    parser.add_argument("--mode", action="append", choices=MODES, help="default: both")
    arguments = parser.parse_args()
    if arguments.device == "cpu":
        torch.set_num_threads(1)
    host = Host(torch.device(arguments.device), arguments.batches)
    for mode in arguments.mode or MODES:
        print(f"{arguments.device}, torch {torch.__version__}, {mode}; us: lowest decile, median")
        with MODES[mode]():
            plans(host)
            layers(host)
            ops(host)


if __name__ == "__main__":
    main()
