"""What every process of the demo runs: a model, the steps, and what they leave behind."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hf_reference import relate_indexers, small_model
from torch import Tensor

from sparse_cp_ops.config import CPRotateMethod, ParallelismConfig, PrefillCPConfig
from sparse_cp_ops.context_parallel.plan import CpPlan
from sparse_cp_ops.integrations.transformers import Request, SparseCpModel

PAGE_SIZE = 64
PREFILLS = ("first", "second", "short", "plain")  # also the names of their prompts; decode goes on behind the second


@dataclass(frozen=True)
class Settings:
    """What all processes have to agree on."""

    prompts: dict[str, list[int]]
    layers: int
    topk: int
    decode_steps: int
    split: str
    ranks: int

    @property
    def layer_runs(self) -> int:
        """How many times a layer runs in all steps together."""
        return self.layers * (len(PREFILLS) + self.decode_steps)

    def model(self) -> Any:
        """The model, with the same weights in every process."""
        # float64: a GEMM's rounding then depends on the number of rows by 1e-16 only, so that what remains between
        # several processes and one would be a fault and not noise.
        sizes = {"num_hidden_layers": self.layers, "index_topk": self.topk}
        model = small_model("deepseek_v32", dtype=torch.float64, **sizes)
        relate_indexers(model)
        return model


@dataclass(frozen=True)
class Step:
    """What a prefill, or a series of decode forwards, left on one rank.

    ``logits`` [rows, vocab] are those of all rows that any rank computed; ``picks[layer]`` int32 [own rows, topk] are
    of this rank's rows, which stand at ``positions`` of the sequence.
    """

    name: str
    seconds: float
    prefix_hit: int
    logits: Tensor
    positions: Tensor
    picks: list[Tensor]


class Recorder:
    """Collects picks through ``on_picks`` and reports progress, a tick a layer."""

    def __init__(self, layers: int, tick: Callable[[], None]) -> None:
        self.tick = tick
        self.picks: list[list[Tensor]] = [[] for _ in range(layers)]
        self.positions: list[Tensor] = []

    def __call__(self, layer_id: int, plan: CpPlan, picks: Tensor) -> None:
        own = plan.req_ids >= 0
        self.picks[layer_id].append(picks[own])
        if layer_id == 0:
            self.positions.append(plan.positions[own])
        self.tick()


def run_steps(
    settings: Settings, forced: list[int], group: Any, tick: Callable[[], None]
) -> tuple[list[Step], list[int]]:
    """Run everything on this rank.

    Args:
        settings: prompts and sizes.
        forced: tokens to decode; empty = the likeliest ones.
        group: the ranks; None = one process.
        tick: called after each layer.

    Returns:
        The steps, and the decoded tokens.
    """
    ranks, rank = (group.size(), group.rank()) if group is not None else (1, 0)
    cp = PrefillCPConfig(
        method=CPRotateMethod.ALL_GATHER_WITH_OVERLAP, split=settings.split, min_tokens=0, min_kv_work=0
    )
    parallelism = ParallelismConfig(tp_size=ranks, tp_rank=rank, prefill_cp_config=cp)
    longest = max(map(len, settings.prompts.values())) + settings.decode_steps
    sizes = {"num_pages": 3 * -(-longest // PAGE_SIZE), "page_size": PAGE_SIZE, "max_positions": longest}
    model = settings.model()
    sparse = SparseCpModel(model, parallelism, group, **sizes)
    plain = SparseCpModel(model, parallelism, group, quantise=False, **sizes)
    steps: list[Step] = []

    def measure(name: str, forward: Callable[[Recorder], tuple[list[Request], Tensor]]) -> list[Request]:
        recorder = Recorder(settings.layers, tick)
        start = time.perf_counter()
        requests, logits = forward(recorder)
        seconds = time.perf_counter() - start
        picks = [torch.cat(of_layer) for of_layer in recorder.picks]
        steps.append(Step(name, seconds, requests[0].prefix_hit, logits, torch.cat(recorder.positions), picks))
        return requests

    def prefill(name: str, model: SparseCpModel) -> list[Request]:
        prompt = settings.prompts[name]
        return measure(name, lambda recorder: model.prefill([prompt], logits="all", on_picks=recorder))

    def decode(recorder: Recorder) -> tuple[list[Request], Tensor]:
        logits = [steps[-1].logits[-1:]]
        for index in range(settings.decode_steps):
            chosen.append(forced[index] if forced else int(logits[-1].argmax()))
            logits.append(sparse.decode(running, chosen[-1:], on_picks=recorder))
        return running, torch.cat(logits[1:])

    chosen: list[int] = []
    sparse.release(prefill("first", sparse))
    running = prefill("second", sparse)
    sparse.release(measure("decode", decode))
    prefill("short", sparse)
    prefill("plain", plain)
    return steps, chosen
