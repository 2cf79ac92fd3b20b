"""Part 4: from which batch on context parallelism pays."""

from __future__ import annotations

from typing import Any

import torch

from sparse_cp_ops.bench.layer.model import Bench, FilledLayer
from sparse_cp_ops.bench.layer.ranks import simulated_communication
from sparse_cp_ops.bench.timing import measure

SIZES = (1, 2, 4, 8)
TOKENS = (64, 128, 256, 512, 1024, 2048, 4096)
PREFIXES = (0, 32768)


def run(bench: Bench) -> dict[str, Any]:
    """The layer's time on one rank with all rows and on the last rank of several; the gather's stand-in runs in it.

    "eager" includes waiting for the host, "graph" is the device alone.
    """
    found = []
    with torch.inference_mode(), simulated_communication(bench.device):
        for prefix in PREFIXES:
            filled = FilledLayer(bench, bench.tokens(prefix + TOKENS[-1]))
            for new in TOKENS:
                rows = bench.tokens(new)
                keys = prefix // bench.scale + rows
                for size in SIZES:
                    share = filled.share(rows, keys, size - 1, size)
                    entry: dict[str, Any] = {"new_tokens": rows, "prefix": keys - rows, "ranks": size}
                    entry["eager_us"] = measure(share.run, bench.device, bench.seconds / 20).median_us
                    if bench.device.type == "cuda":
                        entry["graph_us"] = measure(share.run, bench.device, bench.seconds / 20, graph=True).median_us
                    found.append(entry)
    return {"forwards": found}
