"""Row tensors of more than 2^31 elements (bytes for uint8), as long prompts have them: a few rows, repeated."""

from collections.abc import Iterator

import attention_cases
import indexer_cases
import pytest
import torch
from builders import random_mla_cache
from record_cases import rope_table
from torch import Tensor

from sparse_cp_ops import ops

pytestmark = pytest.mark.cuda

PERIOD = 97  # different rows


@pytest.fixture(autouse=True)
def memory_for_others() -> Iterator[None]:
    """Up to 10 GB a test, which would stay in the pool of this process."""
    yield
    torch.cuda.empty_cache()


def rows_beyond(elements_per_row: int) -> int:
    """As many rows as have 2^31 elements, and three periods more."""
    return 2**31 // elements_per_row + 3 * PERIOD


def tiled(few: Tensor, rows: int) -> Tensor:
    return few[torch.arange(rows, device="cuda") % PERIOD]


def assert_tiled(actual: Tensor, few: Tensor) -> None:
    """The first rows, and the last ones, whose offsets need 64 bits."""
    rows = actual.shape[0]
    for start in (0, rows - 2 * PERIOD):
        index = torch.arange(start, start + 2 * PERIOD, device="cuda")
        bits, expected = actual[index].view(torch.uint8), few[index % PERIOD].view(torch.uint8)
        assert torch.equal(bits, expected)


def bf16(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda").bfloat16()


def positions() -> Tensor:
    return torch.randint(0, 100, (PERIOD,), dtype=torch.int32, device="cuda")


def test_rope_() -> None:
    few, position, table = bf16(PERIOD, 128, 576), positions(), rope_table().cuda()
    rows = rows_beyond(128 * 576)
    x = tiled(few, rows)
    ops.rope_(x[..., 512:], tiled(position, rows), table, True)
    ops.rope_(few[..., 512:], position, table, True)
    assert_tiled(x, few)


@pytest.mark.parametrize("interleaved", [True, False])
def test_rope_of_very_long_rows(interleaved: bool) -> None:
    """More heads than a grid has blocks in y, and more pairs than a block has threads: the same as rows of one head."""
    heads, dim = 66_000, 1032
    x, table = bf16(1, heads, dim), rope_table(dim).cuda()
    rows, position = x.clone().view(heads, 1, dim), torch.full((heads,), 7, dtype=torch.int32, device="cuda")
    ops.rope_(x, position[:1], table, interleaved)
    ops.rope_(rows, position, table, interleaved)
    assert torch.equal(x.view(rows.shape), rows)


def test_quant_q_k_cp() -> None:
    heads = 64
    rows = rows_beyond(heads * 128)
    q, k = bf16(PERIOD, heads, 128), bf16(PERIOD, 128)
    weights, position = torch.randn(PERIOD, heads, device="cuda"), positions()
    few, many = (torch.zeros(n, 132, dtype=torch.uint8, device="cuda") for n in (PERIOD, rows))
    options = (False, True, 0.01, "ue8m0")
    expected = ops.quant_q_k_cp(q, k, weights, position, rope_table().cuda(), few, *options)
    inputs = [tiled(x, rows) for x in (q, k, weights, position)]
    actual = ops.quant_q_k_cp(*inputs, rope_table().cuda(), many, *options)
    for mine, theirs in zip((*actual, many), (*expected, few), strict=True):
        assert_tiled(mine, theirs)


def test_records() -> None:
    """pack_mla_kv, and the records through write_kv_cache into a cache of the same size."""
    rows = rows_beyond(656) // 64 * 64
    latent, k_pe, position, table = bf16(PERIOD, 512), bf16(PERIOD, 64), positions(), rope_table().cuda()
    few, many = (torch.zeros(n, 656, dtype=torch.uint8, device="cuda") for n in (PERIOD, rows))
    ops.pack_mla_kv(latent, k_pe, position, table, few, True, "ue8m0")
    ops.pack_mla_kv(*(tiled(x, rows) for x in (latent, k_pe, position)), table, many, True, "ue8m0")
    assert_tiled(many, few)
    cache = torch.zeros(rows // 64, 64, 656, dtype=torch.uint8, device="cuda")
    ops.write_kv_cache(many, None, None, None, None, cache, None, torch.arange(rows, device="cuda"))
    assert_tiled(cache.view(rows, 656), few)


def test_dequantize_kv() -> None:
    cache, slots = random_mla_cache(8, 16).cuda(), torch.randint(-2, 130, (PERIOD,), device="cuda")
    actual = ops.dequantize_kv(cache, tiled(slots, rows_beyond(576)))
    assert_tiled(actual, ops.dequantize_kv(cache, slots))


def indexer_rows(width: int) -> indexer_cases.IndexerCase:
    return indexer_cases.random_case([(row % 3, 1 + row * width // PERIOD) for row in range(PERIOD)], heads=8)


def test_indexer_scores_ragged_cp() -> None:
    width = 31_000
    case = indexer_rows(700).to("cuda")
    rows = rows_beyond(width)
    many = case.rows(torch.arange(rows, device="cuda") % PERIOD)
    actual = ops.indexer_scores_ragged_cp(*many.tensors, width)
    assert_tiled(actual, ops.indexer_scores_ragged_cp(*case.tensors, width))


def test_indexer_topk_ragged_cp() -> None:
    """Scores of all rows exceed 2^31 as well: they are taken in pieces."""
    topk = 2048
    case = indexer_rows(2300).to("cuda")
    rows = rows_beyond(topk)
    many = case.rows(torch.arange(rows, device="cuda") % PERIOD)
    actual = ops.indexer_topk_ragged_cp(*many.tensors, topk, 0)
    assert_tiled(actual, ops.indexer_topk_ragged_cp(*case.tensors, topk, 0))


@pytest.mark.parametrize("batch_invariant", [True, False])
def test_sparse_mla_fp8_cp(batch_invariant: bool) -> None:
    lists = [(row % 3, 1 + 5 * row, min(64, row)) for row in range(PERIOD)]
    case = attention_cases.random_case(lists, heads=128, width=64).to("cuda")
    rows = rows_beyond(128 * 512)
    many = case.rows(torch.arange(rows, device="cuda") % PERIOD)
    actual = ops.sparse_mla_fp8_cp(*many.tensors, 0.05, "high", batch_invariant)
    # Without batch invariance, rows are split by their number: those of all rows are not.
    expected = ops.sparse_mla_fp8_cp(*case.tensors, 0.05, "high", True)
    for mine, theirs in zip(actual, expected, strict=True):
        assert_tiled(mine, theirs)


def test_merge_attention_states() -> None:
    rows = rows_beyond(2 * 128 * 512)
    outs, lses = bf16(2, PERIOD, 128, 512), torch.randn(2, PERIOD, 128, device="cuda")
    index = torch.arange(rows, device="cuda") % PERIOD
    actual = ops.merge_attention_states(outs[:, index], lses[:, index])
    for mine, theirs in zip(actual, ops.merge_attention_states(outs, lses), strict=True):
        assert_tiled(mine, theirs)
