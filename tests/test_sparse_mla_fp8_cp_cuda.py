"""sparse_mla_fp8_cp on CUDA: long lists, sizes above 2^31, splits, graphs, bitwise repeats."""

import pytest
import torch
from builders import num_pages, random_block_table, random_mla_cache
from test_sparse_mla_fp8_cp import assert_within_bounds
from torch import Tensor

from sparse_cp_ops import ops, reference

pytestmark = pytest.mark.cuda

Arguments = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]


def slot_case(
    rows: int, heads: int, topk: int, tokens: int = 4096, scale_kind: str = "ue8m0", page_size: int = 64
) -> Arguments:
    """Random physical slots, some of them holes or outside the cache."""
    cache = random_mla_cache(tokens // page_size, page_size, scale_kind).cuda()
    q = torch.randn(rows, heads, 576, device="cuda").bfloat16()
    indices = torch.randint(0, tokens, (rows, topk), dtype=torch.int32, device="cuda")
    holes = torch.rand(rows, topk, device="cuda") < 0.1
    indices[holes] = -1
    indices[torch.rand(rows, topk, device="cuda") < 0.02] = tokens + 5
    return q, cache, indices, None, None, None


def assert_matches(arguments: Arguments, scale: float, batch_invariant: bool = True) -> None:
    out, lse = ops.sparse_mla_fp8_cp(*arguments, scale, "high", batch_invariant)
    exact_out, exact_lse = reference.sparse_mla_fp8_cp(*arguments, scale)
    assert_within_bounds(out, lse, exact_out.cpu(), exact_lse.cpu())


@pytest.mark.parametrize("heads", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("scale_kind", ["ue8m0", "fp32", "wild", "tiny"])
@pytest.mark.parametrize("batch_invariant", [True, False])
def test_long_lists(heads: int, scale_kind: str, batch_invariant: bool) -> None:
    assert_matches(slot_case(5, heads, 2048, 8192, scale_kind), 0.1352, batch_invariant)


@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize("scale_kind", ["ue8m0", "static", "fp32", "wild"])
def test_many_rows_from_few_tokens(heads: int, scale_kind: str) -> None:
    """Enough rows for the whole cache to be turned into 16-bit rows first on Hopper."""
    assert_matches(slot_case(80, heads, 256, 1024, scale_kind), 0.1352)


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("scale", [0.01, 1.0])
def test_flat_and_peaked_softmax(heads: int, scale: float) -> None:
    assert_matches(slot_case(5, heads, 512, scale_kind="fp32"), scale)


@pytest.mark.parametrize("heads", [8, 64, 128])
@pytest.mark.parametrize("scale_kind", ["ue8m0", "fp32", "wild"])
def test_few_usable_keys_anywhere_in_the_list(heads: int, scale_kind: str) -> None:
    q, cache, indices, *_ = slot_case(14, heads, 256, scale_kind=scale_kind)
    for row, count in enumerate([0, 1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129, 0, 1]):
        used = torch.randperm(256, device="cuda")[:count] if row % 2 else torch.arange(count, device="cuda")
        keep = torch.randint(0, 4096, (count,), dtype=torch.int32, device="cuda")
        indices[row] = -1
        indices[row, used] = keep
    assert_matches((q, cache, indices, None, None, None), 0.1352)


def test_unusual_scales() -> None:
    """Subnormal, zero and huge scales beside ordinary ones, and records that nobody wrote."""
    q, cache, indices, *_ = slot_case(6, 64, 128)
    for four in ([0.01, 3e-39, 1e-4, 0.015], [0.0, 0.01, 0.01, 0.01]):
        cache[..., 512:528] = torch.tensor(four, device="cuda").view(torch.uint8)
        assert_matches((q, cache, indices, None, None, None), 0.1352)
    cache[:, :, :528] = 0  # logits come from the RoPE part alone, values are 0
    assert_matches((q, cache, indices, None, None, None), 0.1352)


def test_huge_scales() -> None:
    q, cache, indices, *_ = slot_case(6, 64, 128)
    cache[..., 512:528] = torch.tensor([1e6, 1.3e6, 1e6, 2e6], device="cuda").view(torch.uint8)
    arguments: Arguments = ((q.float() * 1e-8).bfloat16(), cache, indices, None, None, None)
    out, lse = ops.sparse_mla_fp8_cp(*arguments, 0.1352)
    exact_out, exact_lse = reference.sparse_mla_fp8_cp(*arguments, 0.1352)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=8.01 / 65536, atol=1e-5)
    # bf16 results: a relative norm of at most 2^-9.
    assert (out.double() - exact_out).norm() < 2**-9 * exact_out.norm()


def test_nan_reaches_the_rows_that_list_it_and_no_other() -> None:
    q, cache, indices, *_ = slot_case(64, 128, 128)
    indices.clamp_(min=1)
    indices[3, 77] = 0
    for position, value in [(5, 0x7F), (300, 0xFF), (512 + 3, 0x7F), (512 + 7, 0xFF), (530, 0xFF), (531, 0x7F)]:
        cache[0, 0, position] = value
    cache[0, 0, 514] = 0xC0
    cache[0, 0, 518] = 0xC0
    q[9, 5, 17] = torch.nan
    out, lse = ops.sparse_mla_fp8_cp(q, cache, indices, None, None, None, 0.1352)
    assert out[3].isnan().all()
    assert lse[3].isnan().all()
    assert out[9, 5].isnan().all()
    assert lse[9, 5].isnan().all()
    out[9, 5], lse[9, 5], out[3], lse[3] = 0, 0, 0, 0
    assert out.isfinite().all()
    assert lse.isfinite().all()


@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize("scale_kind", ["ue8m0", "fp32"])
def test_a_row_does_not_depend_on_the_others(heads: int, scale_kind: str) -> None:
    """Many rows and few take different ways to the keys on Hopper, with one instance of the kernel for ue8m0 each."""
    q, cache, indices, *_ = slot_case(300, heads, 512, scale_kind=scale_kind)
    out, lse = ops.sparse_mla_fp8_cp(q, cache, indices, None, None, None, 0.1352)
    order = torch.randperm(300, device="cuda")
    permuted = ops.sparse_mla_fp8_cp(q[order], cache, indices[order], None, None, None, 0.1352)
    assert torch.equal(permuted[0], out[order])
    assert torch.equal(permuted[1], lse[order])
    for rows in (slice(7, 8), slice(100, 117)):
        few = ops.sparse_mla_fp8_cp(q[rows], cache, indices[rows], None, None, None, 0.1352)
        assert torch.equal(few[0], out[rows])
        assert torch.equal(few[1], lse[rows])


@pytest.mark.parametrize("heads", [64, 128])
def test_uniform_and_mixed_steps_in_one_list(heads: int) -> None:
    """Hopper computes each 64 entries by what their scales are: all powers of two, or not. Rows alone and among others
    take different ways to the keys, and must find the same kind. The softmax is flat: two keys that share nearly all
    the weight would show the rounding of f16 weights, which the bound for many keys does not cover."""
    q, cache, *_ = slot_case(300, heads, 512)
    cache[32:] = random_mla_cache(32, 64, "fp32").cuda()
    kind = torch.randint(0, 3, (300, 8, 1), device="cuda")  # of a step: no such key, one, all
    upper = (kind == 2) | ((kind == 1) & (torch.arange(64, device="cuda") == 17))
    indices = (torch.randint(0, 2048, (300, 8, 64), device="cuda") + 2048 * upper).int().view(300, 512)
    assert_matches((q, cache, indices, None, None, None), 0.03)
    out, lse = ops.sparse_mla_fp8_cp(q, cache, indices, None, None, None, 0.03)
    for rows in (slice(7, 8), slice(100, 117)):
        few = ops.sparse_mla_fp8_cp(q[rows], cache, indices[rows], None, None, None, 0.03)
        assert torch.equal(few[0], out[rows])
        assert torch.equal(few[1], lse[rows])


@pytest.mark.parametrize(("rows", "heads"), [(1, 128), (3, 64), (200, 128), (40, 8)])
@pytest.mark.parametrize("batch_invariant", [True, False])
def test_repeats_are_bitwise_equal(rows: int, heads: int, batch_invariant: bool) -> None:
    arguments = slot_case(rows, heads, 2048, scale_kind="fp32")
    out, lse = ops.sparse_mla_fp8_cp(*arguments, 0.1352, "high", batch_invariant)
    for _ in range(20):
        again = ops.sparse_mla_fp8_cp(*arguments, 0.1352, "high", batch_invariant)
        assert torch.equal(again[0], out)
        assert torch.equal(again[1], lse)


@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
def test_positions_and_their_slots_agree_bitwise(page_size: int) -> None:
    lengths = [700, 5, 333]
    cache = random_mla_cache(num_pages(lengths, page_size), page_size, "fp32").cuda()
    table = random_block_table(lengths, page_size).cuda()
    table[2, 1], table[0, 2] = -7, cache.shape[0]  # no page, and a page outside the cache
    req_ids = torch.tensor([0, 1, 2, 3, -1, 0, 2], dtype=torch.int32, device="cuda")
    kv_lens = torch.tensor([700, 5, 333, 9, 9, 128, 1000000], dtype=torch.int32, device="cuda")
    positions = torch.randint(-5, 720, (7, 256), dtype=torch.int32, device="cuda")
    q = torch.randn(7, 128, 576, device="cuda").bfloat16()
    paged: Arguments = (q, cache, positions, table, req_ids, kv_lens)
    assert_matches(paged, 0.1352)
    request = req_ids.long().clamp(0, 2).unsqueeze(1)
    page = table.long()[request, (positions.long() // page_size).clamp(0, table.shape[1] - 1)]
    used = (positions >= 0) & (positions < kv_lens.unsqueeze(1)) & (req_ids >= 0).unsqueeze(1)
    used &= (req_ids < 3).unsqueeze(1) & (positions // page_size < table.shape[1]) & (page >= 0)
    slots = torch.where(used, page * page_size + positions % page_size, -1).int()
    out, lse = ops.sparse_mla_fp8_cp(*paged, 0.1352)
    same = ops.sparse_mla_fp8_cp(q, cache, slots, None, None, None, 0.1352)
    assert torch.equal(same[0], out)
    assert torch.equal(same[1], lse)


def test_many_rows() -> None:
    q, cache, indices, *_ = slot_case(256, 8, 64)
    rows = torch.arange(70_000, device="cuda") % 256
    out, lse = ops.sparse_mla_fp8_cp(q[rows], cache, indices[rows], None, None, None, 0.1352)
    few = ops.sparse_mla_fp8_cp(q, cache, indices, None, None, None, 0.1352)
    assert torch.equal(out, few[0][rows])
    assert torch.equal(lse, few[1][rows])


@pytest.mark.parametrize("heads", [16, 128])
def test_cache_above_2_gib(heads: int) -> None:
    small = slot_case(5, heads, 128, tokens=256, page_size=128)
    tokens = 3_400_064  # 2.08 GiB; int32 byte offsets end at slot 3,273,603
    cache = torch.full((tokens // 128, 128, 656), 0xFF, dtype=torch.uint8, device="cuda")  # NaN wherever it is misread
    cache[-2:] = small[1]
    indices = small[2].clone()
    indices[indices >= 256] = -1
    far = torch.where(indices >= 0, indices + tokens - 256, -1)
    out, lse = ops.sparse_mla_fp8_cp(small[0], cache, far, None, None, None, 0.1352)
    near = ops.sparse_mla_fp8_cp(small[0], small[1], indices, None, None, None, 0.1352)
    assert torch.equal(out, near[0])
    assert torch.equal(lse, near[1])


def test_strided_arguments_are_read_in_place() -> None:
    _, cache, indices, *_ = slot_case(9, 64, 128)
    wide = torch.randn(9, 70, 700, device="cuda").bfloat16()
    for start in (0, 3, 8):  # 3: rows that are not 16-byte aligned
        view = wide[:, 3:67, start : start + 576]
        spaced = torch.zeros(cache.shape[0], 2, *cache.shape[1:], dtype=torch.uint8, device="cuda")
        spaced[:, 0] = cache
        wide_indices = torch.cat([indices, indices], 1)[:, :128]
        arguments: Arguments = (view, spaced[:, 0], wide_indices, None, None, None)
        assert_matches(arguments, 0.1352)


@pytest.mark.parametrize("precision", ["high", "fp8"])
@pytest.mark.parametrize("batch_invariant", [True, False])
def test_graph_replays_with_other_lengths_and_no_sync(batch_invariant: bool, precision: str) -> None:
    lengths = [2000, 900]
    cache = random_mla_cache(num_pages(lengths, 64), 64).cuda()
    table = random_block_table(lengths, 64).cuda()
    req_ids = torch.tensor([0, 1, 1], dtype=torch.int32, device="cuda")
    kv_lens = torch.tensor([2000, 900, 0], dtype=torch.int32, device="cuda")
    indices = torch.randint(0, 2000, (3, 512), dtype=torch.int32, device="cuda")
    q = torch.randn(3, 128, 576, device="cuda").bfloat16()

    def call() -> tuple[Tensor, Tensor]:
        return ops.sparse_mla_fp8_cp(q, cache, indices, table, req_ids, kv_lens, 0.1352, precision, batch_invariant)

    call()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    for new_lens in ([2000, 900, 0], [1, 64, 900], [65, 0, 899]):
        kv_lens.copy_(torch.tensor(new_lens, dtype=torch.int32))
        captured[0].fill_(torch.nan)
        captured[1].fill_(torch.nan)
        graph.replay()
        eager = call()
        assert torch.equal(captured[0], eager[0])
        assert torch.equal(captured[1], eager[1])
