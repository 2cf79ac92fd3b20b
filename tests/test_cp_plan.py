"""CpPlan: the host side of planning, against index maps made token by token."""

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stream_gate import StreamGate
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from sparse_cp_ops.context_parallel import CpPlan, batch_work
from sparse_cp_ops.context_parallel.split import SPLITS

INT32_MAX = 2**31 - 1
PAGE = 64
PROPERTY = settings(
    max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
ROW_FIELDS = ["req_ids", "positions", "kv_lens", "token_ids", "gathered_req_ids", "gathered_positions", "restore"]

lengths = st.one_of(st.integers(0, 9), st.sampled_from([15, 16, 17, 63, 64, 65, 130]))
prefixes = st.one_of(st.just(0), st.integers(0, 3 * PAGE))
batches = st.lists(st.tuples(lengths, prefixes), max_size=6)
sizes = st.sampled_from([1, 2, 3, 4, 8])
splits = st.sampled_from(sorted(SPLITS))


def lens(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@PROPERTY
@given(batch=batches, size=sizes, split=splits)
def test_every_token_is_owned_once_and_comes_back(
    device: str, batch: list[tuple[int, int]], size: int, split: str
) -> None:
    new, prefix = [n for n, _ in batch], [p for _, p in batch]
    plans = [CpPlan.build(lens(*new), lens(*prefix), rank, size, split, device=device) for rank in range(size)]
    expected = SPLITS[split](new, size)
    request_of = [b for b, n in enumerate(new) for _ in range(n)]
    position_of = [p + i for n, p in batch for i in range(n)]

    token_ids = torch.cat([plan.token_ids.cpu() for plan in plans])
    assert token_ids.tolist() == expected.rearrange.tolist()
    assert sorted(token_ids[token_ids >= 0].tolist()) == list(range(sum(new)))
    x = torch.randn(sum(new), 3)
    padded = torch.cat([x, torch.full((1, 3), torch.nan)])  # token_id -1 reads the last row
    for plan in plans:
        assert torch.equal(padded[token_ids.long()][plan.restore.cpu().long()], x)
        assert plan.restore.tolist() == expected.restore.tolist()
        # All ranks agree about everything but their own rows.
        assert (plan.local_rows, plan.total_tokens, plan.num_requests) == (expected.local_rows, sum(new), len(new))
        assert (plan.used_rows, plan.used_tokens) == (plan.local_rows, plan.total_tokens)
        assert torch.equal(plan.gathered_req_ids, plans[0].gathered_req_ids)
        assert torch.equal(plan.gathered_positions, plans[0].gathered_positions)
        assert plan.request_table.tolist() == [[p, n] for n, p in batch]
        rows = slice(plan.cp_rank * plan.local_rows, (plan.cp_rank + 1) * plan.local_rows)
        assert torch.equal(plan.gathered_req_ids[rows], plan.req_ids)
        assert torch.equal(plan.gathered_positions[rows], plan.positions)
        own = plan.token_ids.tolist()
        assert plan.req_ids.tolist() == [request_of[t] if t >= 0 else -1 for t in own]
        assert plan.positions.tolist() == [position_of[t] if t >= 0 else 0 for t in own]
        assert plan.kv_lens.tolist() == [position_of[t] + 1 if t >= 0 else 0 for t in own]


@PROPERTY
@given(batch=batches, size=sizes)
def test_number_of_pads(batch: list[tuple[int, int]], size: int) -> None:
    """Interleave pads fewer than S rows in all, zigzag fewer than 2S a request."""
    new = [n for n, _ in batch]
    rows = {name: CpPlan.build(new, [0] * len(new), 0, size, name).local_rows * size for name in SPLITS}
    assert 0 <= rows["interleave"] - sum(new) < size
    assert 0 <= rows["zigzag"] - sum(new) <= (2 * size - 1) * len(new)


@pytest.mark.parametrize("split", sorted(SPLITS))
def test_causal_work_is_balanced(split: str) -> None:
    """Zigzag: every rank sees the same number of keys; interleave: a key more a row from one rank to the next."""
    work = [int(CpPlan.build(lens(4096), lens(0), rank, 4, split).kv_lens.sum()) for rank in range(4)]
    assert max(work) - min(work) == (0 if split == "zigzag" else 3 * 1024)


def test_lengths_as_sequences_and_strided_views() -> None:
    interleaved = lens(5, 100, 7, 200)
    plans = [
        CpPlan.build([5, 7], (100, 200), 1, 2),
        CpPlan.build(lens(5, 7), lens(100, 200), 1, 2),
        CpPlan.build(interleaved[::2], interleaved[1::2], 1, 2),
        CpPlan.build(interleaved[::2].numpy(), interleaved[1::2].numpy(), 1, 2),
    ]
    for name in [*ROW_FIELDS, "request_table"]:
        assert all(torch.equal(getattr(plan, name), getattr(plans[0], name)) for plan in plans), name


def test_batch_work() -> None:
    assert batch_work([3, 0, 2], [10, 5, 0]) == (5, 11 + 12 + 13 + 1 + 2)
    assert batch_work([], []) == (0, 0)
    assert batch_work([2**30], [2**30 - 1]) == (2**30, 2**30 * (2**30 - 1) + 2**29 * (2**30 + 1))
    with pytest.raises(ValueError, match=r"prefix_lens: expected shape \[1\]"):
        batch_work([1], [1, 2])


ERRORS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"new_lens": lens(3, -2)}, ValueError, r"new_lens\[1\]: expected a length >= 0, got -2"),
    ({"prefix_lens": lens(-1, 0)}, ValueError, r"prefix_lens\[0\]: expected a length >= 0, got -1"),
    ({"prefix_lens": lens(0)}, ValueError, r"prefix_lens: expected shape \[2\] \(that of new_lens\), got \[1\]"),
    ({"new_lens": lens(3, 4).long()}, ValueError, "new_lens: expected dtype int32, got int64"),
    ({"new_lens": lens(3, 4)[None]}, ValueError, r"new_lens: expected 1 dimension, got 2 \(shape \[1, 2\]\)"),
    ({"new_lens": lens(3, 4).to("meta")}, ValueError, "new_lens: expected device cpu .* got meta"),
    ({"new_lens": lens(3, 4).long().numpy()}, ValueError, "new_lens: expected dtype int32, got int64"),
    ({"new_lens": lens(3, 4)[None].numpy()}, ValueError, r"new_lens: expected 1 dimension, got 2 \(shape \[1, 2\]\)"),
    ({"prefix_lens": "12"}, TypeError, "prefix_lens: expected an int32 CPU tensor or a sequence of ints, got str"),
    ({"prefix_lens": [1, 2.0]}, TypeError, r"prefix_lens\[1\]: expected int, got float"),
    ({"new_lens": [1, 2**31]}, ValueError, r"new_lens\[1\]: expected an int32, got 2147483648"),
    ({"prefix_lens": [INT32_MAX, 0]}, ValueError, r"request 0: expected prefix_len \+ new_len to fit int32"),
    ({"new_lens": [2**30] * 2}, ValueError, "new_lens: expected the sum of all lengths to fit int32"),
    ({"new_lens": [2**30, 2**30 - 1], "cp_size": 3}, ValueError, r"expected cp_size \* local_rows to fit int32, got 3"),
    ({"max_positions": 203}, ValueError, "request 1: expected .* <= max_positions = 203, got 200 [+] 4"),
    ({"max_positions": -1}, ValueError, "max_positions: expected a count >= 0, got -1"),
    ({"block_table": torch.zeros(2, 3, dtype=torch.int32)}, ValueError, "block_table: expected at least 4 columns for"),
    ({"block_table": torch.zeros(1, 4, dtype=torch.int32)}, ValueError, r"expected shape \[2, \*\] .*got \[1, 4\]"),
    ({"block_table": torch.zeros(2, dtype=torch.int32)}, ValueError, r"block_table: expected shape .* got \[2\]"),
    ({"block_table": torch.zeros(2, 4)}, ValueError, "block_table: expected dtype int32, got float32"),
    ({"block_table": lens(1, 2)[:, None].to("meta")}, ValueError, "block_table: expected device cpu .* got meta"),
    ({"block_table": [[1]]}, TypeError, r"block_table: expected a torch\.Tensor, got list"),
    ({"cp_size": 0}, ValueError, r"cp_size: expected a size in \[1, 1048576\], got 0"),
    ({"cp_rank": 2, "cp_size": 2}, ValueError, r"cp_rank: expected a rank in \[0, 2\), got 2"),
    ({"cp_rank": -1}, ValueError, r"cp_rank: expected a rank in \[0, 1\), got -1"),
    ({"cp_rank": 0.0}, TypeError, "cp_rank: expected int, got float"),
    ({"split": "ring"}, ValueError, "split: expected 'zigzag' or 'interleave', got 'ring'"),
    ({"split": None}, TypeError, "split: expected str, got NoneType"),
    ({"page_size": 48}, ValueError, "page_size: expected 16, 32, 64 or 128, got 48"),
    ({"device": 0}, TypeError, "device: expected a torch.device or str, got int"),
    ({"max_positions": "9"}, TypeError, "max_positions: expected int, got str"),
    ({"max_requests": 1}, ValueError, "max_requests: the batch needs 2, over the capacity of 1"),
    ({"local_rows": 6}, ValueError, "local_rows: the batch needs 7, over the capacity of 6"),
    ({"total_tokens": 6}, ValueError, "total_tokens: the batch needs 7, over the capacity of 6"),
    ({"total_tokens": True}, TypeError, "total_tokens: expected int, got bool"),
]


@pytest.mark.parametrize(("wrong", "error", "message"), ERRORS)
def test_errors_name_what_is_wrong(wrong: dict[str, Any], error: type[Exception], message: str) -> None:
    right: dict[str, Any] = {"new_lens": lens(3, 4), "prefix_lens": lens(0, 200), "max_positions": 204}
    CpPlan.build(**right)
    right |= {"max_positions": None}
    with pytest.raises(error, match=message):
        CpPlan.build(**(right | wrong))


def test_block_table_just_covers_the_tokens() -> None:
    for kv_len, width in [(64, 1), (65, 2), (128, 2), (0, 0), (1, 1)]:
        table = torch.zeros(1, width, dtype=torch.int32)
        assert CpPlan.build([kv_len], [0], block_table=table).block_table is table
        if width:
            with pytest.raises(ValueError, match=f"at least {width} columns"):
                CpPlan.build([kv_len], [0], block_table=table[:, 1:])


def test_missing_pages_are_named_under_value_checks(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    table = torch.tensor([[5, -1, -1], [2, 7, -3]], dtype=torch.int32, device=device)
    monkeypatch.setenv("SPARSE_CP_OPS_CHECK", "1")
    CpPlan.build([4, 60], [60, 68], block_table=table, device=device)
    for new, prefix, message in [
        ([5, 1], [60, 1], "block_table: request 0, position 64: expected a page >= 0, got -1"),
        ([0, 1], [0, 128], "block_table: request 1, position 128: expected a page >= 0, got -3"),
    ]:
        with pytest.raises(ValueError, match=message):
            CpPlan.build(new, prefix, block_table=table, device=device)
    monkeypatch.setenv("SPARSE_CP_OPS_CHECK", "0")
    CpPlan.build([5, 1], [60, 128], block_table=table, device=device)


def test_a_plan_is_frozen() -> None:
    plan = CpPlan.build([3], [0])
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.generation = 3  # type: ignore[misc]
    other = dataclasses.replace(plan, generation=7, head_mode="batch_slice")
    assert (other.generation, other.head_mode, plan.generation) == (7, "batch_slice", 0)
    assert other.req_ids is plan.req_ids


def capacity_plan(device: str, **arguments: Any) -> CpPlan:
    capacities = {"max_requests": 4, "local_rows": 24, "total_tokens": 40}
    return CpPlan.build([5], [9], **({"cp_rank": 1, "cp_size": 2, "device": device} | capacities | arguments))


@pytest.mark.parametrize("split", sorted(SPLITS))
def test_capacities_add_inert_rows(device: str, split: str) -> None:
    table = torch.tensor([[3]], dtype=torch.int32, device=device)
    plan = capacity_plan(device, split=split, block_table=table)
    exact = CpPlan.build([5], [9], 1, 2, split)
    used = exact.local_rows
    assert (plan.local_rows, plan.total_tokens, plan.num_requests) == (24, 40, 4)
    assert (plan.used_rows, plan.used_tokens, plan.has_capacity) == (used, 5, True)
    for name, pad in [("req_ids", -1), ("positions", 0), ("kv_lens", 0), ("token_ids", -1)]:
        values = getattr(plan, name).tolist()
        assert values == getattr(exact, name).tolist() + [pad] * (24 - used), name
    assert plan.gathered_req_ids.shape == (48,)
    assert plan.gathered_req_ids[24 : 24 + used].tolist() == exact.req_ids.tolist()
    rows = exact.restore.tolist()
    assert plan.restore.tolist() == [row % used + row // used * 24 for row in rows] + [-1] * 35
    assert plan.request_table.tolist() == [[9, 5], [0, 0], [0, 0], [0, 0]]
    assert plan.block_table is not None
    assert plan.block_table.tolist() == [[3], [-1], [-1], [-1]]


@pytest.mark.parametrize("split", sorted(SPLITS))
@pytest.mark.parametrize("room", [None, 20, 24], ids=["without room", "with room", "with the same room"])
def test_copy_refills_the_same_buffers(device: str, split: str, room: int | None) -> None:
    tables = [torch.full((b, w), 10 * b + w, dtype=torch.int32, device=device) for b, w in [(1, 3), (4, 2), (0, 3)]]
    captured = capacity_plan(device, split=split, block_table=tables[0])
    buffers = [getattr(captured, name).data_ptr() for name in [*ROW_FIELDS, "request_table", "block_table"]]
    capacities = {"max_requests": 4, "local_rows": room, "total_tokens": 40} if room else {}
    for generation, (batch, table) in enumerate(
        zip([[(5, 9)], [(7, 0), (0, 3), (12, 100), (1, 1)], []], tables, strict=True), 1
    ):
        new, prefix = [n for n, _ in batch], [p for _, p in batch]
        arguments: dict[str, Any] = {"split": split, "block_table": table, "device": device}
        plan = CpPlan.build(new, prefix, 1, 2, **arguments, **capacities)
        assert captured.copy_(dataclasses.replace(plan, generation=generation)) is captured
        expected = CpPlan.build(new, prefix, 1, 2, **arguments, max_requests=4, local_rows=24, total_tokens=40)
        for name in [*ROW_FIELDS, "request_table"]:
            assert torch.equal(getattr(captured, name), getattr(expected, name)), name
        assert captured.block_table is not None
        assert captured.block_table[: len(new), : table.shape[1]].eq(table).all()
        assert captured.block_table[len(new) :].eq(-1).all()
        assert captured.block_table[:, table.shape[1] :].eq(-1).all()
        assert captured.generation == generation
        assert (captured.used_rows, captured.used_tokens) == (expected.used_rows, expected.used_tokens)
        assert captured.local_rows == 24
    assert buffers == [getattr(captured, name).data_ptr() for name in [*ROW_FIELDS, "request_table", "block_table"]]


@pytest.mark.parametrize("built_inside", [True, False])
def test_plans_are_refilled_inside_and_outside_of_inference_mode(device: str, built_inside: bool) -> None:
    table = torch.arange(4, dtype=torch.int32, device=device).view(1, 4)
    with torch.inference_mode(built_inside):
        captured = capacity_plan(device, block_table=table)
    for refilled_inside in (False, True):
        with torch.inference_mode(refilled_inside):
            new = CpPlan.build([7], [3], 1, 2, block_table=table, device=device)
            captured.copy_(new)
        assert captured.positions[: new.local_rows].tolist() == new.positions.tolist()


@pytest.mark.cuda
def test_a_plan_is_not_built_inside_a_capture() -> None:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side), torch.cuda.graph(torch.cuda.CUDAGraph(), stream=side):
        torch.zeros(1, device="cuda")
        with pytest.raises(RuntimeError, match="expected no CUDA graph capture"):
            CpPlan.build([7], [3], 1, 2, device="cuda")


def test_copy_refuses_what_does_not_fit() -> None:
    captured = capacity_plan("cpu")
    before = captured.token_ids.clone()
    table = torch.zeros(1, 1, dtype=torch.int32)
    for new, message in [
        (CpPlan.build([1] * 5, [0] * 5, 1, 2), "num_requests: the batch needs 5, over the capacity of 4"),
        (CpPlan.build([49], [0], 1, 2, "zigzag"), "split: expected 'interleave' as in this plan, got 'zigzag'"),
        (CpPlan.build([1, 1, 47], [0] * 3, 1, 2), "local_rows: the batch needs 25, over the capacity of 24"),
        (CpPlan.build([44], [0], 1, 2), "total_tokens: the batch needs 44, over the capacity of 40"),
        (CpPlan.build([1], [0], 0, 2), "cp_rank: expected 1 as in this plan, got 0"),
        (CpPlan.build([1], [0], 1, 3), "cp_size: expected 2 as in this plan, got 3"),
        (CpPlan.build([1], [0], 1, 2, page_size=16), "page_size: expected 64"),
        (CpPlan.build([1], [0], 1, 2, block_table=table), "expected a plan with no block_table"),
        (dataclasses.replace(CpPlan.build([1], [0], 1, 2), head_mode="head_slice"), "head_mode: expected 'full'"),
        (dataclasses.replace(CpPlan.build([1], [0], 1, 2), is_prefill=False), "is_prefill: expected True"),
    ]:
        with pytest.raises(ValueError, match=message):
            captured.copy_(new)
    with pytest.raises(TypeError, match="expected a CpPlan, got int"):
        captured.copy_(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="only a plan built with capacities"):
        CpPlan.build([1], [0], 1, 2).copy_(CpPlan.build([1], [0], 1, 2))
    wide = capacity_plan("cpu", block_table=table)
    with pytest.raises(ValueError, match="block_table width: the batch needs 2, over the capacity of 1"):
        wide.copy_(CpPlan.build([1], [0], 1, 2, block_table=table.repeat(1, 2)))
    with pytest.raises(ValueError, match="expected a plan with a block_table"):
        wide.copy_(CpPlan.build([1], [0], 1, 2))
    assert torch.equal(captured.token_ids, before)


def layer(x: Tensor, plan: CpPlan) -> Tensor:
    """Reads every kind of field that a forward reads."""
    own = x.index_select(0, plan.token_ids.clamp(min=0)) * (plan.req_ids >= 0).unsqueeze(1)
    if plan.use_cp and plan.is_prefill and plan.method == 1 and plan.head_mode == "full":
        gathered = own.new_zeros(plan.cp_size, plan.local_rows, x.shape[1])
        gathered[plan.cp_rank] = own + plan.kv_lens.unsqueeze(1)
        assert plan.block_table is not None
        return gathered.flatten(0, 1)[plan.restore] + plan.block_table.sum() + plan.total_tokens
    return own


@pytest.mark.parametrize("split", sorted(SPLITS))
def test_compiles_once_for_all_batches(device: str, split: str) -> None:
    """A plan is an argument of a compiled function; neither lengths nor the generation recompile it."""
    counter = CompileCounter()
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for generation, n in enumerate(range(2, 52)):
        new = [n, (7 * n) % 50 + 2]
        table = torch.zeros(2, 2 + n // 4, dtype=torch.int32, device=device)
        plan = CpPlan.build(new, [3, n], 1, 2, split, block_table=table, device=device)
        plan = dataclasses.replace(plan, generation=generation, method=1)
        x = torch.randn(sum(new), 4, device=device)
        torch.testing.assert_close(compiled(x, plan), layer(x, plan), rtol=0, atol=0)
    assert counter.frame_count - 1 <= 2  # recompiles


@pytest.mark.cuda
@pytest.mark.parametrize("split", sorted(SPLITS))
def test_build_never_waits_for_the_device(split: str) -> None:
    """Many plans enqueued on a stream that is held: none waits, none overwrites a table that is still to be copied."""
    tables = torch.zeros(3, 40, dtype=torch.int32, device="cuda")
    captured = capacity_plan("cuda", split=split, block_table=tables[:1])

    def build(new_lens: list[int], prefix_lens: list[int]) -> CpPlan:
        return CpPlan.build(new_lens, prefix_lens, 1, 2, split, block_table=tables[: len(new_lens)], device="cuda")

    captured.copy_(build([1, 2], [0, 0]))  # modules are loaded at the first use
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    with StreamGate(torch.cuda.current_stream()) as gate:
        torch.cuda.set_sync_debug_mode("error")
        try:
            plans = [build([i, 3, 2 * i], [5, i, 0]) for i in range(40)]
            captured.copy_(build([3, 4], [1, 2]))
        finally:
            torch.cuda.set_sync_debug_mode(before)
        assert gate.is_closed
    for i, plan in enumerate(plans):
        assert plan.request_table.tolist() == [[5, i], [i, 3], [0, 2 * i]]
        assert plan.token_ids.tolist() == CpPlan.build([i, 3, 2 * i], [5, i, 0], 1, 2, split).token_ids.tolist()
    assert captured.request_table.tolist() == [[1, 3], [2, 4], [0, 0], [0, 0]]


@pytest.mark.cuda
@pytest.mark.parametrize("split", sorted(SPLITS))
def test_captured_graph_follows_the_plan(split: str) -> None:
    table = torch.zeros(1, 3, dtype=torch.int32, device="cuda")
    plan = dataclasses.replace(capacity_plan("cuda", split=split, block_table=table), method=1)
    x = torch.randn(40, 4, device="cuda")
    layer(x, plan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = layer(x, plan)
    for new, prefix in [([5], [9]), ([7, 0, 12], [0, 3, 100]), ([], []), ([24], [1])]:
        pages = torch.full((len(new), 3), len(new), dtype=torch.int32, device="cuda")
        other = CpPlan.build(new, prefix, 1, 2, split, block_table=pages, device="cuda")
        plan.copy_(dataclasses.replace(other, method=1))
        graph.replay()
        assert torch.equal(result, layer(x, plan))
        tokens = sum(new)
        own = SPLITS[split](new, 2)
        rows = own.rearrange[own.local_rows :]  # of rank 1
        expected = torch.zeros(40, 4)
        for row, token in enumerate(rows.tolist()):
            if token >= 0:
                expected[token] = x[token].cpu() + plan.kv_lens[row].item()
        shift = result[:tokens].cpu() - expected[:tokens]
        torch.testing.assert_close(shift, shift[:1].expand_as(shift) if tokens else shift, rtol=0, atol=1e-5)
