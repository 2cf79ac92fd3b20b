"""The memory-bound ops: bytes that each must read and write, at decode and prefill row counts."""

from collections.abc import Callable, Iterator

import torch

from sparse_cp_ops import ops
from sparse_cp_ops.bench import inputs
from sparse_cp_ops.bench.cases import Builder, Case, Work
from sparse_cp_ops.bench.peers import Peers

HEADS, INDEX_HEADS = 128, 64


def _bf16(*shape: int, device: torch.device) -> torch.Tensor:
    return torch.randn(*shape, device=device).bfloat16()


def _positions(rows: int, device: torch.device) -> torch.Tensor:
    return torch.arange(rows, dtype=torch.int32, device=device)


def rope(rows: int) -> Builder:
    """The q of a layer: 128 heads, rotated in place inside the absorbed [L, H, 576] buffer."""

    def build(device: torch.device, _: Peers) -> Work:
        x = _bf16(rows, HEADS, 576, device=device)[..., 512:]
        positions, table = _positions(rows, device), inputs.cos_sin_cache(rows, device)
        return Work(lambda: ops.rope_(x, positions, table, True), rows * (HEADS * 64 * 2 * 2 + 256 + 4))

    return build


def quant(rows: int) -> Builder:
    """Indexer q and k of a layer: 64 heads."""

    def build(device: torch.device, _: Peers) -> Work:
        q, k = _bf16(rows, INDEX_HEADS, 128, device=device), _bf16(rows, 128, device=device)
        weights = torch.randn(rows, INDEX_HEADS, device=device)
        positions, table = _positions(rows, device), inputs.cos_sin_cache(rows, device)
        records = torch.empty(rows, 132, dtype=torch.uint8, device=device)
        return Work(
            lambda: ops.quant_q_k_cp(q, k, weights, positions, table, records, False, True, 0.01, "ue8m0"),
            rows * (INDEX_HEADS * (256 + 128 + 8) + 256 + 132 + 256 + 4),
        )

    return build


def pack(rows: int) -> Builder:
    """MLA records of a layer."""

    def build(device: torch.device, _: Peers) -> Work:
        latent, k_pe = _bf16(rows, 512, device=device), _bf16(rows, 64, device=device)
        positions, table = _positions(rows, device), inputs.cos_sin_cache(rows, device)
        records = torch.empty(rows, 656, dtype=torch.uint8, device=device)
        return Work(
            lambda: ops.pack_mla_kv(latent, k_pe, positions, table, records, True, "ue8m0"),
            rows * (1152 + 656 + 256 + 4),
        )

    return build


def write(rows: int) -> Builder:
    """Both records of every row into scattered pages."""

    def build(device: torch.device, _: Peers) -> Work:
        pages = -(-rows // 64)
        mla_records = torch.randint(0, 100, (rows, 656), dtype=torch.uint8, device=device)
        k_records = torch.randint(0, 100, (rows, 132), dtype=torch.uint8, device=device)
        mla_cache = torch.zeros(pages, 64, 656, dtype=torch.uint8, device=device)
        indexer_cache = torch.zeros(pages, 64 * 132, dtype=torch.uint8, device=device)
        table = torch.randperm(pages, device=device).int().unsqueeze(0)
        req_ids, positions = torch.zeros(rows, dtype=torch.int32, device=device), _positions(rows, device)
        return Work(
            lambda: ops.write_kv_cache(mla_records, k_records, req_ids, positions, table, mla_cache, indexer_cache),
            rows * (2 * 788 + 8),
        )

    return build


def dequantize(rows: int) -> Builder:
    """Random slots of a cache to bf16."""

    def build(device: torch.device, _: Peers) -> Work:
        tokens = max(64, -(-rows // 64) * 64)
        cache, _kv = inputs.mla_cache(tokens, device)
        slots = torch.randperm(tokens, device=device)[:rows]
        return Work(lambda: ops.dequantize_kv(cache, slots), rows * (656 + 1152 + 8))

    return build


def merge(rows: int) -> Builder:
    """Two partial states of 128 heads."""

    def build(device: torch.device, _: Peers) -> Work:
        outs = _bf16(2, rows, HEADS, 512, device=device)
        lses = torch.randn(2, rows, HEADS, device=device)
        return Work(lambda: ops.merge_attention_states(outs, lses), rows * HEADS * (3 * 1024 + 12))

    return build


def expand(rows: int) -> Builder:
    """The plan of 64 requests on rank 0 of 2; ``rows`` local rows."""

    def build(device: torch.device, _: Peers) -> Work:
        requests = min(64, rows)
        table = torch.tensor([[100, 2 * rows // requests]] * requests, dtype=torch.int32, device=device)
        total = 2 * rows // requests * requests
        return Work(
            lambda: ops.expand_cp_plan(table, 0, 2, "interleave", rows, total),
            rows * 16 + 2 * rows * 8 + total * 4 + requests * 8,
        )

    return build


def store(rows: int, reading: bool, pinned: bool) -> Builder:
    """``rows`` tokens in whole pages between the caches of a layer and a store."""

    def build(device: torch.device, _: Peers) -> Work:
        pages = max(1, rows // 64)
        where = {"device": "cpu", "pin_memory": True} if pinned and device.type == "cuda" else {"device": device}
        mla_cache = torch.zeros(pages, 64, 656, dtype=torch.uint8, device=device)
        indexer_cache = torch.zeros(pages, 64 * 132, dtype=torch.uint8, device=device)
        mla_store = torch.zeros(pages, 64, 656, dtype=torch.uint8, **where)
        indexer_store = torch.zeros(pages, 64 * 132, dtype=torch.uint8, **where)
        page_ids = torch.randperm(pages, device=device).int()
        slots = torch.arange(pages, device=device)
        if reading:
            return Work(
                lambda: ops.read_cache_store(mla_store, indexer_store, slots, page_ids, mla_cache, indexer_cache),
                (1.0 if pinned else 2.0) * pages * 64 * 788,
            )
        return Work(
            lambda: ops.write_cache_store(mla_cache, indexer_cache, page_ids, slots, mla_store, indexer_store),
            (1.0 if pinned else 2.0) * pages * 64 * 788,
        )

    return build


def small_cases(device_type: str) -> Iterator[Case]:
    """All of them at 1, 128, 8192 and (CUDA) 65,536 rows."""
    builders: list[tuple[str, Callable[[int], Builder]]] = [
        ("rope_", rope),
        ("quant_q_k_cp", quant),
        ("pack_mla_kv", pack),
        ("write_kv_cache", write),
        ("dequantize_kv", dequantize),
        ("merge_attention_states", merge),
        ("expand_cp_plan", expand),
        ("write_cache_store", lambda rows: store(rows, reading=False, pinned=False)),
        ("read_cache_store", lambda rows: store(rows, reading=True, pinned=False)),
    ]
    row_counts = (1, 128, 8192, 65536) if device_type == "cuda" else (1, 128, 8192)
    for op, builder in builders:
        for rows in row_counts:
            yield Case(op, f"{rows} rows", builder(rows), graph=True)
    if device_type == "cuda":
        yield Case(
            "write_cache_store", "65536 rows, pinned host", store(65536, reading=False, pinned=True), "host copy"
        )
        yield Case("read_cache_store", "65536 rows, pinned host", store(65536, reading=True, pinned=True), "host copy")
