"""What each rank of cp_scaling.py measures: one attention layer, its gathers, and a profile of it."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from rank_process import join_group
from torch import Tensor

from sparse_cp_ops.bench.report import conditions
from sparse_cp_ops.config import CPRotateMethod, ParallelismConfig, PrefillCPConfig
from sparse_cp_ops.context_parallel import CpGroup, init_user_buffers_environment
from sparse_cp_ops.context_parallel.collectives import BlockGather, _all_gather_single, _registered_buffer
from sparse_cp_ops.kv_cache import INDEX_RECORD_BYTES, MLA_RECORD_BYTES, PagedKvCache
from sparse_cp_ops.nn import AttentionInputs, MlaAttention, MlaConfig, SparseMlaImpl, get_mla_impl, sparse_mla
from sparse_cp_ops.nn.mla_config import YarnScaling, mla_softmax_scale

# One GPU runs a longer batch in chunks: the activations of 128K tokens of DeepSeek-V3.2 take some 60 GB.
CHUNK_TOKENS = 131072
# Repeats fill about this long; a median of three is the least.
SECONDS_A_MEASUREMENT = 0.5
KV_LATENT, ROPE_DIM, INDEX_DIM = 512, 64, 128
BORROWER = -1  # of the registered buffer: no model


@dataclass(frozen=True)
class Settings:
    """What the ranks are to measure."""

    ranks: int
    device: str
    batches: tuple[tuple[int, int], ...]  # (new, prefix) tokens of one request
    profiled: tuple[int, int]
    deadline: float  # time.time() after which nothing new is begun
    folder: str


def model(device: str, max_positions: int) -> MlaConfig:
    """DeepSeek-V3.2's attention layer; on the CPU a small one, to run the script there."""
    yarn = YarnScaling(factor=40.0, original_max_position_embeddings=4096, mscale=1.0, mscale_all_dim=1.0)
    if device == "cuda":
        sizes = {"hidden_size": 7168, "num_heads": 128, "q_lora_rank": 1536, "index_n_heads": 64, "index_topk": 2048}
        heads = {"qk_nope_head_dim": 128, "v_head_dim": 128}
    else:
        sizes = {"hidden_size": 128, "num_heads": 8, "q_lora_rank": 64, "index_n_heads": 8, "index_topk": 64}
        heads = {"qk_nope_head_dim": 32, "v_head_dim": 32}
    scale = mla_softmax_scale(heads["qk_nope_head_dim"] + ROPE_DIM, yarn)
    return MlaConfig(**sizes, **heads, softmax_scale=scale, num_layers=1, max_positions=max_positions, yarn=yarn)


class SilentGather(BlockGather):
    """Gathers once and then leaves the blocks as they are: a layer whose communication takes no time.

    The rows stay those of all ranks, so that the top-k and the attention do the same work as ever.
    """

    kept: ClassVar[Tensor | None] = None

    def __init__(
        self, group: CpGroup, block_bytes: int, device: torch.device, max_registered_bytes: int, borrower: int
    ) -> None:
        super().__init__(group, block_bytes, device, 0, borrower)
        self._silent = SilentGather.kept is not None
        if SilentGather.kept is not None:
            self._blocks = SilentGather.kept
            self.own = self._blocks[group.rank]
        SilentGather.kept = self._blocks

    def start(self, overlap: bool) -> None:
        if not self._silent:
            super().start(overlap)


@contextlib.contextmanager
def no_communication() -> Iterator[None]:
    """Layers gather once, then never again."""
    SilentGather.kept = None
    sparse_mla.BlockGather = SilentGather  # type: ignore[misc]
    yield
    sparse_mla.BlockGather = BlockGather  # type: ignore[misc]
    SilentGather.kept = None


class RankBench:
    """The layer with its weights, its groups, and how this rank tells time."""

    def __init__(self, rank: int, settings: Settings) -> None:
        assert dist.group.WORLD is not None
        self.rank, self.settings = rank, settings
        self.device = torch.device("cuda", rank) if settings.device == "cuda" else torch.device("cpu")
        self.config = model(settings.device, max(163840, *map(sum, settings.batches)))
        torch.manual_seed(0)  # the same weights everywhere
        self.layer = MlaAttention(self.config, 0, device=self.device, dtype=torch.bfloat16).requires_grad_(False)
        self.plain: dist.ProcessGroup = dist.group.WORLD
        self.registered: dist.ProcessGroup | None = None
        group = dist.new_group()
        if isinstance(group, dist.ProcessGroup) and init_user_buffers_environment(
            self.parallelism("zigzag", CPRotateMethod.ALL_GATHER), group, self.device
        ):
            self.registered = group

    def parallelism(self, split: str, method: CPRotateMethod) -> ParallelismConfig:
        """Context parallelism over all ranks for every batch."""
        cp = PrefillCPConfig(method=method, split=split, min_tokens=0, min_kv_work=0)
        size, rank = self.settings.ranks, self.rank
        return ParallelismConfig(
            tp_size=size, tp_rank=rank, world_size=size, world_rank=rank, prefill_cp_config=cp, use_ub_comm=True
        )

    def of_all_ranks(self, value: float) -> list[float]:
        """The value of every rank, on every rank; also a barrier."""
        mine = torch.tensor([value], dtype=torch.float64, device=self.device)
        everybody = torch.empty(self.settings.ranks, dtype=torch.float64, device=self.device)
        _all_gather_single(everybody, mine)
        return everybody.tolist()  # type: ignore[no-any-return]

    def has_time(self) -> bool:
        """Whether something new may be begun; rank 0 decides for all."""
        return self.of_all_ranks(time.time())[0] < self.settings.deadline

    def milliseconds(self, run: Callable[[], object]) -> list[float]:
        """Median time of ``run`` on every rank; all of them start together and repeat it equally often."""
        run()
        once = max(self.of_all_ranks(self._time(run, 1)[0]))
        repeats = min(20, max(3, round(SECONDS_A_MEASUREMENT * 1000 / once)))
        return self.of_all_ranks(statistics.median(self._time(run, repeats)))

    def _time(self, run: Callable[[], object], repeats: int) -> list[float]:
        self.of_all_ranks(0.0)
        if self.device.type == "cpu":
            times = []
            for _ in range(repeats):
                start = time.perf_counter()
                run()
                times.append((time.perf_counter() - start) * 1000)
            return times
        events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
        events[0].record()
        for event in events[1:]:
            run()
            event.record()
        torch.cuda.synchronize()
        return [a.elapsed_time(b) for a, b in itertools.pairwise(events)]

    def clock(self) -> float:
        """SM clock in MHz; 0 where nothing can read it."""
        if self.device.type == "cpu" or importlib.util.find_spec("pynvml") is None:
            return 0.0
        with contextlib.suppress(Exception):  # a driver that does not tell is no reason to lose the measurements
            return float(torch.cuda.clock_rate(self.device))
        return 0.0


class Batch:
    """One request of ``tokens`` new tokens behind a cached prefix, whole on this rank and shared by all."""

    def __init__(self, bench: RankBench, tokens: int, prefix: int) -> None:
        self.bench, self.tokens, self.prefix = bench, tokens, prefix
        config, device = bench.config, bench.device
        torch.manual_seed(tokens)
        pages = -(-(prefix + tokens) // config.page_size)
        self.cache = PagedKvCache(1, pages, config.page_size, device)
        self.table = torch.randperm(pages, device=device).int().unsqueeze(0)
        impl = get_mla_impl(config, ParallelismConfig())
        if prefix:
            hidden = torch.randn(prefix, config.hidden_size, device=device, dtype=torch.bfloat16)
            bench.layer(hidden, self.cache, impl, impl.prepare(self.inputs(prefix, 0)))
        self.hidden = torch.randn(tokens, config.hidden_size, device=device, dtype=torch.bfloat16)

    def inputs(self, new: int, prefix: int) -> AttentionInputs:
        return AttentionInputs(True, *(torch.tensor([n], dtype=torch.int32) for n in (new, prefix)), self.table)

    def whole(self) -> Callable[[], Tensor]:
        """The layer on this rank alone, in chunks of at most CHUNK_TOKENS."""
        layer, impl = self.bench.layer, get_mla_impl(self.bench.config, ParallelismConfig())

        def chunk(start: int) -> Tensor:
            rows = self.hidden[start : start + CHUNK_TOKENS]
            out: Tensor = layer(rows, self.cache, impl, impl.prepare(self.inputs(len(rows), self.prefix + start)))[0]
            return out

        def run() -> Tensor:
            if self.tokens <= CHUNK_TOKENS:
                return chunk(0)
            outs = torch.empty_like(self.hidden)
            for start in range(0, self.tokens, CHUNK_TOKENS):
                outs[start : start + CHUNK_TOKENS] = chunk(start)
            return outs

        return run

    def shared(
        self, split: str, method: CPRotateMethod, group: dist.ProcessGroup
    ) -> tuple[Callable[[], Tensor], Tensor]:
        """The layer on this rank's rows, and which tokens those are (-1: pads)."""
        layer = copy.copy(self.bench.layer)  # the same parameters
        layer.group = CpGroup.of(group)
        impl: SparseMlaImpl = get_mla_impl(self.bench.config, self.bench.parallelism(split, method), group)
        plan = impl.prepare(self.inputs(self.tokens, self.prefix))
        rows = self.hidden[plan.token_ids.clamp(min=0)]
        return lambda: layer(rows, self.cache, impl, plan)[0], plan.token_ids


def measure_layer(bench: RankBench, tokens: int, prefix: int, report: Callable[[dict[str, Any]], None]) -> None:
    """Times of the layer in all its variants; each is reported as soon as it is there."""
    batch = Batch(bench, tokens, prefix)
    overlap, in_line = CPRotateMethod.ALL_GATHER_WITH_OVERLAP, CPRotateMethod.ALL_GATHER
    cuda = bench.device.type == "cuda"
    row: dict[str, Any] = {"tokens": tokens, "prefix": prefix}

    def measured(name: str, run: Callable[[], object]) -> None:
        row[name] = bench.milliseconds(run)
        report(row)

    def peak(run: Callable[[], Tensor], for_comparison: Sequence[Tensor] = ()) -> tuple[Tensor, float]:
        if cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        out = run()
        peak_bytes = torch.cuda.max_memory_allocated() - sum(x.nbytes for x in for_comparison) if cuda else 0
        return out, peak_bytes / 2**30

    run = batch.whole()
    expected, gib = peak(run)
    row["one_gpu_gib"] = max(bench.of_all_ranks(gib))
    measured("one_gpu_ms", run)
    if not bench.has_time():
        return

    run, token_ids = batch.shared("zigzag", overlap, bench.plain)
    out, gib = peak(run, [batch.hidden, expected])
    row["rank_gib"] = max(bench.of_all_ranks(gib))
    mine = token_ids >= 0
    reference = expected[token_ids[mine]].float()
    row["difference"] = max(bench.of_all_ranks(float((out[mine].float() - reference).norm() / reference.norm())))
    del expected, reference, out
    measured("zigzag_ms", run)
    row["clock_mhz"] = bench.of_all_ranks(bench.clock())
    variants: list[tuple[str, str, CPRotateMethod, dist.ProcessGroup | None, bool]] = [
        ("zigzag_silent_ms", "zigzag", overlap, bench.plain, True),
        ("registered_ms", "zigzag", overlap, bench.registered, False),
        ("in_line_ms", "zigzag", in_line, bench.plain, False),
        ("interleave_ms", "interleave", overlap, bench.plain, False),
        ("interleave_silent_ms", "interleave", overlap, bench.plain, True),
    ]
    for name, split, method, group, silent in variants:
        if group is None or not bench.has_time():
            continue
        with no_communication() if silent else contextlib.nullcontext():
            measured(name, batch.shared(split, method, group)[0])
    if bench.has_time() and not prefix:
        measure_gathers(bench, tokens, row, report)


def measure_gathers(
    bench: RankBench, tokens: int, row: dict[str, Any], report: Callable[[dict[str, Any]], None]
) -> None:
    """The one gather of the records alone, and three of the bf16 states that it stands for."""
    rows, ranks, device = -(-tokens // bench.settings.ranks), bench.settings.ranks, bench.device
    block = (rows * (MLA_RECORD_BYTES + INDEX_RECORD_BYTES) + 15) // 16 * 16
    row["block_bytes"] = block
    widths = (KV_LATENT, ROPE_DIM, INDEX_DIM)
    own = [torch.randn(rows, width, device=device).bfloat16() for width in widths]
    everybody = [torch.empty(ranks * rows, width, dtype=torch.bfloat16, device=device) for width in widths]

    def three() -> None:
        for gathered, mine in zip(everybody, own, strict=True):
            _all_gather_single(gathered, mine)

    def one(group: dist.ProcessGroup) -> Callable[[], object]:
        cp_group = CpGroup.of(group)
        registered = _registered_buffer(cp_group)
        memory = registered.take(ranks * block, BORROWER) if registered is not None else None
        if memory is None:
            memory = torch.zeros(ranks * block, dtype=torch.uint8, device=device)
        if registered is not None:
            registered.release(BORROWER)
        return lambda: _all_gather_single(memory, memory.view(ranks, block)[bench.rank], group=group)

    row["packed_gather_ms"] = bench.milliseconds(one(bench.plain))
    row["bf16_gathers_ms"] = bench.milliseconds(three)
    if bench.registered is not None:
        row["registered_gather_ms"] = bench.milliseconds(one(bench.registered))
    report(row)


def profile_layer(bench: RankBench, tokens: int, prefix: int) -> None:
    """One forward of the layer after a warm one, for the time line: ``folder/timeline-<rank>.json``."""
    run, _ = Batch(bench, tokens, prefix).shared("zigzag", CPRotateMethod.ALL_GATHER_WITH_OVERLAP, bench.plain)
    cuda = bench.device.type == "cuda"
    activity = torch.profiler.ProfilerActivity.CUDA if cuda else torch.profiler.ProfilerActivity.CPU
    run()
    bench.of_all_ranks(0.0)
    with torch.profiler.profile(activities=[activity]) as profile:
        for _ in range(2):  # the profiler's own start is in the first one
            bench.of_all_ranks(0.0)
            start = time.time_ns()
            run()
            if cuda:
                torch.cuda.synchronize()
    assert profile.profiler is not None
    assert profile.profiler.kineto_results is not None
    wanted = torch.autograd.DeviceType.CUDA if cuda else torch.autograd.DeviceType.CPU
    events = [
        (event.name(), event.start_ns(), event.duration_ns(), event.device_resource_id())
        for event in profile.profiler.kineto_results.events()
        if event.device_type() == wanted and event.start_ns() >= start
    ]
    Path(bench.settings.folder, f"timeline-{bench.rank}.json").write_text(json.dumps(events))


@torch.inference_mode()
def run_rank(rank: int, settings: Settings, messages: Connection | None) -> None:
    """One process: rank 0 sends what all of them measured."""
    torch.set_num_threads(1)
    join_group(rank, settings.ranks, settings.folder, settings.device)
    bench = RankBench(rank, settings)

    def send(kind: str, content: dict[str, Any]) -> None:
        if messages is not None:
            messages.send((kind, content))

    nccl = ".".join(map(str, torch.cuda.nccl.version())) if settings.device == "cuda" else "none (gloo)"
    buffers = "in place" if bench.registered is not None else "not available"
    facts = conditions(bench.device)
    facts.pop("SM clock after the run", None)  # nothing has run yet; each row has its own
    send("conditions", {**facts, "NCCL": nccl, "registered buffers": buffers})
    for tokens, prefix in settings.batches:
        if bench.has_time():
            measure_layer(bench, tokens, prefix, lambda row: send("row", row))
        if (tokens, prefix) == settings.profiled and bench.has_time():
            profile_layer(bench, tokens, prefix)
            bench.of_all_ranks(0.0)
            send("timeline", {"tokens": tokens})
    bench.of_all_ranks(0.0)
    dist.destroy_process_group()


def timelines(folder: Path, ranks: int) -> list[Sequence[tuple[str, int, int, int]]]:
    """What :func:`profile_layer` left: (name, start in ns, duration in ns, stream) of every rank."""
    return [json.loads((folder / f"timeline-{rank}.json").read_text()) for rank in range(ranks)]
