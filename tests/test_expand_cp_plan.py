import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from sparse_cp_ops import ops, reference

INT32_MAX, INT32_MIN = 2**31 - 1, -(2**31)
PROPERTY = settings(
    max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
SPLITS = ["zigzag", "interleave"]


def table_of(requests: list[tuple[int, int]], device: str = "cpu") -> Tensor:
    return torch.tensor(requests, dtype=torch.int32, device=device).reshape(-1, 2)


def needed_rows(table: Tensor, cp_size: int, split: str) -> int:
    new_lens = table[:, 1].clamp(min=0).tolist()
    if split == "interleave":
        return -(-sum(new_lens) // cp_size)
    return sum(2 * -(-n // (2 * cp_size)) for n in new_lens)


def assert_matches_reference(table: Tensor, rank: int, size: int, split: str, rows: int, tokens: int) -> None:
    result = ops.expand_cp_plan(table, rank, size, split, rows, tokens)
    expected = reference.expand_cp_plan(table, rank, size, split, rows, tokens)
    for name, mine, theirs in zip(expected._fields, result, expected, strict=True):
        assert mine.device == table.device
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}")


lengths = st.one_of(st.integers(0, 5), st.sampled_from([15, 16, 17, 31, 64, 100]))
requests_of = st.lists(st.tuples(st.integers(-1, 300), st.one_of(lengths, st.integers(-3, -1))), max_size=7)


@PROPERTY
@given(
    requests=requests_of,
    size=st.sampled_from([1, 2, 3, 4, 8]),
    rank_seed=st.integers(0, 7),
    split=st.sampled_from(SPLITS),
    slack=st.tuples(st.integers(-9, 9), st.integers(-9, 9)),
)
def test_matches_reference(
    device: str,
    requests: list[tuple[int, int]],
    size: int,
    rank_seed: int,
    split: str,
    slack: tuple[int, int],
) -> None:
    table = table_of(requests, device)
    rows = max(0, needed_rows(table, size, split) + slack[0])
    tokens = max(0, int(table[:, 1].clamp(min=0).sum()) + slack[1])
    assert_matches_reference(table, rank_seed % size, size, split, rows, tokens)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("requests", [255, 256, 257, 1000, 3000])
def test_many_requests(device: str, split: str, requests: int) -> None:
    """More requests than a thread block has threads; most of them empty in the second half."""
    new_lens = torch.randint(0, 4, (requests,), dtype=torch.int32)
    new_lens[requests // 2 :] *= torch.rand(requests - requests // 2) < 0.05
    table = torch.stack([torch.randint(0, 50, (requests,), dtype=torch.int32), new_lens], dim=1).to(device)
    rows = needed_rows(table, 3, split)
    assert_matches_reference(table, 1, 3, split, rows, int(new_lens.sum()))
    assert_matches_reference(table, 2, 3, split, rows // 2, int(new_lens.sum()) + 17)


@pytest.mark.parametrize("split", SPLITS)
def test_70000_rows(device: str, split: str) -> None:
    """Every length of the plan is above what a grid's y and z dimensions hold."""
    table = table_of([(3, 69_000), (0, 1), (100, 0), (7, 71_000)], device)
    assert_matches_reference(table, 1, 2, split, 70_005, 140_003)


def test_zigzag_by_hand(device: str) -> None:
    """One request of 14 tokens on two ranks: padded to 16, rank 0 holds 0-3 and 12-15, rank 1 holds 4-11."""
    table = table_of([(0, 14)], device)
    first, second = (ops.expand_cp_plan(table, rank, 2, "zigzag", 8, 14) for rank in (0, 1))
    assert first.positions.tolist() == [0, 1, 2, 3, 12, 13, 0, 0]
    assert first.token_ids.tolist() == [0, 1, 2, 3, 12, 13, -1, -1]
    assert first.kv_lens.tolist() == [1, 2, 3, 4, 13, 14, 0, 0]
    assert first.req_ids.tolist() == [0] * 6 + [-1] * 2
    assert second.positions.tolist() == list(range(4, 12))
    assert first.restore.tolist() == [0, 1, 2, 3, 8, 9, 10, 11, 12, 13, 14, 15, 4, 5]
    assert first.gathered_positions.tolist() == first.positions.tolist() + second.positions.tolist()


def test_interleave_by_hand(device: str) -> None:
    rows = ops.expand_cp_plan(table_of([(5, 2), (0, 3)], device), 1, 2, "interleave", 3, 5)
    assert rows.req_ids.tolist() == [0, 1, -1]
    assert rows.positions.tolist() == [6, 1, 0]
    assert rows.token_ids.tolist() == [1, 3, -1]
    assert rows.restore.tolist() == [0, 3, 1, 4, 2]


@pytest.mark.parametrize("split", SPLITS)
def test_lengths_that_leave_int32(device: str, split: str) -> None:
    """Rows exist as long as kv_len fits int32; the sum of the lengths may exceed it."""
    table = table_of([(INT32_MAX - 2, 5), (INT32_MAX, 1), (INT32_MIN, INT32_MIN), (7, 3)], device)
    assert_matches_reference(table, 0, 2, split, needed_rows(table, 2, split), 9)
    huge = table_of([(INT32_MAX, INT32_MAX)] * 5, device)
    rows = ops.expand_cp_plan(huge, 1, 4, split, 64, 64)
    # Position INT32_MAX and above have no row, here all of them.
    for name, pad in [("req_ids", -1), ("positions", 0), ("kv_lens", 0), ("token_ids", -1), ("restore", -1)]:
        assert (getattr(rows, name) == pad).all(), name
    long = ops.expand_cp_plan(table_of([(0, INT32_MAX)] * 5, device), 1, 4, split, 64, 64)
    chunk = -(-INT32_MAX // 8)
    first = [chunk + i for i in range(64)] if split == "zigzag" else [4 * i + 1 for i in range(64)]
    assert long.positions.tolist() == first
    assert long.restore[3] == (3 if split == "zigzag" else 3 * 64)


@pytest.mark.parametrize("split", SPLITS)
def test_empty(device: str, split: str) -> None:
    for requests in ([], [(3, 0)]):
        assert_matches_reference(table_of(requests, device), 0, 2, split, 0, 0)
        assert_matches_reference(table_of(requests, device), 1, 2, split, 5, 3)


def test_value_checks(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSE_CP_OPS_CHECK", "1")
    table = table_of([(0, 14), (3, 1)], device)
    ops.expand_cp_plan(table, 0, 2, "zigzag", 10, 15)
    ops.expand_cp_plan(table, 0, 2, "interleave", 8, 15)
    for bad, split, rows, tokens, message in [
        (table, "zigzag", 9, 15, "local_rows: expected at least 10 for the request table, got 9"),
        (table, "interleave", 7, 15, "local_rows: expected at least 8 for the request table, got 7"),
        (table, "zigzag", 10, 14, "total_tokens: expected at least 15 for the request table, got 14"),
        (
            table_of([(0, 1), (0, -2)], device),
            "zigzag",
            8,
            8,
            r"request_table\[1\]: expected lengths >= 0, got \(0, -2",
        ),
        (table_of([(INT32_MAX, 1)], device), "zigzag", 8, 8, r"request_table\[0\]: expected prefix_len \+ new_len to"),
    ]:
        with pytest.raises(ValueError, match=message):
            ops.expand_cp_plan(bad, 0, 2, split, rows, tokens)


def test_arguments_are_named_in_errors(device: str) -> None:
    table = table_of([(0, 4), (1, 2)], device)
    with pytest.raises(TypeError, match=r"request_table: expected a torch\.Tensor, got list"):
        ops.expand_cp_plan([[0, 4]], 0, 1, "zigzag", 4, 4)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="cp_rank: expected int, got float"):
        ops.expand_cp_plan(table, 0.0, 1, "zigzag", 4, 4)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="split: expected str, got int"):
        ops.expand_cp_plan(table, 0, 1, 1, 4, 4)  # type: ignore[arg-type]
    for arguments, message in [
        ((table[0], 0, 1, "zigzag", 4, 4), "request_table: expected 2 dimensions, got 1"),
        ((table.long(), 0, 1, "zigzag", 4, 4), "request_table: expected dtype int32, got int64"),
        ((table.repeat(1, 2), 0, 1, "zigzag", 4, 4), r"request_table: expected shape \[\*, 2\], got \[2, 4\]"),
        ((table.t(), 0, 1, "zigzag", 4, 4), "request_table: expected a contiguous tensor"),
        ((table, 0, 0, "zigzag", 4, 4), r"cp_size: expected a size in \[1, 1048576\], got 0"),
        ((table, 2, 2, "zigzag", 4, 4), r"cp_rank: expected a rank in \[0, 2\), got 2"),
        ((table, -1, 2, "zigzag", 4, 4), r"cp_rank: expected a rank in \[0, 2\), got -1"),
        ((table, 0, 2, "ring", 4, 4), "split: expected 'zigzag' or 'interleave', got 'ring'"),
        ((table, 0, 2, "zigzag", -1, 4), "local_rows: expected a count >= 0"),
        ((table, 0, 4, "zigzag", 2**30, 4), "local_rows: expected a count .* cp_size \\* local_rows in int32"),
        ((table, 0, 2, "zigzag", 4, -1), "total_tokens: expected an int32 count >= 0, got -1"),
    ]:
        with pytest.raises(ValueError, match=message):
            ops.expand_cp_plan(*arguments)


def test_opcheck(device: str) -> None:
    op = torch.ops.sparse_cp_ops.expand_cp_plan.default
    torch.library.opcheck(op, (table_of([(3, 14), (0, 2)], device), 1, 2, "zigzag", 10, 16))
    torch.library.opcheck(op, (table_of([(3, 14)], device), 1, 2, "interleave", 7, 14))


def test_compiles_once_for_all_lengths(device: str) -> None:
    counter = CompileCounter()

    def plan(table: Tensor, rows: int, tokens: int) -> Tensor:
        return ops.expand_cp_plan(table, 1, 2, "zigzag", rows, tokens).positions + 1

    torch.compiler.reset()
    compiled = torch.compile(plan, fullgraph=True, backend=counter)
    for n in range(2, 52):
        table = table_of([(n, 4 * n)] * 2, device)
        torch.testing.assert_close(compiled(table, 4 * n, 8 * n), plan(table, 4 * n, 8 * n))
    assert counter.frame_count - 1 <= 2  # recompiles


@pytest.mark.cuda
@pytest.mark.parametrize("split", SPLITS)
def test_graph_replays_with_other_lengths(split: str) -> None:
    table = table_of([(3, 14), (0, 9)], "cuda")
    ops.expand_cp_plan(table, 1, 2, split, 18, 30)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rows = ops.expand_cp_plan(table, 1, 2, split, 18, 30)
    for requests in [[(1, 1), (7, 22)], [(0, 0), (0, 0)], [(2, 40), (5, 1)]]:
        table.copy_(table_of(requests))
        graph.replay()
        for mine, theirs in zip(rows, reference.expand_cp_plan(table, 1, 2, split, 18, 30), strict=True):
            assert torch.equal(mine, theirs)
