"""sparse_mla_fp8_cp with precision="fp8": its own bounds, and everything else as in "high".

On Hopper 64 and 128 heads take products in e4m3, but few rows whose lists may be split; all else answers in "high".
"""

from dataclasses import replace

import pytest
import torch
from attention_cases import (
    SCALE,
    AttentionCase,
    assert_same_bits,
    assert_within_fp8_bounds,
    logit_noise,
    random_case,
)
from builders import random_mla_cache
from test_sparse_mla_fp8_cp import INT_MAX, INT_MIN, hostile_case, record_with
from test_sparse_mla_fp8_cp_cuda import slot_case
from torch import Tensor

from sparse_cp_ops import ops, reference

OP = torch.ops.sparse_cp_ops.sparse_mla_fp8_cp.default


def attend(case: AttentionCase, scale: float = SCALE, batch_invariant: bool = True) -> tuple[Tensor, Tensor]:
    return ops.sparse_mla_fp8_cp(*case.tensors, scale, "fp8", batch_invariant)


def check(
    case: AttentionCase, device: str, scale: float = SCALE, batch_invariant: bool = True, lse_factor: float = 0.18
) -> None:
    """The op runs before the reference: reused memory can't hold the right answer."""
    out, lse = attend(case.to(device), scale, batch_invariant)
    exact = reference.sparse_mla_fp8_cp(*case.tensors, scale)
    assert_within_fp8_bounds(out, lse, *exact, logit_noise(case, scale), lse_factor)


def slots_of_tokens(
    rows: int, heads: int, topk: int, scale_kind: str = "ue8m0", tokens: int = 1024, page_size: int = 64
) -> AttentionCase:
    """Random physical slots, some of them holes or outside the cache."""
    indices = torch.randint(0, tokens, (rows, topk), dtype=torch.int32)
    indices[torch.rand(rows, topk) < 0.1] = -1
    indices[torch.rand(rows, topk) < 0.02] = tokens + 5
    cache = random_mla_cache(tokens // page_size, page_size, scale_kind)
    return AttentionCase(torch.randn(rows, heads, 576).bfloat16(), cache, indices, None, None, None)


@pytest.mark.parametrize("heads", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("scale_kind", ["ue8m0", "fp32", "wild", "tiny", "static"])
@pytest.mark.parametrize("batch_invariant", [True, False])
def test_heads_and_scales(device: str, heads: int, scale_kind: str, batch_invariant: bool) -> None:
    rows = [(0, 100, 90), (1, 300, 256), (2, 70, 1), (-1, 0, 0), (1, 1, 1), (0, 50, 50)]
    check(random_case(rows, heads, 256, scale_kind=scale_kind), device, batch_invariant=batch_invariant)


@pytest.mark.parametrize("scale", [0.01, 0.1352, -0.1352, 0.0])
@pytest.mark.parametrize("scale_kind", ["ue8m0", "fp32", "wild"])
def test_flat_and_peaked_softmax(device: str, scale: float, scale_kind: str) -> None:
    check(slots_of_tokens(3, 64, 512, scale_kind), device, scale)


def with_exact_queries(case: AttentionCase) -> AttentionCase:
    """Latent queries that e4m3 times a head's power of two holds; 3.5 is the largest value of every head."""
    q = case.q.clone()
    q[..., :512] = q[..., :512].clamp(-3, 3).to(torch.float8_e4m3fn).bfloat16()
    q[..., 0] = 3.5
    return replace(case, q=q)


@pytest.mark.parametrize("scale", [0.02, 0.1352, 30.0])
def test_queries_that_e4m3_holds_give_exact_logits(device: str, scale: float) -> None:
    """Only the accumulation of the tensor core is left, some 2^-13 of the largest term; a wrong key or scale shows.

    Logits up to thousands: one key takes all, and its weight is rounded once.
    """
    check(with_exact_queries(slots_of_tokens(3, 128, 320, "ue8m0")), device, scale, lse_factor=0.01)


def test_equal_weights_give_the_mean_of_the_values(device: str) -> None:
    """Zero queries and power-of-two scales: weights are exact, and a wrong pair of weight and value shows."""
    case = slots_of_tokens(3, 64, 320, "ue8m0")
    case.q.zero_()
    out, lse = attend(case.to(device))
    exact_out, exact_lse = reference.sparse_mla_fp8_cp(*case.tensors, SCALE)
    assert (out.cpu() - exact_out).norm() < 0.01 * exact_out.norm()
    torch.testing.assert_close(lse.cpu().double(), exact_lse, rtol=8.01 / 65536, atol=1e-5)


@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
@pytest.mark.parametrize("width", [64, 192, 512])
def test_list_lengths(device: str, page_size: int, width: int) -> None:
    """Counts around the block of 64 keys, and page boundaries of kv_lens."""
    counts = sorted({0, 1, min(63, width), 64, min(65, width), min(127, width), width - 1, width})
    rows = [(row % 3, max(count, 700 - row % 3 * page_size), count) for row, count in enumerate(counts)]
    check(random_case(rows, 64, width, page_size), device)


@pytest.mark.parametrize("scale_kind", ["ue8m0", "fp32", "wild"])
@pytest.mark.parametrize("batch_invariant", [True, False])
def test_few_usable_keys_anywhere_in_the_list(device: str, scale_kind: str, batch_invariant: bool) -> None:
    case = slots_of_tokens(14, 64, 256, scale_kind)
    for row, count in enumerate([0, 1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129, 0, 1]):
        used = torch.randperm(256)[:count] if row % 2 else torch.arange(count)
        case.indices[row] = -1
        case.indices[row, used] = torch.randint(0, 1024, (count,), dtype=torch.int32)
    check(case, device, 0.1352, batch_invariant)


def test_steps_without_keys(device: str) -> None:
    """Runs of 64 unused entries at the front, in the middle and at the end of a list."""
    case = slots_of_tokens(6, 64, 640, "fp32")
    steps = case.indices.view(6, 10, 64)
    steps[0, :3] = -1
    steps[1, 4:7] = -1
    steps[2, 5:] = -1
    steps[3, 1:] = -1
    steps[4, :9] = -1
    check(case, device)
    case.indices[5, 1:] = -1  # one key alone, then in the last place
    case.indices[5, 0] = 7
    case.indices[4] = case.indices[5].flip(0)
    check(case, device)


def test_unusable_entries_are_skipped(device: str) -> None:
    """Holes, indices from kv_len on and the extremes of int32 change nothing, not even a bit."""
    case = random_case([(0, 200, 40), (1, 150, 64), (0, 64, 10), (1, 1, 1)], 64, 128)
    expected = attend(case.to(device))
    junk = torch.tensor([-1, -2, INT_MIN, INT_MAX, 200, 201, 255, 256, 10**6], dtype=torch.int32)
    holes = case.indices < 0
    filled = case.indices.clone()
    filled[holes] = junk[torch.randint(len(junk), (int(holes.sum()),))]
    hostile = replace(case, indices=filled)
    assert_same_bits(attend(hostile.to(device)), expected)
    check(hostile, device)


def test_hostile_tables_and_rows(device: str) -> None:
    case = hostile_case(heads=64)
    out, lse = attend(case.to(device))
    assert lse[6:10].isneginf().all()
    exact_out, exact_lse = reference.sparse_mla_fp8_cp(*case.tensors, SCALE)
    noise = torch.full_like(exact_lse, 30 * SCALE)  # about what these queries and records have
    assert_within_fp8_bounds(out, lse, exact_out, exact_lse, noise)


@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
def test_positions_and_their_slots_agree_bitwise(device: str, page_size: int) -> None:
    case = random_case([(0, 200, 100), (1, 150, 128), (-1, 0, 0), (0, 64, 0), (2, 129, 129)], 64, 192, page_size)
    slots = case.with_slots()
    assert_same_bits(attend(slots.to(device)), attend(case.to(device)))


@pytest.mark.parametrize("kind", ["byte", "negative byte", "scale", "payload scale", "rope"])
def test_nan_records_reach_the_rows_that_list_them(device: str, kind: str) -> None:
    case = random_case([(0, 128, 100), (0, 37, 37), (0, 128, 50), (1, 128, 128), (0, 38, 38)], heads=64)
    case.indices[0, 5] = 37
    case.indices[2][case.indices[2] == 37] = -1
    clean = attend(case.to(device))
    case.indices[1, -1] = 37  # listed, but not below kv_len
    spoiled, hit = record_with(case, kind, device)
    out, lse = attend(spoiled)
    assert out[hit].isnan().all()
    assert lse[hit].isnan().all()
    assert_same_bits((out[~hit], lse[~hit]), (clean[0][~hit], clean[1][~hit]))


@pytest.mark.parametrize("dimension", [300, 511, 512, 575])
def test_nan_query_stays_in_its_head(device: str, dimension: int) -> None:
    case = random_case([(0, 128, 100)] * 3, heads=64)
    clean = attend(case.to(device))
    case.q[1, 5, dimension] = torch.nan
    out, lse = attend(case.to(device))
    hit = torch.zeros(3, 64, dtype=torch.bool)
    hit[1, 5] = True
    assert out[hit].isnan().all()
    assert lse[hit].isnan().all()
    assert_same_bits((out[~hit], lse[~hit]), (clean[0][~hit], clean[1][~hit]))


def test_infinite_logits(device: str) -> None:
    """-inf weighs nothing; a row of nothing else is empty; +inf gives NaN instead of a wrong number."""
    case = slots_of_tokens(3, 64, 192)
    case.q[:, :, 512] = 1.0
    rope = case.kv_cache.view(-1, 656)[:, 528:530]
    rope[[10, 20]] = torch.tensor([-torch.inf]).bfloat16().view(torch.uint8)
    rope[30] = torch.tensor([torch.inf]).bfloat16().view(torch.uint8)
    case.indices[case.indices == 30] = 40
    case.indices[0, :2] = torch.tensor([10, 20])
    case.indices[1] = -1
    case.indices[1, 60:70] = torch.tensor([10, 20] * 5)
    case.indices[2, 3] = 30
    out, lse = attend(case.to(device))
    assert out[2].isnan().all()
    assert lse[2].isnan().all()
    assert lse[1].isneginf().all()
    assert out[1].eq(0).all()
    finite = replace(case, q=case.q[:1], indices=case.indices[:1])
    without = replace(finite, indices=torch.where((finite.indices == 10) | (finite.indices == 20), -1, finite.indices))
    exact = reference.sparse_mla_fp8_cp(*without.tensors, SCALE)
    assert_within_fp8_bounds(out[:1], lse[:1], *exact, logit_noise(without, SCALE))


def test_unusual_scales(device: str) -> None:
    """All-zero tiles with FLT_MIN, subnormal, zero, tiny and huge scales, ratios of 2^20, records that nobody wrote."""
    case = slots_of_tokens(3, 64, 192)
    records = case.kv_cache.view(-1, 656)
    smallest = torch.finfo(torch.float32).tiny
    ratios = [0.01, 0.01 * 2**-20, 0.015 * 2**-10, 0.012]
    zero, subnormal, tiny = [0.0, 0.01, 0.01, 0.01], [0.01, 3e-39, 1e-4, 0.015], [0.01, 0.01, 1e-30, 0.01]
    for four in (zero, subnormal, tiny, ratios, [smallest] * 4):
        records[:, 512:528] = torch.tensor(four).view(torch.uint8)
        check(case, device)
    records[:, 512:528] = torch.tensor([0.01, smallest, 0.005, 1e-20]).view(torch.uint8)
    records[:, 128:256] = 0
    check(case, device)
    records[:, 512:528] = torch.tensor([1e6, 1.3e6, 1e6, 2e6]).view(torch.uint8)
    check(replace(case, q=(case.q.float() * 1e-8).bfloat16()), device)
    records[:, :528] = 0  # logits come from the RoPE part alone, values are 0
    check(case, device)


@pytest.mark.parametrize("latent", [0.0, 2e-38, 1e-12, 1e12])
def test_queries_of_any_size(device: str, latent: float) -> None:
    """The latent part's scale has no say in the RoPE part."""
    case = slots_of_tokens(2, 64, 128)
    case.q[:, :, :512] = (case.q[:, :, :512].float() * latent).bfloat16()
    check(case, device, SCALE if latent < 1 else SCALE * 1e-12)


@pytest.mark.parametrize("order", ["rising", "falling"])
@pytest.mark.parametrize("scale", [SCALE, 0.1352])
def test_sorted_lists(device: str, order: str, scale: float) -> None:
    """The running shifts move in every step, or only in the first."""
    case = slots_of_tokens(2, 64, 640, "fp32")
    case.indices.clamp_(0, 1023)
    logits = case.q.double().mean(1) @ reference.dequantize_kv(case.kv_cache, torch.arange(1024)).double().T
    for row in range(2):
        ranked = logits[row][case.indices[row].long()].argsort(descending=order == "falling")
        case.indices[row] = case.indices[row][ranked]
    check(case, device, scale)


@pytest.mark.parametrize("above", [4.0, 8.0, 12.0])
@pytest.mark.parametrize("place", [0, 300, 511])
def test_one_key_above_all(device: str, above: float, place: int) -> None:
    """A logit far above the others (an attention sink): what the rest weighs is not lost."""
    case = slots_of_tokens(2, 64, 512)
    records = case.kv_cache.view(-1, 656)
    records[:, 528:530] = 0
    case.q[:, :, 512] = 8.0
    records[77, 528:530] = torch.tensor([above / 8 / 0.02]).bfloat16().view(torch.uint8)
    case.indices[case.indices == 77] = 78
    case.indices[:, place] = 77
    check(case, device, 0.02)


@pytest.mark.parametrize("heads", [64, 128])
def test_rows_do_not_depend_on_each_other(device: str, heads: int) -> None:
    rows = [(row % 3, 40 + 37 * row, min(128, 20 * row)) for row in range(9)]
    case = random_case([*rows, (-1, 0, 0)], heads).to(device)
    out, lse = attend(case)
    assert_same_bits(attend(case), (out, lse))
    for selection in ([3], [9], [5, 2], [8, 7, 6, 5, 4, 3, 2, 1, 0, 9], [4, 4, 4], list(range(10)) * 7):
        assert_same_bits(attend(case.rows(selection)), (out[selection], lse[selection]))


@pytest.mark.parametrize("heads", [8, 32, 64, 128])
@pytest.mark.parametrize("batch_invariant", [True, False])
def test_repeats_are_bitwise_equal(device: str, heads: int, batch_invariant: bool) -> None:
    case = slots_of_tokens(3, heads, 512, "fp32").to(device)
    expected = attend(case, 0.1352, batch_invariant)
    for _ in range(10):
        assert_same_bits(attend(case, 0.1352, batch_invariant), expected)


@pytest.mark.parametrize("heads", [8, 16, 32])
def test_few_heads_answer_in_high(device: str, heads: int) -> None:
    case = slots_of_tokens(3, heads, 256, "fp32").to(device)
    assert_same_bits(attend(case), ops.sparse_mla_fp8_cp(*case.tensors, SCALE))


def test_strided_views_are_read_in_place(device: str) -> None:
    case = random_case([(0, 200, 100), (1, 150, 128), (-1, 0, 0), (0, 64, 7)], heads=64).to(device)
    expected = attend(case)
    layers = torch.full((case.kv_cache.shape[0], 3, 64, 656), 0x7F, dtype=torch.uint8, device=device)
    layers[:, 1] = case.kv_cache
    wide = torch.full((4, 200), 3, dtype=torch.int32, device=device)
    wide[:, 8:136] = case.indices
    assert_same_bits(attend(replace(case, kv_cache=layers[:, 1], indices=wide[:, 8:136])), expected)
    for start in (64, 3):  # 3: rows that are not 16-byte aligned
        fused = torch.full((4, 70, 700), torch.nan, device=device).bfloat16()
        fused[:, 2:66, start : start + 576] = case.q
        assert_same_bits(attend(replace(case, q=fused[:, 2:66, start : start + 576])), expected)


def test_empty_inputs(device: str) -> None:
    case = random_case([(0, 200, 100), (1, 150, 128), (-1, 0, 0)], heads=64).to(device)
    assert case.block_table is not None
    slots = replace(case, block_table=None, req_ids=None, kv_lens=None)
    assert attend(case.rows([]))[0].shape == (0, 64, 512)
    for nothing in (
        replace(case, indices=case.indices[:, :0]),
        replace(case, kv_cache=case.kv_cache[:0]),
        replace(case, block_table=case.block_table[:0]),
        replace(case, block_table=case.block_table[:, :0]),
        replace(slots, kv_cache=case.kv_cache[:0]),
    ):
        out, lse = attend(nothing)
        assert out.eq(0).all()
        assert lse.isneginf().all()


def test_opcheck(device: str) -> None:
    case = slots_of_tokens(3, 64, 128).to(device)
    torch.library.opcheck(OP, (*case.tensors, SCALE, "fp8", False))


@pytest.mark.cuda
@pytest.mark.parametrize("rows", [1, 2, 5, 17, 33, 70, 140, 300])
@pytest.mark.parametrize("heads", [64, 128])
def test_row_counts_that_split_differently(rows: int, heads: int) -> None:
    """From one row, whose list most blocks share, to more rows than multiprocessors."""
    arguments = slot_case(rows, heads, 2048, scale_kind="fp32")
    case = AttentionCase(*(None if t is None else t.cpu() for t in arguments))
    exact = reference.sparse_mla_fp8_cp(*arguments, SCALE)
    noise = logit_noise(case, SCALE)
    for batch_invariant in (True, False):
        out, lse = ops.sparse_mla_fp8_cp(*arguments, SCALE, "fp8", batch_invariant)
        assert_within_fp8_bounds(out, lse, exact[0].cpu(), exact[1].cpu(), noise)
        assert_same_bits(ops.sparse_mla_fp8_cp(*arguments, SCALE, "fp8", batch_invariant), (out, lse))


@pytest.mark.cuda
def test_many_rows() -> None:
    """More items than a multiprocessor sees in one turn of any barrier's parity; a hundred for each block."""
    case = slots_of_tokens(250, 64, 192, "fp32").to("cuda")
    rows = torch.arange(14_000, device="cuda") % 250
    out, lse = attend(replace(case, q=case.q[rows], indices=case.indices[rows]))
    few = attend(case)
    assert_same_bits((out, lse), (few[0][rows], few[1][rows]))
    order = torch.randperm(250, device="cuda")
    permuted = attend(replace(case, q=case.q[order], indices=case.indices[order]))
    assert_same_bits(permuted, (few[0][order], few[1][order]))


@pytest.mark.cuda
def test_cache_above_2_gib() -> None:
    small = slots_of_tokens(5, 128, 128, tokens=256, page_size=128).to("cuda")
    tokens = 3_400_064  # 2.08 GiB; int32 byte offsets end at slot 3,273,603
    cache = torch.full((tokens // 128, 128, 656), 0xFF, dtype=torch.uint8, device="cuda")  # NaN wherever it is misread
    cache[-2:] = small.kv_cache
    small.indices[small.indices >= 256] = -1
    far = torch.where(small.indices >= 0, small.indices + tokens - 256, -1)
    assert_same_bits(attend(replace(small, kv_cache=cache, indices=far)), attend(small))
