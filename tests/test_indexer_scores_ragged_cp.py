from dataclasses import replace

import pytest
import torch
from builders import far_apart, num_pages, random_block_table, random_indexer_cache
from indexer_cases import FLOAT_MAX, IndexerCase, case_with_scores, random_case
from torch import Tensor

from sparse_cp_ops import ops, reference

LEVELS = ["generic", "avx2", "avx512", "avx512_bf16"]
# (request, kv_len) of each row: prefixes of 300 and 128 keys, rows of two requests in turn, a pad, an empty row.
ROWS = [(0, 1), (0, 300), (-1, 0), (1, 129), (0, 301), (1, 130), (1, 64), (1, 0)]


def scores_of(case: IndexerCase, width: int, device: str, precision: str = "fp32") -> Tensor:
    return ops.indexer_scores_ragged_cp(*case.to(device).tensors, width, precision).cpu()


def cosine_difference(actual: Tensor, expected: Tensor) -> float:
    a, b = actual.double().flatten(), expected.double().flatten()
    return 1 - (2 * (a @ b) / (a @ a + b @ b)).item()


def summed_magnitudes(case: IndexerCase, width: int) -> Tensor:
    """k_scale_j * sum_h |q_weights_h| * sum_d |q8 * k8|: what rounding errors of a score are measured by."""
    cache = case.indexer_cache.clone()
    cache[:, : case.page_size * 128] &= 0x7F
    absolute = replace(case, q_fp8=case.q_fp8 & 0x7F, q_weights=case.q_weights.abs(), indexer_cache=cache)
    return reference.indexer_scores_ragged_cp(*absolute.tensors, width)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
@pytest.mark.parametrize("heads", [8, 16, 24, 32, 64])
def test_scores_match_fp64(device: str, heads: int, page_size: int) -> None:
    case = random_case(ROWS, heads, page_size, ["ue8m0", "fp32"][heads // 8 % 2])
    scores = scores_of(case, 333, device)
    expected = reference.indexer_scores_ragged_cp(*case.tensors, 333)
    visible = expected > -torch.inf
    assert torch.equal(visible, scores > -torch.inf)
    assert cosine_difference(scores[visible], expected[visible]) < 5e-6


@pytest.mark.parametrize("scale_kind", ["wild", "tiny"])
def test_scales_of_other_writers(device: str, scale_kind: str) -> None:
    case = random_case([(0, 200)], 16, 64, scale_kind)
    scores, expected = scores_of(case, 200, device), reference.indexer_scores_ragged_cp(*case.tensors, 200)
    # The FP8 tensor core keeps about 14 bits of a sum: 4 steps of 32 products, each within 2^-13 of the largest.
    assert ((scores - expected).abs() <= 2**-11 * summed_magnitudes(case, 200)).all()
    assert cosine_difference(scores, expected) < 5e-6


@pytest.mark.parametrize("width", [0, 1, 63, 64, 65, 299, 300, 400, 1000])
def test_width_cuts_or_fills(device: str, width: int) -> None:
    case = random_case(ROWS)
    full = scores_of(case, 301, device)
    scores = scores_of(case, width, device)
    assert scores.shape == (len(ROWS), width)
    common = min(width, 301)
    assert same_bits(scores[:, :common], full[:, :common])
    assert (scores[:, common:] == -torch.inf).all()
    for row, (request, length) in enumerate(ROWS):
        seen = 0 if request < 0 else min(length, width)
        assert scores[row, :seen].isfinite().all()
        assert (scores[row, seen:] == -torch.inf).all()


def test_prescribed_scores_come_out_bit_for_bit(device: str) -> None:
    special = [0.0, -0.0, 1.5, -2.25, 2.0**-149, -(2.0**-140), FLOAT_MAX, -FLOAT_MAX, torch.inf, -torch.inf, torch.nan]
    wanted = torch.tensor(special).repeat(20)[torch.randperm(220)]
    scores = scores_of(case_with_scores(wanted, 16), 220, device)[0]
    assert torch.equal(scores.isnan(), wanted.isnan())
    assert torch.equal(scores.nan_to_num(), wanted.nan_to_num())  # -0.0 may come out as 0.0: they are equal


def test_every_byte_of_keys_and_queries(device: str) -> None:
    """All 256 e4m3 codes: dimension 0 of key j holds code j, of head h of row r a code of its own."""
    case = random_case([(0, 256)] * 32, heads=8, page_size=64)
    codes = torch.arange(256, dtype=torch.uint8)
    case.indexer_cache[:, : 64 * 128] = 0
    pages = case.block_table[0].long()
    case.indexer_cache[pages, : 64 * 128 : 128] = codes.view(4, 64)
    case.q_fp8.zero_()
    case.q_fp8[:, :, 0] = codes.view(32, 8)
    for head in range(8):  # one head at a time: products of two codes have 8 bits, so every score is exact
        case.q_weights.zero_()
        case.q_weights[:, head] = 1
        scores = scores_of(case, 256, device)
        expected = reference.indexer_scores_ragged_cp(*case.tensors, 256)
        assert torch.equal(scores.isnan(), expected.isnan())
        assert torch.equal(scores.nan_to_num(), expected.nan_to_num())


def test_nan_and_infinite_queries(device: str) -> None:
    case = random_case([(0, 100)] * 4)
    case.q_fp8[0, 3, 5] = 0xFF
    case.q_weights[1, 2] = torch.nan
    case.q_weights[2, 2] = torch.inf
    scores = scores_of(case, 100, device)
    expected = reference.indexer_scores_ragged_cp(*case.tensors, 100)
    assert scores[:2].isnan().all()
    assert torch.equal(scores[2].isnan(), expected[2].isnan())  # inf * relu(negative) = inf * 0
    assert scores[2][~expected[2].isnan()].eq(torch.inf).all()
    assert same_bits(scores[3], scores_of(case.rows([3]), 100, device)[0])


@pytest.mark.parametrize("page_size", [16, 64, 128])
def test_keys_without_a_page_are_nan(device: str, page_size: int) -> None:
    case = random_case([(0, 500), (1, 500)], page_size=page_size)
    whole = scores_of(case, 500, device)
    pages = case.indexer_cache.shape[0]
    bad_ids = torch.tensor([-1, pages, 2**31 - 1, -(2**31)], dtype=torch.int32)
    columns = torch.tensor([0, 1, 2, case.block_table.shape[1] - 1])
    table = case.block_table.clone()
    table[0, columns] = bad_ids
    behind = torch.cat([case.indexer_cache, random_indexer_cache(2, page_size)]).to(device)  # valid pages, not ours
    on_device = replace(case.to(device), block_table=table.to(device), indexer_cache=behind[:pages])
    scores = ops.indexer_scores_ragged_cp(*on_device.tensors, 500).cpu()
    missing = torch.isin(torch.arange(500) // page_size, columns)
    assert scores[0, missing].isnan().all()
    assert same_bits(scores[0, ~missing], whole[0, ~missing])
    assert same_bits(scores[1], whole[1])


def test_hostile_rows(device: str) -> None:
    case = random_case([(0, 100), (0, 101), (1, 64), (1, 10), (0, 5), (1, 7)], page_size=16)
    case.req_ids[:] = torch.tensor([2, -7, 2**31 - 1, -(2**31), 0, 1])
    case.kv_lens[:] = torch.tensor([100, 101, 64, 10, -5, 2**31 - 1])
    width = 200
    scores = scores_of(case, width, device)
    assert (scores[:5] == -torch.inf).all()
    capacity = case.block_table.shape[1] * 16
    existing = int((case.block_table[1] >= 0).sum()) * 16
    assert scores[5, :existing].isfinite().all()
    assert scores[5, existing:capacity].isnan().all()  # up to what the table holds, its pages missing
    assert (scores[5, capacity:] == -torch.inf).all()


@pytest.mark.parametrize("heads", [24, 32, 64])
@pytest.mark.parametrize("precision", ["fp32", "f16"])
def test_same_bits_in_batches_of_any_size(device: str, heads: int, precision: str) -> None:
    """A kernel may lay out one or two rows, up to four, and more in different ways."""
    case = random_case([(0, 690 + r) for r in range(13)], heads).encoded_for_f16()
    scores = scores_of(case, 703, device, precision)
    for first, last in ((0, 1), (3, 5), (2, 5), (4, 8), (0, 5), (5, 13), (1, 13)):
        assert same_bits(scores_of(case.rows(slice(first, last)), 703, device, precision), scores[first:last])


def test_rows_do_not_influence_each_other(device: str) -> None:
    rows = [(r % 3, 200 + 17 * r) for r in range(40)]
    case = random_case(rows, heads=24)
    width = 900
    scores = scores_of(case, width, device)
    order = torch.randperm(len(rows))
    assert same_bits(scores_of(case.rows(order), width, device), scores[order])
    for subset in ([0], [39], [3, 4], list(range(0, 40, 3)), list(range(5, 38))):
        assert same_bits(scores_of(case.rows(subset), width, device), scores[subset])
    shorter = replace(case, kv_lens=case.kv_lens - 100)
    common = torch.arange(width) < shorter.kv_lens.unsqueeze(1)
    assert same_bits(scores_of(shorter, width, device)[common], scores[common])


def test_same_bits_from_run_to_run(device: str) -> None:
    case = random_case([(0, 1500), (1, 700)] * 4, heads=64)
    first = scores_of(case, 1500, device)
    for _ in range(20):
        assert same_bits(scores_of(case, 1500, device), first)


def test_thread_counts_give_the_same_bits() -> None:
    case = random_case([(0, 5000), (1, 700)] * 3, heads=8)
    first = scores_of(case, 5000, "cpu")
    before = torch.get_num_threads()
    try:
        for threads in (1, 3, 16):
            torch.set_num_threads(threads)
            assert same_bits(scores_of(case, 5000, "cpu"), first)
    finally:
        torch.set_num_threads(before)


def test_instruction_levels_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    case = random_case(ROWS, heads=40, page_size=32, scale_kind="fp32")
    case.indexer_cache[0, :300] = 0x7F
    results = []
    for level in LEVELS:
        monkeypatch.setenv("SPARSE_CP_OPS_CPU", level)
        results.append(scores_of(case, 301, "cpu"))
    # Products of e4m3 values are exact and all fp32 levels sum in one order; bf16 pairs sum in another one.
    assert torch.equal(results[0].nan_to_num(), results[1].nan_to_num())
    assert torch.equal(results[0].nan_to_num(), results[2].nan_to_num())
    visible = results[0].isfinite()
    assert torch.equal(results[3].isfinite(), visible)
    assert cosine_difference(results[3][visible], results[0][visible]) < 1e-12


def test_unknown_instruction_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSE_CP_OPS_CPU", "sse9")
    with pytest.raises(ValueError, match=r'SPARSE_CP_OPS_CPU: expected auto, generic, .* got "sse9"'):
        scores_of(random_case(ROWS), 10, "cpu")


@pytest.mark.parametrize("heads", [8, 32, 64])
def test_f16_mode_within_its_bound(device: str, heads: int) -> None:
    case = random_case([(0, 700), (1, 600), (0, 650)], heads)
    q = torch.randn(3, heads, 128)
    q8 = (q * (0.875 / q.abs().amax(-1, keepdim=True))).to(torch.float8_e4m3fn)
    case = replace(case, q_fp8=q8.view(torch.uint8))
    scores = scores_of(case, 700, device, "f16").double()
    expected = reference.indexer_scores_ragged_cp(*case.tensors, 700, "f16").double()
    bound = summed_magnitudes(case, 700).double() * 2**-8
    for row, length in enumerate([700, 600, 650]):
        error = (scores - expected)[row, :length].abs()
        assert (error <= bound[row, :length]).all()
        assert error.max() <= 6e-3 * expected[row, :length].std()


def test_many_rows_and_none(device: str) -> None:
    """More rows than a grid dimension of 65,535 allows; no rows, requests, pages or columns."""
    rows = 70_000
    one = random_case([(0, 40)], heads=8, page_size=16)
    case = one.rows(torch.zeros(rows, dtype=torch.long))
    case.kv_lens[:] = torch.arange(rows) % 41
    scores = scores_of(case, 40, device)
    expected = scores_of(one, 40, device).expand(rows, 40)
    visible = torch.arange(40) < case.kv_lens.unsqueeze(1)
    assert torch.equal(scores, expected.masked_fill(~visible, -torch.inf))

    assert scores_of(one.rows([]), 40, device).shape == (0, 40)
    without_requests = replace(one, block_table=one.block_table[:0])
    assert (scores_of(without_requests, 40, device) == -torch.inf).all()
    assert (scores_of(replace(one, block_table=one.block_table[:, :0]), 40, device) == -torch.inf).all()
    assert scores_of(replace(one, indexer_cache=one.indexer_cache[:0]), 40, device).isnan().all()


@pytest.mark.cuda
@pytest.mark.parametrize(("heads", "precision"), [(8, "fp32"), (64, "fp32"), (64, "f16")])
def test_many_blocks_of_few_keys(heads: int, precision: str) -> None:
    """Most runs of a request are of one row with less than a tile: warps that wait for nothing may not run ahead."""
    requests = 7
    case = random_case([(r % requests, r * 2) for r in range(97)], heads).encoded_for_f16().to("cuda")
    runs = 6000
    sizes = torch.tensor([1, 1, 1, 1, 2, 3, 4, 5, 8, 12, 13])[torch.randint(11, (runs,))]
    request = torch.randint(requests, (runs,)).repeat_interleave(sizes)
    index = (request + requests * torch.randint(97 // requests, request.shape)).cuda()
    many = case.rows(index)
    for _ in range(5):
        actual = ops.indexer_scores_ragged_cp(*many.tensors, 200, precision)
        expected = ops.indexer_scores_ragged_cp(*case.tensors, 200, precision)[index]
        assert same_bits(actual, expected)


@pytest.mark.cuda
@pytest.mark.parametrize("rows", [1, 31, 32, 33, 127, 128, 129])
@pytest.mark.parametrize("precision", ["fp32", "f16"])
def test_plans_of_few_rows(rows: int, precision: str) -> None:
    """Runs of a request of all lengths, pads among them: the same scores as row by row."""
    requests = 5
    case = random_case([(r % requests, 97 * r % 1400) for r in range(40)], 64).encoded_for_f16().to("cuda")
    alone = [ops.indexer_scores_ragged_cp(*case.rows([r]).tensors, 1400, precision) for r in range(40)]
    for _ in range(6):
        sizes = torch.tensor([1, 1, 2, 3, 4, 5, 12, 13, 25, 40])[torch.randint(10, (rows,))]
        request = torch.randint(requests, (rows,)).repeat_interleave(sizes)[:rows]
        index = request + requests * torch.randint(40 // requests, request.shape)
        part = case.rows(index.cuda())
        pads = (torch.rand(rows) < 0.1).cuda()
        part = replace(part, req_ids=part.req_ids.masked_fill(pads, -1))
        expected = torch.cat([alone[r] for r in index.tolist()])
        expected[pads] = -torch.inf
        assert same_bits(ops.indexer_scores_ragged_cp(*part.tensors, 1400, precision), expected)


def test_views_are_read_in_place(device: str) -> None:
    case = random_case(ROWS, page_size=16).to(device)
    layers = torch.full((case.indexer_cache.shape[0], 3, 16 * 132), 0x7F, dtype=torch.uint8, device=device)
    layers[:, 1] = case.indexer_cache
    wide = torch.full((case.block_table.shape[0], 50), -9, dtype=torch.int32, device=device)
    wide[:, 7 : 7 + case.block_table.shape[1]] = case.block_table
    viewed = replace(case, indexer_cache=layers[:, 1], block_table=wide[:, 7 : 7 + case.block_table.shape[1]])
    assert same_bits(scores_of(viewed, 301, device), scores_of(case, 301, device))


def test_cache_above_two_gibibytes(device: str) -> None:
    """Pages far apart: offsets need 64 bits."""
    page_size = 16
    case = random_case([(0, 60), (0, 64)], page_size=page_size)
    small = random_indexer_cache(4, page_size)
    case = replace(case, indexer_cache=small, block_table=torch.tensor([[3, 0, 2, 1]], dtype=torch.int32))
    on_device = replace(case.to(device), indexer_cache=far_apart(small, device))
    scores = ops.indexer_scores_ragged_cp(*on_device.tensors, 64).cpu()
    assert same_bits(scores, scores_of(case, 64, device))
    assert torch.equal(
        ops.indexer_topk_ragged_cp(*on_device.tensors, 64), ops.indexer_topk_ragged_cp(*case.to(device).tensors, 64)
    )


def test_block_tables_larger_than_the_requests(device: str) -> None:
    case = random_case([(0, 100), (1, 50)], page_size=64)
    table = random_block_table([100, 50], 64, spare_pages=0, width=40)
    case = replace(case, block_table=table, indexer_cache=random_indexer_cache(num_pages([100, 50], 64, 0), 64))
    expected = reference.indexer_scores_ragged_cp(*case.tensors, 128)
    scores = scores_of(case, 128, device)
    visible = expected > -torch.inf
    assert torch.equal(scores > -torch.inf, visible)
    assert cosine_difference(scores[visible], expected[visible]) < 5e-6
