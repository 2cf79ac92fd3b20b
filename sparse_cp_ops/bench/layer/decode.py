"""Part 6: the three head modes of decode, from one request to 256."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist

from sparse_cp_ops.bench.layer.model import Bench, FilledLayer, lens
from sparse_cp_ops.bench.layer.ranks import SimulatedRanks, context_parallel, modelled_gather_us
from sparse_cp_ops.bench.layer.ranks import simulated_communication as simulated
from sparse_cp_ops.bench.timing import measure
from sparse_cp_ops.nn import AttentionInputs, MlaAttention, PagedKvCache, get_mla_impl

BATCHES = (1, 4, 16, 64, 128, 256)
SIZES = (2, 4, 8)
KEYS = 32768
MODES = ("head_slice", "batch_slice")


def run(bench: Bench) -> dict[str, Any]:
    """Times of a layer's decode step on the last rank; the modelled communication is in them and beside them."""
    keys = bench.tokens(KEYS)
    with torch.inference_mode(), simulated(bench.device):
        filled = FilledLayer(bench, keys)
        # Every request has pages of its own, so that batches read as many bytes as they would.
        pages = filled.block_table.shape[1]
        requests = BATCHES[-1] if bench.scale == 1 else 8
        cache = PagedKvCache(1, pages * requests, bench.config.page_size, bench.device)
        for mine, theirs in ((cache.mla[0], filled.cache.mla[0]), (cache.indexer[0], filled.cache.indexer[0])):
            assert mine is not None
            assert theirs is not None
            mine.view(requests, *theirs.shape).copy_(theirs.expand(requests, *theirs.shape))
        table = filled.block_table + torch.arange(requests, device=bench.device).int()[:, None] * pages
        found = []
        for batch in (b for b in BATCHES if b <= requests):
            inputs = AttentionInputs(False, lens([1] * batch), lens([keys - 1] * batch), table[:batch])
            for mode, size in [("replicated", 1), *((mode, size) for mode in MODES for size in SIZES)]:
                found.append(_step(bench, filled, cache, inputs, mode, size))
    return {"keys": keys, "steps": found}


def _step(
    bench: Bench, filled: FilledLayer, cache: PagedKvCache, inputs: AttentionInputs, mode: str, size: int
) -> dict[str, Any]:
    batch = inputs.num_requests
    config = bench.config
    group = cast(dist.ProcessGroup, SimulatedRanks(size - 1, size))
    parallelism = context_parallel(size - 1, size, decode_mode=mode)
    impl = get_mla_impl(config, parallelism, group)
    layer = MlaAttention(config, 0, parallelism, group, device="meta")
    layer.load_state_dict(filled.layer.state_dict(keep_vars=True), assign=True)
    layer.refresh_rope_table()
    plan = impl.prepare(inputs)
    hidden = filled.hidden[:batch]

    def call() -> object:
        return layer(hidden, cache, impl, plan)

    timing = measure(call, bench.device, bench.seconds / 50, graph=bench.device.type == "cuda")
    sent = 0.0
    if mode == "head_slice":
        sent = modelled_gather_us(batch * config.hidden_size * 2)
    elif mode == "batch_slice":
        rows = -(-batch // size)
        sent = modelled_gather_us((size - 1) * rows * 788) + modelled_gather_us(
            (size - 1) * rows * config.hidden_size * 2
        )
    return {"requests": batch, "mode": mode, "ranks": size, "step_us": timing.median_us, "modelled_us": sent}
