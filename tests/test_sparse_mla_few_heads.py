"""sparse_mla_fp8_cp on CUDA with few heads or few rows: every split, empty parts, replays with other lengths."""

import pytest
import torch
from attention_cases import SCALE, assert_same_bits, assert_within_bounds, random_case
from builders import num_pages, random_block_table, random_mla_cache
from test_sparse_mla_fp8_cp_cuda import assert_matches, slot_case
from torch import Tensor

from sparse_cp_ops import ops, reference

pytestmark = pytest.mark.cuda

HEADS = [8, 16, 32, 64, 128]


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 9, 17, 33, 70, 140])
def test_row_counts_that_split_differently(heads: int, rows: int) -> None:
    """From one row, where most blocks share a list, to more rows than multiprocessors."""
    assert_matches(slot_case(rows, heads, 1024, scale_kind="fp32"), SCALE, batch_invariant=False)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("width", [64, 128, 192, 320, 448, 576, 1984])
def test_widths_that_parts_do_not_divide(heads: int, width: int) -> None:
    for batch_invariant in (True, False):
        assert_matches(slot_case(2, heads, width, scale_kind="fp32"), SCALE, batch_invariant)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("rows", [1, 6, 40])
def test_usable_keys_in_few_parts(heads: int, rows: int) -> None:
    """0, 1, 63, 64, 65 keys at the front, at the end and anywhere: most parts, blocks and workers have nothing."""
    width = 1024
    q, cache, indices, *_ = slot_case(rows, heads, width, scale_kind="fp32")
    for count in (0, 1, 63, 64, 65):
        keys = torch.randint(0, 4096, (rows, count), dtype=torch.int32, device="cuda")
        for place in (torch.arange(count), torch.arange(width - count, width), torch.randperm(width)[:count]):
            indices[:] = -1
            indices[:, place.cuda()] = keys
            for batch_invariant in (True, False):
                assert_matches((q, cache, indices, None, None, None), SCALE, batch_invariant)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("full", [0.1, 0.5, 0.9])
def test_steps_without_keys(heads: int, full: float) -> None:
    """Long lists in which runs of 64 entries are unused: one worker is through with its steps at once, another not.

    Over 32 steps a ring of key slots goes round several times, so a worker that runs ahead must not take what a slot
    held a round earlier for its own.
    """
    q, cache, indices, *_ = slot_case(150, heads, 2048, scale_kind="fp32")
    steps = indices.view(150, 32, 64)
    steps[torch.rand(150, 32, device="cuda") >= full] = -1
    steps[torch.rand(150, 32, device="cuda") < 0.1, 1:] = -1  # steps of one key
    for rows in (150, 16, 3):
        for batch_invariant in (True, False):
            case = (q[:rows], cache, indices[:rows], None, None, None)
            assert_matches(case, SCALE, batch_invariant)


@pytest.mark.parametrize("heads", [8, 16, 32, 128])
@pytest.mark.parametrize("scale_kind", ["ue8m0", "fp32", "wild", "tiny"])
def test_rising_logits_and_scales(heads: int, scale_kind: str) -> None:
    """Peaks and the references of the scale tiles move in every step, or in the first one only."""
    q, cache, _, *_ = slot_case(1, heads, 64, scale_kind=scale_kind)
    keys = reference.dequantize_kv(cache.cpu(), torch.arange(4096)).double()
    logits = (q[0, 0].cpu().double() @ keys.T).argsort()
    scales = cache.view(-1, 656)[:, 512:516].contiguous().view(torch.float32).squeeze(1).cpu().argsort()
    orders = torch.stack([logits[-512:], logits[-512:].flip(0), scales[-512:], scales[-512:].flip(0)]).int().cuda()
    for batch_invariant in (True, False):
        assert_matches((q.expand(4, -1, -1), cache, orders, None, None, None), SCALE, batch_invariant)


def test_nan_stays_in_its_row_and_head_across_parts() -> None:
    q, cache, indices, *_ = slot_case(4, 32, 1024)
    indices.clamp_(min=1, max=4095)
    indices[2, 900] = 0
    cache[0, 0, 300] = 0x7F
    q[1, 5, 17] = torch.nan
    out, lse = ops.sparse_mla_fp8_cp(q, cache, indices, None, None, None, SCALE, "high", False)
    wrong = torch.zeros(4, 32, dtype=torch.bool, device="cuda")
    wrong[2], wrong[1, 5] = True, True
    assert torch.equal(lse.isnan(), wrong)
    assert torch.equal(out.isnan().any(-1), wrong)
    assert torch.equal(out.isnan().all(-1), wrong)


@pytest.mark.parametrize("heads", [8, 16, 32])
@pytest.mark.parametrize("start", [0, 3, 8])
def test_strided_queries(heads: int, start: int) -> None:
    """Rows that are not 16-byte aligned are read value by value."""
    _, cache, indices, *_ = slot_case(9, heads, 128)
    wide = torch.randn(9, heads + 6, 700, device="cuda").bfloat16()
    view = wide[:, 3 : 3 + heads, start : start + 576]
    for batch_invariant in (True, False):
        assert_matches((view, cache, indices, None, None, None), SCALE, batch_invariant)


@pytest.mark.parametrize("heads", [8, 16, 32])
def test_bits_do_not_depend_on_the_batch(heads: int) -> None:
    q, cache, indices, *_ = slot_case(300, heads, 512, scale_kind="fp32")
    out, lse = ops.sparse_mla_fp8_cp(q, cache, indices, None, None, None, SCALE)
    for rows in ([5], list(range(40)), torch.randperm(300).tolist(), [7] * 9):
        few = ops.sparse_mla_fp8_cp(q[rows], cache, indices[rows], None, None, None, SCALE)
        assert_same_bits(few, (out[rows], lse[rows]))


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("rows", [1, 4, 16])
def test_replays_with_other_lengths(heads: int, rows: int) -> None:
    """Each replay gives the bits of an eager call, whatever the replays before and the memory behind them held."""
    lengths = [2000] * rows
    cache = random_mla_cache(num_pages(lengths, 64), 64, "fp32").cuda()
    table = random_block_table(lengths, 64).cuda()
    req_ids = torch.arange(rows, dtype=torch.int32, device="cuda")
    kv_lens = torch.full((rows,), 2000, dtype=torch.int32, device="cuda")
    indices = torch.randint(0, 2000, (rows, 1024), dtype=torch.int32, device="cuda")
    q = torch.randn(rows, heads, 576, device="cuda").bfloat16()

    def call() -> tuple[Tensor, Tensor]:
        return ops.sparse_mla_fp8_cp(q, cache, indices, table, req_ids, kv_lens, SCALE, "high", False)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    for length in (2000, 0, 1, 64, 65, 1999, 2000):
        kv_lens[rows // 2 :] = length
        captured[0].fill_(torch.nan)
        captured[1].fill_(torch.nan)
        for _ in range(3):
            graph.replay()
        assert_same_bits(captured, call())
        exact = reference.sparse_mla_fp8_cp(q, cache, indices, table, req_ids, kv_lens, SCALE)
        assert_within_bounds(*captured, *(x.cpu() for x in exact))


@pytest.mark.parametrize("heads", [64, 128])
@pytest.mark.parametrize("scale_kind", ["ue8m0", "fp32"])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_more_rows_from_a_large_cache(heads: int, scale_kind: str, batch_invariant: bool) -> None:
    """Decode batches of more blocks than multiprocessors, from more tokens than are worth turning into 16-bit rows."""
    for rows in (70, 150):
        case = slot_case(rows, heads, 512, 81920, scale_kind)
        case[2][3, 64:] = -1
        case[2][4] = -1
        out, lse = ops.sparse_mla_fp8_cp(*case, SCALE, "high", batch_invariant)
        exact_out, exact_lse = reference.sparse_mla_fp8_cp(*case, SCALE)
        assert_within_bounds(out, lse, exact_out.cpu(), exact_lse.cpu())
        assert_same_bits(ops.sparse_mla_fp8_cp(*case, SCALE, "high", batch_invariant), (out, lse))


def test_streams_side_by_side() -> None:
    """Two launches at the same time share nothing but their inputs."""
    cases = [slot_case(rows, 128, 1024, scale_kind="fp32") for rows in (1, 4)]
    alone = [ops.sparse_mla_fp8_cp(*case, SCALE, "high", False) for case in cases]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    for _ in range(30):
        results = []
        for stream, case in zip(streams, cases, strict=True):
            with torch.cuda.stream(stream):
                results.append(ops.sparse_mla_fp8_cp(*case, SCALE, "high", False))
        torch.cuda.synchronize()
        for mine, theirs in zip(results, alone, strict=True):
            assert_same_bits(mine, theirs)


def test_positions_of_many_requests() -> None:
    """A decode batch: a row a request, lengths from 0 to more than the list."""
    rows = [(request, length, min(length, 1024)) for request, length in enumerate([0, 1, 63, 64, 65, 900, 1500, 2100])]
    for heads in (16, 64):
        case = random_case(rows, heads, 1024)
        out, lse = ops.sparse_mla_fp8_cp(*case.to("cuda").tensors, SCALE, "high", False)
        assert_within_bounds(out, lse, *reference.sparse_mla_fp8_cp(*case.tensors, SCALE))
