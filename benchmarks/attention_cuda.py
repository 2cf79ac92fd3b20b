"""Times sparse_mla_fp8_cp on a CUDA device beside released peers, with the bf16 GEMM rate of the same run.

    python benchmarks/attention_cuda.py [--peers FOLDER] [--case prefill|heads|decode] [--seconds 0.5]

FOLDER holds peers.py with sparse_prefill_bf16() and SparseDecodeFp8; without it those columns stay empty.
TFLOPS count 2 * rows * heads * topk * (576 + 512). Prefill times are medians of event pairs over at least ``--seconds``
of back-to-back launches (shorter bursts end before the power limit acts); decode times are CUDA graph replays.
"""

import argparse
import importlib
import itertools
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch

from sparse_cp_ops import ops

SCALE = 0.1352
PREFILL = [(1024, 32768, 128), (4096, 8192, 128), (4096, 32768, 128), (4096, 131072, 128), (8192, 32768, 128)]
HEADS = [(4096, 32768, 64), (4096, 32768, 32), (4096, 32768, 16), (4096, 32768, 8)]
DECODE = [(b, 32768, h) for h in (128, 64) for b in (1, 4, 16, 64, 128, 256)]


def median_ms(call: Callable[[], Any], seconds: float) -> float:
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    count = max(10, int(seconds * 1000 / start.elapsed_time(end)))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(events))


def graph_us(call: Callable[[], Any]) -> float:
    """Median time of one call, ten of them in a graph."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            call()
    return median_ms(graph.replay, 0.02) * 100


def records(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random records with power-of-two scales and the bf16 cache with the same values."""
    values = torch.randn(tokens, 512, device="cuda").mul_(100).clamp_(-448, 448).to(torch.float8_e4m3fn)
    scales = torch.exp2(torch.randint(-8, -5, (tokens, 4), device="cuda").float())
    rope = torch.randn(tokens, 64, device="cuda").bfloat16()
    cache = torch.cat([values.view(torch.uint8), scales.view(torch.uint8), rope.view(torch.uint8)], 1)
    dense = torch.cat([values.float() * scales.repeat_interleave(128, 1), rope.float()], 1).bfloat16()
    return cache.view(-1, 64, 656), dense.view(tokens, 1, 576)


def overlapping_lists(rows: int, tokens: int, topk: int) -> torch.Tensor:
    """64 neighbouring rows share 7 of 8 keys."""
    base = torch.rand(-(-rows // 64), tokens, device="cuda").repeat_interleave(64, 0)[:rows]
    noise = torch.rand(rows, tokens, device="cuda")
    return torch.where(noise < 0.125, noise * 8, base).topk(topk).indices.int()


def random_lists(rows: int, tokens: int, topk: int) -> torch.Tensor:
    lists = [
        torch.rand(256, tokens, device="cuda").topk(topk).indices.int() for _ in range(min(rows, 1024) // 256 or 1)
    ]
    return torch.cat(lists).repeat(-(-rows // 256), 1)[:rows].contiguous()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers")
    parser.add_argument("--case", action="append", choices=["prefill", "heads", "decode"])
    parser.add_argument("--seconds", type=float, default=0.5)
    arguments = parser.parse_args()
    cases = arguments.case or ["prefill", "heads", "decode"]
    peers: Any = None
    if arguments.peers:
        sys.path.insert(0, arguments.peers)
        peers = importlib.import_module("peers")
        peers.load()
    seconds = arguments.seconds

    a = torch.randn(8192, 8192, device="cuda").bfloat16()
    gemm = 2 * 8192**3 / median_ms(lambda: a @ a, seconds) / 1e9
    print(f"bf16 GEMM {gemm:.0f} TFLOPS")
    topk = 2048
    caches: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    long = [case for name, group in (("prefill", PREFILL), ("heads", HEADS)) if name in cases for case in group]
    for rows, tokens, heads in long:
        cache, dense = caches.setdefault(tokens, records(tokens))
        q = torch.randn(rows, heads, 576, device="cuda").bfloat16()
        flop = 2 * rows * heads * topk * 1088
        both = (rows, tokens, heads) == (4096, 32768, 128)
        for name, lists in (("", random_lists), ("overlap", overlapping_lists))[: 1 + both]:
            indices = lists(rows, tokens, topk)
            ours = median_ms(
                lambda q=q, c=cache, i=indices: ops.sparse_mla_fp8_cp(q, c, i, None, None, None, SCALE), seconds
            )
            line = f"{rows:5d} x {tokens:6d} H={heads:3d} {name:8s} {ours:7.3f} ms {flop / ours / 1e9:6.1f} TFLOPS"
            if peers is not None:
                wide = q if heads >= 64 else torch.nn.functional.pad(q, (0, 0, 0, 64 - heads))
                bf16 = median_ms(
                    lambda q=wide, d=dense, i=indices: peers.sparse_prefill_bf16(q, d, i.unsqueeze(1), SCALE), seconds
                )
                fp8 = peers.SparseDecodeFp8()
                fp8_ms = median_ms(
                    lambda f=fp8, q=wide, c=cache, i=indices: f(
                        q.unsqueeze(1), c.view(torch.float8_e4m3fn).unsqueeze(2), i.unsqueeze(1), SCALE
                    ),
                    seconds,
                )
                line += f" | peers: bf16 {bf16:7.3f} ms, FP8 {fp8_ms:7.3f} ms"
            print(line, flush=True)
    for rows, tokens, heads in DECODE if "decode" in cases else []:
        cache, _ = caches.setdefault(tokens, records(tokens))
        q = torch.randn(rows, heads, 576, device="cuda").bfloat16()
        indices = random_lists(rows, tokens, topk)
        split = graph_us(
            lambda q=q, c=cache, i=indices: ops.sparse_mla_fp8_cp(q, c, i, None, None, None, SCALE, "high", False)
        )
        line = f"decode {rows:3d} rows H={heads:3d} {split:7.1f} us"
        if peers is not None:
            fp8 = peers.SparseDecodeFp8()
            peer = graph_us(
                lambda f=fp8, q=q, c=cache, i=indices: f(
                    q.unsqueeze(1), c.view(torch.float8_e4m3fn).unsqueeze(2), i.unsqueeze(1), SCALE
                )
            )
            line += f" | peer FP8 {peer:7.1f} us"
        print(line, flush=True)


if __name__ == "__main__":
    main()
