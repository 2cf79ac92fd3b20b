"""Part 4: how evenly the splits share the work of a batch."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sparse_cp_ops import ops
from sparse_cp_ops.bench import inputs as bench_inputs
from sparse_cp_ops.bench.layer.model import Bench
from sparse_cp_ops.bench.timing import few_us
from sparse_cp_ops.context_parallel.plan import CpPlan

SIZES = (2, 4, 8)
SPLITS = ("zigzag", "interleave")
# Name, (new, prefix) of each request.
BATCHES: tuple[tuple[str, tuple[tuple[int, int], ...]], ...] = (
    ("one prompt of 128K", ((131072, 0),)),
    ("one prompt of 16K", ((16384, 0),)),
    ("eight mixed prompts, 64K in all", tuple((n * 1024, 0) for n in (1, 2, 3, 4, 6, 8, 16, 24))),
    ("16K behind a prefix of 112K", ((16384, 114688),)),
    ("eight prompts of 2K, prefixes of 0 to 28K", tuple((2048, i * 4096) for i in range(8))),
    ("sixteen prompts of 256", ((256, 0),) * 16),
    ("three prompts of 1000, 37 and 5", ((1000, 0), (37, 0), (5, 0))),
)


def run(bench: Bench) -> dict[str, Any]:
    """Times of indexer + attention of every rank under both splits."""
    with torch.inference_mode():
        return {"shares": _shares(bench)}


class _Caches:
    """Random caches and rows that all batches of the balance part share: what is measured depends on lengths only."""

    def __init__(self, bench: Bench) -> None:
        config, device = bench.config, bench.device
        self.bench = bench
        tokens = max(sum(bench.tokens(new) + bench.tokens(prefix) + 64 for new, prefix in b) for _, b in BATCHES)
        rows = max(sum(bench.tokens(new) for new, _ in b) for _, b in BATCHES) // min(SIZES) + 128
        self.mla, _ = bench_inputs.mla_cache(-(-tokens // 64) * 64, device)
        self.index, _, _ = bench_inputs.indexer_cache(-(-tokens // 64) * 64, device)
        self.q = torch.randn(rows, config.num_heads, 576, device=device, dtype=torch.bfloat16)
        self.q8 = bench_inputs.e4m3((rows, config.index_n_heads, 128), device)
        self.weights = torch.randn(rows, config.index_n_heads, device=device) / 100

    def block_table(self, lengths: Sequence[int]) -> Tensor:
        """Pages of each request, none shared."""
        counts = [-(-length // 64) for length in lengths]
        table = torch.full((len(lengths), max(counts)), -1, dtype=torch.int32)
        pages = torch.randperm(self.mla.shape[0]).int()
        start = 0
        for row, count in enumerate(counts):
            table[row, :count] = pages[start : start + count]
            start += count
        return table.to(self.bench.device)

    def indexer_and_attention(self, plan: CpPlan) -> Callable[[], object]:
        """Both ops on the rows of a plan."""
        rows, config = plan.local_rows, self.bench.config
        assert plan.block_table is not None
        lists = (plan.block_table, plan.req_ids, plan.kv_lens)

        def call() -> object:
            picks = ops.indexer_topk_ragged_cp(
                self.q8[:rows], self.weights[:rows], self.index, *lists, config.index_topk, 0
            )
            return ops.sparse_mla_fp8_cp(self.q[:rows], self.mla, picks, *lists, config.softmax_scale)

        return call


def _shares(bench: Bench) -> list[dict[str, Any]]:
    caches, found = _Caches(bench), []
    for name, batch in BATCHES:
        new = [bench.tokens(n) for n, _ in batch]
        prefix = [p // bench.scale for _, p in batch]
        table = caches.block_table([n + p for n, p in zip(new, prefix, strict=True)])
        for size in SIZES:
            for split in SPLITS:
                times = []
                for rank in range(size):
                    plan = CpPlan.build(new, prefix, rank, size, split, block_table=table, device=bench.device)
                    times.append(few_us(caches.indexer_and_attention(plan), bench.device, 3))
                found.append(
                    {
                        "batch": name,
                        "new_tokens": sum(new),
                        "ranks": size,
                        "split": split,
                        "ranks_us": times,
                        "slowest_over_mean": max(times) / statistics.mean(times),
                    }
                )
    return found
