"""How sparse_mla_fp8_cp is called: views, sizes, wrong arguments, compilation, instruction sets, threads."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from attention_cases import SCALE, AttentionCase, assert_same_bits, assert_within_bounds, random_case
from builders import random_mla_cache
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from sparse_cp_ops import ops, reference

OP = torch.ops.sparse_cp_ops.sparse_mla_fp8_cp.default
ROWS = [(0, 200, 100), (1, 150, 128), (-1, 0, 0), (0, 64, 7), (1, 149, 65)]


def test_strided_views_are_read_in_place(device: str) -> None:
    case = random_case(ROWS, heads=16).to(device)
    expected = ops.sparse_mla_fp8_cp(*case.tensors, SCALE)
    assert case.block_table is not None
    rows = len(ROWS)
    fused = torch.full((rows, 19, 700), torch.nan, device=device).bfloat16()
    fused[:, 2:18, 64:640] = case.q
    by_head = case.q.transpose(0, 1).contiguous().transpose(0, 1)
    wide = torch.full((rows, 200), 3, dtype=torch.int32, device=device)
    wide[:, 8:136] = case.indices
    table = torch.zeros(2, 50, dtype=torch.int32, device=device)
    table[:, : case.block_table.shape[1]] = case.block_table
    layers = torch.full((case.kv_cache.shape[0], 3, 64, 656), 0x7F, dtype=torch.uint8, device=device)
    layers[:, 1] = case.kv_cache
    views = [
        replace(case, q=fused[:, 2:18, 64:640]),
        replace(case, q=by_head),
        replace(case, indices=wide[:, 8:136]),
        replace(case, block_table=table[:, : case.block_table.shape[1]]),
        replace(case, kv_cache=layers[:, 1]),
    ]
    for view in views:
        assert_same_bits(ops.sparse_mla_fp8_cp(*view.tensors, SCALE), expected)
    one_row = case.rows([1])
    broadcast = replace(case.rows([1, 1, 1]), q=one_row.q.expand(3, 16, 576), indices=one_row.indices.expand(3, 128))
    out, lse = ops.sparse_mla_fp8_cp(*broadcast.tensors, SCALE)
    assert_same_bits((out, lse), (expected[0][[1, 1, 1]], expected[1][[1, 1, 1]]))


def test_empty_inputs(device: str) -> None:
    case = random_case(ROWS).to(device)
    assert case.block_table is not None
    out, lse = ops.sparse_mla_fp8_cp(*case.rows([]).tensors, SCALE)
    assert out.shape == (0, 8, 512)
    assert lse.shape == (0, 8)
    slots = replace(case, block_table=None, req_ids=None, kv_lens=None)
    for nothing in (
        replace(case, indices=case.indices[:, :0]),
        replace(case, kv_cache=case.kv_cache[:0]),
        replace(case, block_table=case.block_table[:0]),
        replace(case, block_table=case.block_table[:, :0]),
        replace(slots, kv_cache=case.kv_cache[:0]),
    ):
        out, lse = ops.sparse_mla_fp8_cp(*nothing.tensors, SCALE)
        assert out.shape == (5, 8, 512)
        assert out.eq(0).all()
        assert lse.isneginf().all()


def untouched_zeros(shape: tuple[int, ...], device: str) -> Tensor:
    """Zeros whose pages the CPU maps only when they are written (calloc), so that huge caches cost nothing."""
    if device == "cpu":
        return torch.from_numpy(np.zeros(shape, dtype=np.uint8))
    return torch.zeros(shape, dtype=torch.uint8, device=device)


def test_cache_above_2_gib(device: str) -> None:
    """Byte offsets need 64 bits from slot 3,273,604 on: the last pages of a large cache, in both index forms."""
    small = random_case([(0, 900, 128), (1, 500, 60)], heads=16, page_size=128)
    assert small.block_table is not None
    expected = ops.sparse_mla_fp8_cp(*small.to(device).tensors, SCALE)
    pages = 2**31 // (128 * 656) + 100
    cache = untouched_zeros((pages, 128, 656), device)
    first = pages - small.kv_cache.shape[0]
    assert first * 128 > 3_273_604
    cache[first:] = small.kv_cache.to(device)
    table = torch.where(small.block_table >= 0, small.block_table + first, -1)
    large = replace(small, block_table=table)
    paged = replace(large.to(device), kv_cache=cache)
    assert_same_bits(ops.sparse_mla_fp8_cp(*paged.tensors, SCALE), expected)
    slots = small.with_slots().indices
    slots = torch.where(slots >= 0, slots + first * 128, -1).to(device)
    physical = replace(paged, indices=slots, block_table=None, req_ids=None, kv_lens=None)
    assert_same_bits(ops.sparse_mla_fp8_cp(*physical.tensors, SCALE), expected)


def test_70000_rows(device: str) -> None:
    """More rows than a grid's y and z dimensions hold: 70 different rows, a thousand times each."""
    case = random_case([(row % 3, 1 + 5 * row, min(64, row)) for row in range(70)], heads=8, width=64)
    many = case.rows(torch.arange(70).repeat(1000)).to(device)
    out, lse = ops.sparse_mla_fp8_cp(*many.tensors, SCALE)
    assert_within_bounds(out[:70], lse[:70], *reference.sparse_mla_fp8_cp(*case.tensors, SCALE))
    assert torch.equal(out.view(1000, 70, 8, 512), out[:70].expand(1000, 70, 8, 512))
    assert torch.equal(lse.view(1000, 70, 8), lse[:70].expand(1000, 70, 8))


def test_opcheck(device: str) -> None:
    case = random_case(ROWS).to(device)
    torch.library.opcheck(OP, (*case.tensors, SCALE, "high", True))
    slots = replace(case, block_table=None, req_ids=None, kv_lens=None)
    torch.library.opcheck(OP, (*slots.tensors, SCALE, "high", False))


@pytest.mark.parametrize("physical", [False, True])
def test_compiles_once_for_all_lengths(device: str, physical: bool) -> None:
    counter = CompileCounter()
    torch.compiler.reset()
    compiled = torch.compile(ops.sparse_mla_fp8_cp, fullgraph=True, backend=counter)
    for length in range(2, 52):
        case = random_case([(row % 2, 10 + row + length, 10) for row in range(length)], width=64)
        case = (case.with_slots() if physical else case).to(device)
        assert_same_bits(compiled(*case.tensors, SCALE), ops.sparse_mla_fp8_cp(*case.tensors, SCALE))
    assert counter.frame_count - 1 <= 2  # recompiles


def test_wrong_types() -> None:
    case = random_case(ROWS)
    arguments: dict[str, object] = dict(zip(case.__dataclass_fields__, case.tensors, strict=True))
    arguments |= {"softmax_scale": SCALE, "precision": "high", "batch_invariant": True}
    for name, value, message in [
        ("q", [1.0], r"q: expected a torch\.Tensor, got list"),
        ("indices", None, r"indices: expected a torch\.Tensor, got NoneType"),
        ("req_ids", [0], r"req_ids: expected a torch\.Tensor, got list"),
        ("softmax_scale", "1", "softmax_scale: expected float, got str"),
        ("precision", 8, "precision: expected str, got int"),
        ("batch_invariant", 1, "batch_invariant: expected bool, got int"),
    ]:
        with pytest.raises(TypeError, match=message):
            ops.sparse_mla_fp8_cp(**arguments | {name: value})  # type: ignore[arg-type]


def misaligned(cache: Tensor) -> Tensor:
    raw = torch.zeros(cache.numel() + 1, dtype=torch.uint8, device=cache.device)
    return raw[1:].view(cache.shape)


WRONG: list[tuple[str, Callable[[Tensor], Tensor | None], str]] = [
    ("q", lambda t: t[0], "q: expected 3 dimensions, got 2"),
    ("q", lambda t: t.float(), "q: expected dtype bfloat16, got float32"),
    ("q", lambda t: t[..., :512], r"q: expected shape \[\*, \*, 576\], got \[5, 8, 512\]"),
    ("q", lambda t: t[:, :6], "q: expected 8, 16, 32, 64 or 128 heads, got 6"),
    ("q", lambda t: t.repeat(1, 9, 1)[:, :66], "q: expected 8, 16, 32, 64 or 128 heads, got 66"),
    ("q", lambda t: t.mT.contiguous().mT, "q: expected a contiguous last dimension, got stride 8"),
    ("kv_cache", lambda t: t.view(-1, 656), "kv_cache: expected 3 dimensions, got 2"),
    ("kv_cache", lambda t: t.view(torch.int8), "kv_cache: expected dtype uint8, got int8"),
    ("kv_cache", lambda t: t[..., :576], r"kv_cache: expected shape \[\*, \*, 656\]"),
    ("kv_cache", lambda t: t[:, :48].contiguous(), "kv_cache: expected a page size of 16, 32, 64 or 128, got 48"),
    ("kv_cache", lambda t: t[:, ::2], "kv_cache: expected records 656 bytes apart, got stride 1312"),
    ("kv_cache", lambda t: t.mT.contiguous().mT, "kv_cache: expected a contiguous last dimension"),
    ("kv_cache", misaligned, "kv_cache: expected data aligned to 16 bytes"),
    ("indices", lambda t: t[0], "indices: expected 2 dimensions, got 1"),
    ("indices", lambda t: t.long(), "indices: expected dtype int32, got int64"),
    ("indices", lambda t: t[:4], r"indices: expected shape \[5, \*\], got \[4, 128\]"),
    ("indices", lambda t: t[:, :100], "indices: expected a width that is a multiple of 64"),
    ("indices", lambda t: t.t().contiguous().t(), "indices: expected a contiguous last dimension"),
    ("block_table", lambda t: t[0], "block_table: expected 2 dimensions, got 1"),
    ("block_table", lambda t: t.long(), "block_table: expected dtype int32, got int64"),
    ("block_table", lambda t: t.t().contiguous().t(), "block_table: expected a contiguous last dimension"),
    ("req_ids", lambda t: t.long(), "req_ids: expected dtype int32, got int64"),
    ("req_ids", lambda t: t[:3], r"req_ids: expected shape \[5\], got \[3\]"),
    ("req_ids", lambda t: t.repeat_interleave(2)[::2], "req_ids: expected a contiguous tensor"),
    ("kv_lens", lambda t: t.long(), "kv_lens: expected dtype int32, got int64"),
    ("kv_lens", lambda t: t[:, None], "kv_lens: expected 1 dimensions, got 2"),
    ("block_table", lambda _: None, "expected all three .* or none .* got no block_table, req_ids, kv_lens"),
    ("req_ids", lambda _: None, "expected all three .* or none .* got block_table, no req_ids, kv_lens"),
    ("kv_lens", lambda _: None, "expected all three .* or none .* got block_table, req_ids, no kv_lens"),
]


@pytest.mark.parametrize(("name", "spoil", "message"), WRONG, ids=[f"{name}-{i}" for i, (name, *_) in enumerate(WRONG)])
def test_wrong_tensors_are_named(
    device: str, name: str, spoil: Callable[[Tensor], Tensor | None], message: str
) -> None:
    case = random_case(ROWS).to(device)
    with pytest.raises(ValueError, match=message):
        ops.sparse_mla_fp8_cp(*replace(case, **{name: spoil(getattr(case, name))}).tensors, SCALE)


def test_wrong_numbers_and_gradients(device: str) -> None:
    case = random_case(ROWS).to(device)
    for scale, precision, message in [
        (float("nan"), "high", "softmax_scale: expected a finite number, got nan"),
        (float("inf"), "high", "softmax_scale: expected a finite number, got inf"),
        (1.0, "bf16", 'precision: expected "high" or "fp8", got "bf16"'),
    ]:
        with pytest.raises(ValueError, match=message):
            ops.sparse_mla_fp8_cp(*case.tensors, scale, precision)
    wanted = replace(case, q=case.q.requires_grad_())
    with pytest.raises(RuntimeError, match="q requires grad"):
        ops.sparse_mla_fp8_cp(*wanted.tensors, SCALE)
    with torch.no_grad():
        ops.sparse_mla_fp8_cp(*wanted.tensors, SCALE)


@pytest.mark.cuda
def test_wrong_device_is_named() -> None:
    case = random_case(ROWS)
    with pytest.raises(ValueError, match="kv_cache: expected device cuda:0"):
        ops.sparse_mla_fp8_cp(*replace(case.to("cuda"), kv_cache=case.kv_cache).tensors, SCALE)


def test_value_checks(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """SPARSE_CP_OPS_CHECK=1 names the request, position and value that are skipped otherwise."""
    monkeypatch.setenv("SPARSE_CP_OPS_CHECK", "1")
    case = random_case(ROWS)
    assert case.block_table is not None
    ops.sparse_mla_fp8_cp(*case.to(device).tensors, SCALE)
    ops.sparse_mla_fp8_cp(*case.with_slots().to(device).tensors, SCALE)
    position = int(case.indices[1].max())
    table = case.block_table.clone()
    table[1, position // 64] = 99
    case.indices[1, 0] = position
    case.indices[1, 1:] = -1
    slots = case.with_slots()
    slots.indices[3, 2] = 10**6
    for wrong, message in [
        (replace(case, block_table=table), rf"request 1, position {position}: expected a page in \[0, 10\), got 99"),
        (replace(case, block_table=table[:, :0]), r"kv_lens: row \d, request \d: expected 0\.\.0 "),
        (slots, "row 3, column 2: expected a slot below 640, got 1000000"),
    ]:
        with pytest.raises(ValueError, match=message):
            ops.sparse_mla_fp8_cp(*wrong.to(device).tensors, SCALE)


@pytest.mark.parametrize("level", ["generic", "avx2", "avx512", "avx512_bf16"])
def test_instruction_set_levels(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every level within the bounds and free of the other rows; a CPU without a level runs the next lower one."""
    monkeypatch.setenv("SPARSE_CP_OPS_CPU", level)
    for heads, scale_kind in [(8, "wild"), (16, "tiny"), (16, "fp32"), (64, "wild")]:
        case = random_case([*ROWS, (1, 600, 499)], heads, 512, scale_kind=scale_kind)
        out, lse = ops.sparse_mla_fp8_cp(*case.tensors, SCALE)
        assert_within_bounds(out, lse, *reference.sparse_mla_fp8_cp(*case.tensors, SCALE))
        for row in range(6):
            assert_same_bits(ops.sparse_mla_fp8_cp(*case.rows([row]).tensors, SCALE), (out[[row]], lse[[row]]))
    spoiled = replace(case, kv_cache=case.kv_cache.clone())
    spoiled.kv_cache[..., 77] = 0xFF
    out, lse = ops.sparse_mla_fp8_cp(*spoiled.tensors, SCALE)
    used = ~lse.isneginf()
    assert used.sum() == 5 * 64
    assert out[used].isnan().all()
    assert lse[used].isnan().all()


def test_unknown_instruction_set_level_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSE_CP_OPS_CPU", "sse9")
    with pytest.raises(ValueError, match="SPARSE_CP_OPS_CPU: expected auto, generic, avx2, avx512 or avx512_bf16"):
        ops.sparse_mla_fp8_cp(*random_case(ROWS).tensors, SCALE)


@pytest.mark.parametrize("heads", [8, 16, 128])
def test_threads_do_not_change_bits(heads: int) -> None:
    """One, two and more threads than rows: few rows are split over heads."""
    before = torch.get_num_threads()
    case = random_case([(0, 300, 128), (1, 90, 80), (0, 70, 1)], heads)
    results = []
    try:
        for threads in (1, 2, 7):
            torch.set_num_threads(threads)
            results.append(ops.sparse_mla_fp8_cp(*case.tensors, SCALE))
            results.append(tuple(torch.cat(parts) for parts in zip(*map(alone(case), range(3)), strict=True)))
    finally:
        torch.set_num_threads(before)
    for result in results[1:]:
        assert_same_bits(result, results[0])


def alone(case: AttentionCase) -> Callable[[int], tuple[Tensor, Tensor]]:
    return lambda row: ops.sparse_mla_fp8_cp(*case.rows([row]).tensors, SCALE)


def test_flushed_denormals_do_not_change_the_result() -> None:
    """torch.set_flush_denormal is a user's switch: e4m3 denormals are read as what they are."""
    case = random_case(ROWS, heads=16)
    case.kv_cache.view(-1, 656)[:, :512] &= 0x87
    expected = ops.sparse_mla_fp8_cp(*case.tensors, SCALE)
    if not torch.set_flush_denormal(True):
        return
    try:
        flushed = ops.sparse_mla_fp8_cp(*case.tensors, SCALE)
    finally:
        torch.set_flush_denormal(False)
    assert_same_bits(flushed, expected)


def test_caches_of_all_page_sizes_agree(device: str) -> None:
    """The page size is only an address: 128 tokens in pages of 16, 32, 64 and 128 give the same bits."""
    cache = random_mla_cache(8, 128)
    indices = torch.randint(0, 1024, (3, 128), dtype=torch.int32)
    q = torch.randn(3, 16, 576).bfloat16()
    results = []
    for page_size in (16, 32, 64, 128):
        paged = cache.view(-1, page_size, 656)
        table = torch.arange(len(paged), dtype=torch.int32)[None]
        lens = torch.full((3,), 1024, dtype=torch.int32)
        case = AttentionCase(q, paged, indices, table, torch.zeros(3, dtype=torch.int32), lens).to(device)
        results.append(ops.sparse_mla_fp8_cp(*case.tensors, SCALE))
    for result in results[1:]:
        assert_same_bits(result, results[0])
