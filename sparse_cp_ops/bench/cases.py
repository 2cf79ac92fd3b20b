"""What is measured: one builder an op, and the standard shapes."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sparse_cp_ops import ops
from sparse_cp_ops.bench import inputs, torch_versions
from sparse_cp_ops.bench.peers import Peers, Runners

SCALE_V32 = 0.135234  # softmax scale of DeepSeek-V3.2: 192^-0.5 * (0.1 ln 40 + 1)^2


@dataclass(frozen=True)
class Work:
    """A built case: the call, what it must move and compute at least, and what others do for the same result."""

    run: Callable[[], object]
    bytes_moved: float
    flop: float = 0.0
    others: dict[str, Runners] = field(default_factory=dict)


Builder = Callable[[torch.device, Peers], Work]


@dataclass(frozen=True)
class Case:
    """One row of the table. ``ceiling`` names the GEMM rate that bounds ``flop``; ``graph``: timed by graph replays."""

    op: str
    shape: str
    build: Builder
    ceiling: str = "copy"
    graph: bool = False


def sparse_mla(
    rows: int,
    tokens: int,
    heads: int,
    overlapping: bool = False,
    precision: str = "high",
    queries: int = 1,
    any_scales: bool = False,
    cache_tokens: int | None = None,
    requests: int = 1,
) -> Callable[[torch.device, Peers], Work]:
    """Attention of ``rows`` queries over 2048 selected keys each; ``queries`` of them are one decode step of a request.

    The rows belong to ``requests`` of ``tokens`` tokens. ``any_scales``: not only powers of two. ``cache_tokens``: room
    of the cache, if it is larger.
    """

    def build(device: torch.device, peers: Peers) -> Work:
        topk = min(2048, tokens)
        room = cache_tokens or requests * tokens
        cache, kv = inputs.mla_cache(room, device, any_scales)
        q = torch.randn(rows, heads, 576, device=device).bfloat16()
        indices = inputs.selected_positions(rows, tokens, topk, device, overlapping)
        block_table, req_ids, _ = inputs.batch(requests, rows // requests, room // requests, device)
        block_table = block_table[:, : tokens // inputs.PAGE_SIZE].contiguous()
        kv_lens = torch.full((rows,), tokens, dtype=torch.int32, device=device)
        pages = block_table[req_ids.long().unsqueeze(1), indices.long() // inputs.PAGE_SIZE]
        slots = pages.long() * inputs.PAGE_SIZE + indices.long() % inputs.PAGE_SIZE
        if device.type == "cuda":
            others = peers.sparse_mla(q, cache, slots.int(), kv, SCALE_V32, queries)
        else:
            others = {"PyTorch": [lambda: torch_versions.sparse_mla(q, cache, slots, SCALE_V32)]}
        return Work(
            lambda: ops.sparse_mla_fp8_cp(
                q, cache, indices, block_table, req_ids, kv_lens, SCALE_V32, precision, batch_invariant=rows > 512
            ),
            rows * (heads * (576 + 512) * 2 + topk * 4) + min(requests * tokens, rows * topk) * 656,
            2.0 * rows * heads * topk * 1088,
            others,
        )

    return build


def index_queries(rows: int, heads: int, precision: str, device: torch.device) -> Tensor:
    """uint8 [rows, heads, 128]; within the range of ``precision``."""
    if precision == "fp32":
        return inputs.e4m3((rows, heads, 128), device)
    q = (torch.randn(rows, heads, 128, device=device) / 6).clamp(-0.875, 0.875)
    return q.to(torch.float8_e4m3fn).view(torch.uint8)


def indexer(
    rows: int, tokens: int, heads: int, op: str, precision: str = "fp32", scores: str = "random"
) -> Callable[[torch.device, Peers], Work]:
    """Scores alone, or scores and exact top-k 2048, of the last ``rows`` tokens of one request.

    ``scores``: "random", or what is worst for a threshold: "equal", or "rising" and "falling" along the text.
    """

    def build(device: torch.device, peers: Peers) -> Work:
        topk = 2048
        cache, keys, scales = inputs.indexer_cache(tokens, device)
        q8 = index_queries(rows, heads, precision, device)
        weights = torch.randn(rows, heads, device=device) / 100
        block_table, req_ids, kv_lens = inputs.batch(1, rows, tokens, device)
        arguments = (q8, weights, cache, block_table, req_ids, kv_lens)
        slots = (block_table[0].long().unsqueeze(1) * 64 + torch.arange(64, device=device)).flatten()
        if scores != "random":
            inputs.make_keys_alike(cache, slots, scores)
            weights.abs_()
        pairs = float(kv_lens.sum(dtype=torch.int64))
        if scores != "random":  # the others' keys are the random ones
            others: dict[str, Runners] = {}
        elif device.type == "cuda":
            others = peers.indexer(q8, keys[slots], scales[slots], weights, kv_lens, topk)
        else:
            others = {"PyTorch": [lambda: torch_versions.scores(q8, weights, keys[slots], scales[slots])]}
        if op == "indexer_scores_ragged_cp":
            others = {name: runners for name, runners in others.items() if len(runners) == 1}
            return Work(
                lambda: ops.indexer_scores_ragged_cp(*arguments, tokens, precision),
                rows * heads * 132 + tokens * 132 + rows * tokens * 4,
                2.0 * pairs * heads * 128,
                others,
            )
        return Work(
            lambda: ops.indexer_topk_ragged_cp(*arguments, topk, 0, precision),
            rows * heads * 132 + tokens * 132 + rows * topk * 4,
            2.0 * pairs * heads * 128,
            {name: runners for name, runners in others.items() if len(runners) == 2},
        )

    return build


def indexer_decode(requests: int, tokens: int, precision: str = "fp32") -> Callable[[torch.device, Peers], Work]:
    """Scores and exact top-k 2048 of two queries a request, ``tokens`` keys each, 64 heads."""

    def build(device: torch.device, peers: Peers) -> Work:
        topk, heads, rows = 2048, 64, 2 * requests
        cache, _, _ = inputs.indexer_cache(requests * tokens, device)
        q8 = index_queries(rows, heads, precision, device)
        weights = torch.randn(rows, heads, device=device) / 100
        block_table, req_ids, kv_lens = inputs.batch(requests, 2, tokens, device)
        return Work(
            lambda: ops.indexer_topk_ragged_cp(q8, weights, cache, block_table, req_ids, kv_lens, topk, 0, precision),
            rows * heads * 132 + requests * tokens * 132 + rows * topk * 4,
            2.0 * rows * tokens * heads * 128,
            peers.indexer_decode(q8, cache, weights, block_table, kv_lens, topk),
        )

    return build


def attention_cases(device_type: str) -> Iterator[Case]:
    """Sparse MLA: the prefill and decode shapes of docs/kernels/sparse_mla.md."""
    op = "sparse_mla_fp8_cp"
    if device_type == "cpu":
        for heads in (16, 128):
            yield Case(op, f"256 x 8K, H={heads}", sparse_mla(256, 8192, heads), "fp32")
        return
    for rows, tokens, heads in [
        (1024, 32768, 128),
        (4096, 8192, 128),
        (4096, 32768, 128),
        (4096, 131072, 128),
        (8192, 32768, 128),
        (4096, 32768, 64),
        (4096, 32768, 32),
        (4096, 32768, 16),
        (4096, 32768, 8),
    ]:
        yield Case(op, f"{rows} x {tokens // 1024}K, H={heads}", sparse_mla(rows, tokens, heads), "bf16")
    yield Case(op, "4096 x 32K, H=128, overlapping", sparse_mla(4096, 32768, 128, overlapping=True), "bf16")
    yield Case(op, "4096 x 32K, H=128, any scales", sparse_mla(4096, 32768, 128, any_scales=True), "bf16")
    build = sparse_mla(4096, 32768, 128, any_scales=True, cache_tokens=2**20)
    yield Case(op, "4096 x 32K of a cache of 1M, H=128, any scales", build, "bf16")
    for rows, tokens, heads in [(4096, 8192, 128), (4096, 32768, 128), (4096, 131072, 128), (4096, 32768, 64)]:
        build = sparse_mla(rows, tokens, heads, precision="fp8")
        yield Case(op, f"{rows} x {tokens // 1024}K, H={heads}, fp8", build, "fp8")
    build = sparse_mla(4096, 32768, 128, precision="fp8", any_scales=True)
    yield Case(op, "4096 x 32K, H=128, any scales, fp8", build, "fp8")
    for heads in (128, 64, 32, 16, 8):
        for rows in (1, 4, 16, 64, 128, 256):
            yield Case(
                op, f"decode {rows} rows, H={heads}", sparse_mla(rows, 8192, heads, requests=rows), "bf16", graph=True
            )
    for heads in (128, 64):
        for rows in (64, 128, 256):
            build = sparse_mla(rows, 8192, heads, precision="fp8", requests=rows)
            yield Case(op, f"decode {rows} rows, H={heads}, fp8", build, "fp8", graph=True)
    for requests in (1, 4, 16, 64, 128, 256):
        build = sparse_mla(2 * requests, 8192, 128, queries=2, requests=requests)
        yield Case(op, f"decode {requests} x 2 rows, H=128", build, "bf16", graph=True)


def indexer_cases(device_type: str) -> Iterator[Case]:
    """Scores alone and with top-k."""
    if device_type == "cpu":
        for op in ("indexer_scores_ragged_cp", "indexer_topk_ragged_cp"):
            for heads in (16, 64):
                yield Case(op, f"256 x 8K, Hi={heads}", indexer(256, 8192, heads, op), "fp32")
        return
    shapes = [(2048, 8192), (4096, 32768), (8192, 8192), (8192, 65536), (8192, 131072)]
    for rows, tokens in shapes[:3]:
        op = "indexer_scores_ragged_cp"
        yield Case(op, f"{rows} x {tokens // 1024}K, Hi=64", indexer(rows, tokens, 64, op), "fp8")
    op = "indexer_topk_ragged_cp"
    for precision in ("fp32", "f16"):
        for rows, tokens in shapes:
            shape = f"{rows} x {tokens // 1024}K, Hi=64, {precision}"
            yield Case(op, shape, indexer(rows, tokens, 64, op, precision), "fp8")
    yield Case(op, "4096 x 32K, Hi=32, fp32", indexer(4096, 32768, 32, op), "fp8")
    for scores in ("equal", "rising", "falling"):
        shape = f"4096 x 32K, Hi=64, fp32, {scores} scores"
        yield Case(op, shape, indexer(4096, 32768, 64, op, scores=scores), "fp8")
    for precision in ("fp32", "f16"):
        for requests in (1, 8, 64):
            shape = f"decode {requests} x 2 rows, 64K keys, {precision}"
            yield Case(op, shape, indexer_decode(requests, 65536, precision), "fp8", graph=True)


def all_cases(device_type: str) -> Iterator[Case]:
    """Every case of a device type, op after op."""
    from sparse_cp_ops.bench.small_cases import small_cases

    yield from attention_cases(device_type)
    yield from indexer_cases(device_type)
    yield from small_cases(device_type)
