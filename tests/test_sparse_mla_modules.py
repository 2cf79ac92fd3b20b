"""What prepare decides, what is refused, and how records travel; the numbers are in test_cp_simulated.py."""

import copy
import dataclasses
from collections.abc import Callable

import pytest
import torch
from cp_harness import (
    PAGE,
    TOPK,
    Rank,
    Ranks,
    States,
    assert_cache_equal,
    attention_inputs,
    mla_config,
    one_thread,  # noqa: F401  (fixture)
    packed_states,
    parallelism,
    poisoned_cache,
    random_states,
    simulated_gather,  # noqa: F401  (fixture)
)
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from sparse_cp_ops.config import CPRotateMethod, FMHAType, ParallelismConfig, PrefillCPConfig
from sparse_cp_ops.context_parallel import CpPlan
from sparse_cp_ops.context_parallel.collectives import CpGroup, take_local_rows
from sparse_cp_ops.nn import AttentionInputs, SparseMlaCpImpl, SparseMlaFp8CPOp, SparseMlaImpl, get_mla_impl
from sparse_cp_ops.nn.forward_planner import ForwardPlanner

pytestmark = pytest.mark.usefixtures("simulated_gather", "one_thread")


def one_request(length: int = 20, prefix: int = 0, device: str = "cpu", is_prefill: bool = True) -> AttentionInputs:
    pages = -(-(length + prefix) // PAGE)
    table = torch.arange(pages, dtype=torch.int32, device=device).view(1, -1)
    return attention_inputs([length], [prefix], table, is_prefill)


def simulated_impl(size: int, rank: int = 0, **changes: object) -> SparseMlaImpl:
    """An impl as get_mla_impl makes it for a rank of a group, without the group."""
    config, cp = mla_config(), parallelism(size, rank, **changes)  # type: ignore[arg-type]
    impl = (SparseMlaCpImpl if SparseMlaCpImpl.support_parallelism_config(cp) else SparseMlaImpl)(config, cp)
    impl.group = CpGroup(size, rank, "simulated") if size > 1 else CpGroup()
    impl.planner = ForwardPlanner(config, cp, impl.group)
    impl.op = SparseMlaFp8CPOp(config, cp, planner=impl.planner)
    return impl


class FakeGroup:
    """What get_mla_impl asks a process group."""

    group_name = "fake"

    def __init__(self, size: int, rank: int) -> None:
        self._size, self._rank = size, rank

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank


ENABLED = [CPRotateMethod.ALL_GATHER, CPRotateMethod.ALL_GATHER_WITH_OVERLAP]


@pytest.mark.parametrize("method", [*ENABLED, CPRotateMethod.DISABLED, CPRotateMethod.PREFILL_CP])
@pytest.mark.parametrize("size", [1, 2])
def test_get_mla_impl_takes_context_parallelism_where_it_is_configured(method: CPRotateMethod, size: int) -> None:
    config = parallelism(size, method=method)
    impl = get_mla_impl(mla_config(), config, FakeGroup(size, 0))  # type: ignore[arg-type]
    expected = SparseMlaCpImpl if method in ENABLED and size == 2 else SparseMlaImpl
    assert type(impl) is expected
    assert impl.support_prefill_cp() is (expected is SparseMlaCpImpl)
    assert impl.support_parallelism_config(config)
    assert impl.fmha_type() == (
        FMHAType.CP_SPARSE_FLASHMLA if expected is SparseMlaCpImpl else FMHAType.SPARSE_FLASHMLA
    )
    # Without a group there is nobody to share rows with.
    assert type(get_mla_impl(mla_config(), config)) is SparseMlaImpl


@pytest.mark.parametrize("method", [CPRotateMethod.ALLTOALL, CPRotateMethod.UNKNOWN])
def test_methods_that_do_not_exist_are_refused(method: CPRotateMethod) -> None:
    config = parallelism(2, method=method)
    for group in (None, FakeGroup(2, 0)):
        with pytest.raises(ValueError, match=f"method: expected DISABLED, .* got {method.name}"):
            get_mla_impl(mla_config(), config, group)  # type: ignore[arg-type]
    for kind in (SparseMlaImpl, SparseMlaCpImpl):
        assert not kind.support_parallelism_config(config)
        with pytest.raises(ValueError, match=method.name):
            kind(mla_config(), config)
    impl = simulated_impl(2)
    impl.planner.parallelism_config = config
    with pytest.raises(ValueError, match=f"got {method.name}"):
        impl.prepare(one_request())


def test_a_sharded_cache_is_refused() -> None:
    config = parallelism(2, kv_cache_sharded=True)
    with pytest.raises(ValueError, match="kv_cache_sharded: expected False"):
        get_mla_impl(mla_config(), config, FakeGroup(2, 0))  # type: ignore[arg-type]
    impl = simulated_impl(2)
    impl.planner.parallelism_config = config
    with pytest.raises(ValueError, match="kv_cache_sharded: expected False"):
        impl.prepare(one_request())


@pytest.mark.parametrize(
    ("size", "rank", "changes", "message"),
    [
        (3, 0, {}, "group: expected size 2 as tp_size"),
        (2, 1, {}, "group: expected rank 0 as tp_rank"),
        (2, 0, {"prefill_cp_size": 4}, "prefill_cp_size: expected 0 or 2, got 4"),
    ],
)
def test_a_group_that_does_not_fit_is_refused(size: int, rank: int, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        get_mla_impl(mla_config(), parallelism(2, **changes), FakeGroup(size, rank))  # type: ignore[arg-type]


def test_heads_that_ranks_cannot_share_are_refused() -> None:
    config = parallelism(3, decode_mode="head_slice")
    with pytest.raises(ValueError, match=r"head_slice .* got 8 heads on 3 ranks"):
        get_mla_impl(mla_config(), config, FakeGroup(3, 0))  # type: ignore[arg-type]


@pytest.mark.parametrize("decode_mode", ["replicated", "head_slice", "batch_slice"])
@pytest.mark.parametrize("method", [*ENABLED, CPRotateMethod.DISABLED, CPRotateMethod.PREFILL_CP])
def test_what_prepare_decides(method: CPRotateMethod, decode_mode: str) -> None:
    """Thresholds: 32 tokens; prefill runs all heads, decode what the mode says, on one rank everything is whole."""
    for size in (1, 4):
        impl = simulated_impl(size, size - 1, method=method, decode_mode=decode_mode, min_tokens=32)
        for length, is_prefill in ((31, True), (32, True), (1, False)):
            plan = impl.prepare(one_request(length, is_prefill=is_prefill))
            split = is_prefill and length == 32 and size == 4 and method in ENABLED
            sliced = not is_prefill and size == 4 and decode_mode != "replicated"
            assert plan.use_cp is split
            assert plan.head_mode == (decode_mode if sliced else "full")
            assert plan.is_prefill is is_prefill
            assert plan.method == int(method)
            shares_rows = split or (sliced and decode_mode == "batch_slice")
            assert (plan.cp_size, plan.cp_rank) == ((4, 3) if shares_rows else (1, 0))
            assert plan.total_tokens == length
            if not shares_rows:
                assert plan.token_ids.tolist() == plan.restore.tolist() == list(range(length))


def test_every_threshold_is_on_its_own() -> None:
    """kv work counts prefix and new keys: 8 tokens see 8 * 9 / 2 = 36 keys, behind 100 cached ones 836."""
    cp = PrefillCPConfig(method=CPRotateMethod.ALL_GATHER, min_tokens=8, min_kv_work=836)
    config = ParallelismConfig(tp_size=2, world_size=2, prefill_cp_config=cp)
    planner = ForwardPlanner(mla_config(), config, CpGroup(2, 0, "simulated"))
    for length, prefix, expected in ((8, 0, False), (8, 99, False), (8, 100, True), (7, 400, False), (50, 0, True)):
        assert planner.prepare(one_request(length, prefix), split_prefill=True).use_cp is expected


def test_inputs_are_only_read() -> None:
    for size, is_prefill in ((1, True), (4, True), (4, False)):
        inputs = attention_inputs(
            [1, 1, 0] if not is_prefill else [20, 3, 0], [5, 16, 2], torch.arange(9).int().view(3, 3), is_prefill
        )
        fields = {name: getattr(inputs, name) for name in ("new_lens", "prefix_lens", "block_table")}
        before = {name: (value.clone(), value._version) for name, value in fields.items()}
        ranks = Ranks(size, 9, decode_mode="batch_slice")
        states = [random_states(32) for _ in range(3)]
        packed = packed_states(states, inputs.new_lens.tolist(), inputs.prefix_lens.tolist())
        ranks.forward(inputs, [packed, packed])
        for name, (value, version) in before.items():
            assert getattr(inputs, name) is fields[name]
            assert torch.equal(fields[name], value)
            assert fields[name]._version == version
        with pytest.raises(dataclasses.FrozenInstanceError):
            inputs.is_prefill = False  # type: ignore[misc]
        with pytest.raises(dataclasses.FrozenInstanceError):
            ranks.plans[0].use_cp = False  # type: ignore[misc]


LENS = torch.ones(2, dtype=torch.int32)
TABLE = torch.zeros(2, 1, dtype=torch.int32)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"is_prefill": 1}, TypeError, "is_prefill: expected bool, got int"),
        ({"new_lens": [1, 1]}, TypeError, r"new_lens: expected a torch\.Tensor, got list"),
        ({"new_lens": LENS.long()}, ValueError, r"new_lens: expected dtype int32, got torch\.int64"),
        ({"prefix_lens": LENS[:1]}, ValueError, "prefix_lens: expected 2 requests as in new_lens, got 1"),
        ({"prefix_lens": LENS.view(2, 1)}, ValueError, "prefix_lens: expected 1 dimensions, got 2"),
        ({"prefix_lens": LENS.to("meta")}, ValueError, "prefix_lens: expected a tensor on the CPU, got meta"),
        ({"block_table": TABLE[:1]}, ValueError, "block_table: expected 2 requests as in new_lens, got 1"),
        ({"block_table": TABLE[0]}, ValueError, "block_table: expected 2 dimensions, got 1"),
        ({"is_prefill": False, "new_lens": LENS * 2}, ValueError, "at most 1 token a request in a decode batch, got 2"),
    ],
)
def test_wrong_inputs(changes: dict[str, object], error: type[Exception], message: str) -> None:
    fields = {"is_prefill": True, "new_lens": LENS, "prefix_lens": LENS, "block_table": TABLE}
    AttentionInputs(**fields)  # type: ignore[arg-type]
    with pytest.raises(error, match=message):
        AttentionInputs(**{**fields, **changes})  # type: ignore[arg-type]


def test_plans_that_do_not_fit_are_refused_before_any_kernel() -> None:
    impl = simulated_impl(2)
    for inputs, message in [
        (one_request(-1), r"new_lens\[0\]: expected a length >= 0, got -1"),
        (attention_inputs([17], [0], torch.zeros(1, 1).int()), "block_table: expected at least 2 columns"),
        (attention_inputs([500], [13], torch.zeros(1, 64).int()), "max_positions = 512"),
    ]:
        with pytest.raises(ValueError, match=message):
            impl.prepare(inputs)


def test_stale_and_missing_plans_are_refused() -> None:
    impl, other = simulated_impl(1), simulated_impl(1)
    config = impl.mla_config
    cache = poisoned_cache(config, 4)
    stale = impl.prepare(one_request())
    current = impl.prepare(one_request())
    foreign = other.prepare(one_request())
    assert stale.generation < current.generation < foreign.generation
    records = impl.new_kv_records(current, 0)
    pending = impl.start_kv_write(records, current)
    q = torch.zeros(20, 8, 576, dtype=torch.bfloat16)
    picks = torch.full((20, TOPK), -1, dtype=torch.int32)
    rank = Rank(config, parallelism(1), 4, "cpu")
    q_fp8, q_weights = torch.zeros(20, 8, 128, dtype=torch.uint8), torch.zeros(20, 8)
    calls: list[Callable[[CpPlan], object]] = [
        lambda plan: impl.new_kv_records(plan, 0),
        lambda plan: impl.start_kv_write(records, plan),
        lambda plan: impl.finish_kv_write(pending, cache, 0, plan),
        lambda plan: impl.forward(q, cache, 0, picks, plan),
        lambda plan: rank.indexer._get_topk_ragged_cp(q_fp8, q_weights, cache, 0, plan),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=f"got the stale generation {stale.generation}"):
            call(stale)
        with pytest.raises(ValueError, match="made for this forward, got None"):
            call(None)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="without a generation"):
            call(CpPlan.build([20], [0], page_size=PAGE, block_table=current.block_table))
        call(current)
    for call in calls[:4]:  # those of the impl
        with pytest.raises(ValueError, match=f"this impl's prepare made, got generation {foreign.generation}"):
            call(foreign)
    with pytest.raises(TypeError, match=r"records: expected KvRecords of new_kv_records, got Tensor"):
        impl.start_kv_write(torch.zeros(20, 788, dtype=torch.uint8), current)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="inputs: expected AttentionInputs, got NoneType"):
        impl.prepare(None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="started with this plan"):
        impl.finish_kv_write(pending, cache, 0, dataclasses.replace(current))
    with pytest.raises(ValueError, match="page_size 16 as in the plan, got 32"):
        impl.finish_kv_write(pending, poisoned_cache(mla_config(page_size=32), 4), 0, current)


def test_a_missing_result_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    impl = simulated_impl(1)
    plan = impl.prepare(one_request())
    cache = poisoned_cache(impl.mla_config, 4)
    q = torch.zeros(20, 8, 576, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"topk_indices: expected the picks .* got None"):
        impl.forward(q, cache, 1, None, plan)
    monkeypatch.setattr(impl.op, "forward", lambda *_: None)
    with pytest.raises(RuntimeError, match="attention of layer 1 returned no result"):
        impl.forward(q, cache, 1, torch.full((20, TOPK), -1, dtype=torch.int32), plan)


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 16])
def test_blocks_have_the_documented_layout(rows: int) -> None:
    impl = simulated_impl(2, split="interleave")
    plan = impl.prepare(one_request(2 * rows))
    for layer, row_bytes in ((0, 788), (1, 656)):
        records = impl.new_kv_records(plan, layer)
        assert records.gather is not None
        block = records.gather.own
        assert block.shape == (-(-rows * row_bytes // 16) * 16,)
        assert records.mla.shape == (rows, 656)
        assert records.mla.data_ptr() == block.data_ptr()
        if layer == 0:
            assert records.index is not None
            assert records.index.shape == (rows, 132)
            assert records.index.data_ptr() == block.data_ptr() + rows * 656
        else:
            assert records.index is None


def test_modules_keep_nothing_of_a_forward() -> None:
    rank = Rank(mla_config(), parallelism(1), 4, "cpu")
    states = random_states(20)

    def attributes() -> list[dict[str, object]]:
        return [{**vars(module), **dict(module.named_buffers())} for module in (rank.op, rank.indexer)]

    before = [copy.copy(found) for found in attributes()]
    plan = rank.op.plan(one_request())
    rank.attend(0, states, plan, rank.write(0, states, plan), None)
    assert attributes() == before


def test_decode_uses_batch_invariant_kernels_only_in_deterministic_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    impl = simulated_impl(1)
    cache = poisoned_cache(impl.mla_config, 4)

    def record(q: Tensor, *arguments: object) -> tuple[Tensor, Tensor]:
        seen.append(bool(arguments[-1]))
        return q[..., :512], torch.zeros(q.shape[:2])

    monkeypatch.setattr("sparse_cp_ops.ops.direct.sparse_mla_fp8_cp", record)
    picks = torch.full((1, TOPK), -1, dtype=torch.int32)
    for deterministic in (True, False):
        torch.use_deterministic_algorithms(deterministic)
        for is_prefill in (True, False):
            plan = impl.prepare(one_request(1, 5, is_prefill=is_prefill))
            impl.forward(torch.zeros(1, 8, 576, dtype=torch.bfloat16), cache, 0, picks, plan)
    assert seen == [True, True, True, False]


def test_plans_with_room_are_refilled(device: str) -> None:
    """What a CUDA graph does between replays: same buffers, other lengths, pads inert, generation of the new plan."""
    rank = Rank(mla_config(), parallelism(1), 16, device)
    table = torch.arange(12, dtype=torch.int32, device=device).view(4, 3)
    full = rank.op.planner.prepare(attention_inputs([1] * 4, [0] * 4, table, False), False, 4, 4, 4)
    states = [random_states(40, device) for _ in range(4)]
    prompts = rank.op.plan(attention_inputs([40] * 4, [0] * 4, table))
    rows = packed_states(states, [40] * 4, [0] * 4, device)
    rank.attend(0, rows, prompts, rank.write(0, rows, prompts), None)
    for requests, prefix in ((4, 0), (2, 1), (1, 2), (3, 2)):
        inputs = attention_inputs([1] * requests, [prefix] * requests, table[:requests], False)
        new = rank.op.plan(inputs)
        full.copy_(new)
        packed = packed_states(states[:requests], [1] * requests, [prefix] * requests, device)
        outs = []
        for plan in (new, full):
            rows = rank.rows(packed, plan)
            outs.append(rank.attend(0, rows, plan, rank.write(0, rows, plan), None)[0])
        assert torch.equal(outs[1][:requests], outs[0])
        assert outs[1][requests:].eq(0).all()
    rank.op.plan(inputs)
    with pytest.raises(ValueError, match="stale"):
        rank.op.new_kv_records(full, True)


def test_local_rows_of_a_packed_tensor(device: str) -> None:
    x = torch.randn(14, 3, device=device)
    for rank, rows in ((0, [0, 1, 2, 3, 12, 13, 0, 0]), (1, [4, 5, 6, 7, 8, 9, 10, 11])):
        plan = simulated_impl(2, rank, split="zigzag").prepare(one_request(14, device=device))
        assert torch.equal(take_local_rows(x, plan), x[rows])
    assert take_local_rows(x, simulated_impl(1).prepare(one_request(14, device=device))) is x


def two_layers(rank: Rank, rows: list[States], plan: CpPlan) -> list[Tensor]:
    """All steps of the modules: write, pick, attend, then a layer that reuses the picks."""
    first = rank.attend(0, rows[0], plan, rank.write(0, rows[0], plan), None)
    second = rank.attend(1, rows[1], plan, rank.write(1, rows[1], plan), first[2])
    return [*first, *second]


@torch.no_grad()
def test_compiled_steps_are_one_graph_for_all_lengths(device: str) -> None:
    """fullgraph, the bits of the eager run, at most 2 recompiles over 50 lengths; a stale plan is still refused."""
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(two_layers, fullgraph=True, backend=counter)
    config = mla_config()
    eager, traced = (Rank(config, parallelism(1), 12, device) for _ in range(2))
    table = torch.arange(12, dtype=torch.int32, device=device).view(2, 6)
    requests = [[random_states(96, device) for _ in range(2)] for _ in range(2)]
    for length in range(2, 52):
        for prefix in (0, length % 17):
            rows = [packed_states(layer, [length, 3], [0, 0], device) for layer in requests]
            plans = [rank.op.plan(attention_inputs([length, 3], [prefix, 0], table)) for rank in (eager, traced)]
            expected = two_layers(eager, rows, plans[0])
            for mine, theirs in zip(compiled(traced, rows, plans[1]), expected, strict=True):
                assert torch.equal(mine, theirs)
            assert_cache_equal(traced.cache, eager.cache)
    assert counter.frame_count <= 3
    rows = [packed_states(layer, [50, 3], [0, 0], device) for layer in requests]
    stale = traced.op.plan(attention_inputs([50, 3], [0, 0], table))
    traced.op.plan(attention_inputs([50, 3], [0, 0], table))
    with pytest.raises(Exception, match="Observed exception"):
        compiled(traced, rows, stale)
