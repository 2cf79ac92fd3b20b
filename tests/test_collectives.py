"""What a single process can see of the collectives; real groups are in test_distributed.py."""

import copy
import logging

import pytest
import torch
import torch.distributed as dist
from cp_harness import attention_inputs, mla_config, parallelism

from sparse_cp_ops.config import CPRotateMethod, ParallelismConfig
from sparse_cp_ops.context_parallel import CpPlan
from sparse_cp_ops.context_parallel import collectives as comm
from sparse_cp_ops.context_parallel.registered_buffer import RegisteredBuffer
from sparse_cp_ops.nn import MlaAttention, get_mla_impl


def test_a_group_without_this_process_is_refused() -> None:
    for group in (object(), -100):  # what torch.distributed.new_group returns there
        with pytest.raises(TypeError, match="group: expected a ProcessGroup that this process belongs to, or None"):
            comm.CpGroup.of(group)  # type: ignore[arg-type]


@pytest.fixture
def no_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("a single rank communicates")

    for module, name in ((dist, "all_reduce"), (dist, "barrier"), (comm, "_all_gather_single")):
        monkeypatch.setattr(module, name, refuse)


@pytest.mark.usefixtures("no_collectives")
def test_a_single_rank_never_communicates(device: str) -> None:
    group = comm.CpGroup.of(None)
    assert (group.size, group.rank, group.process_group) == (1, 0, None)
    impl = get_mla_impl(mla_config(), parallelism(4))
    table = torch.zeros(2, 4, dtype=torch.int32, device=device)
    x = torch.randn(33, 5, device=device)
    for lens, is_prefill in (([30, 3], True), ([1, 1], False)):
        plan = impl.prepare(attention_inputs(lens, [0, 0], table, is_prefill))
        assert not comm.rows_are_split(plan)
        assert impl.new_kv_records(plan, 0).gather is None
        rows = x[: sum(lens)]
        for result in (
            comm.all_reduce_sum(rows, group),
            comm.all_gather_rows(rows, group),
            comm.take_local_rows(rows, plan),
            comm.restore_rows(rows, plan, group),
            comm.gather_hidden_states(rows, plan, group),
        ):
            assert result is rows
        last = comm.gather_last_tokens(rows, plan, group)
        assert torch.equal(last, rows[[lens[0] - 1, sum(lens) - 1]])


def test_rows_that_are_not_the_plans_are_refused() -> None:
    """On one rank only they would be read as other tokens; with another group the ranks would wait for each other."""
    plan = CpPlan.build([3, 5], [0, 0], 0, 2, "zigzag")  # 8 tokens, 6 rows a rank
    two, three = (comm.CpGroup(size, 0, "never used") for size in (2, 3))
    for packed in (7, 9, 0):
        with pytest.raises(ValueError, match=f"packed: expected 8 rows .the new tokens of the plan., got {packed}"):
            comm.take_local_rows(torch.zeros(packed, 2), plan)
    for gather in (comm.restore_rows, comm.gather_hidden_states, comm.gather_last_tokens):
        with pytest.raises(ValueError, match=r"expected 6 rows .*, got 8"):
            gather(torch.zeros(8, 2), plan, two)
        with pytest.raises(ValueError, match="group: expected the 2 ranks of the plan, got 3"):
            gather(torch.zeros(6, 2), plan, three)
        with pytest.raises(TypeError, match=r"group: expected a CpGroup .*, got FakeGroup"):
            gather(torch.zeros(6, 2), plan, FakeGroup())  # type: ignore[arg-type]


def test_a_plan_with_spare_room_takes_fewer_packed_rows() -> None:
    roomy = CpPlan.build([3, 5], [0, 0], 0, 2, "zigzag", local_rows=8, total_tokens=12)
    x = torch.randn(12, 2)
    assert torch.equal(comm.take_local_rows(x[:8], roomy)[:6], comm.take_local_rows(x, roomy)[:6])
    with pytest.raises(ValueError, match="packed: expected 12 rows"):
        comm.take_local_rows(torch.zeros(13, 2), roomy)
    empty = CpPlan.build([0], [4], 0, 2, local_rows=0, total_tokens=5)
    last = comm.gather_last_tokens(torch.zeros(0, 2), empty, comm.CpGroup(2, 0, "never used"))
    assert torch.equal(last, torch.zeros(1, 2))


def config_with(use_ub_comm: bool = True, method: CPRotateMethod = CPRotateMethod.ALL_GATHER, **changes: object):  # type: ignore[no-untyped-def]
    cp = parallelism(2, method=method, **changes).prefill_cp_config  # type: ignore[arg-type]
    return ParallelismConfig(tp_size=2, world_size=2, prefill_cp_config=cp, use_ub_comm=use_ub_comm)


class Backend:
    def __init__(self, name: str) -> None:
        self._name = name

    def name(self) -> str:
        return self._name


class FakeGroup:
    """A group of two ranks with a given backend for CUDA."""

    group_name = "fake"

    def __init__(self, size: int = 2, backend: str | None = "nccl") -> None:
        self._size, self._backend = size, backend

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return 0

    def _get_backend(self, device: torch.device) -> Backend:
        if self._backend is None:
            raise RuntimeError("No backend type associated with device type cuda")
        return Backend(self._backend)


@pytest.mark.parametrize(
    ("config", "group", "device", "initialised", "reason"),
    [
        (config_with(use_ub_comm=False), FakeGroup(), "cuda", True, "use_ub_comm is not set"),
        (config_with(), FakeGroup(), "cuda", False, "torch.distributed is not initialised"),
        (config_with(method=CPRotateMethod.DISABLED), FakeGroup(), "cuda", True, "not enabled .method DISABLED"),
        (config_with(method=CPRotateMethod.PREFILL_CP), FakeGroup(), "cuda", True, "not enabled .method PREFILL_CP"),
        (config_with(), None, "cuda", True, "the group has no other rank"),
        (config_with(), FakeGroup(1), "cuda", True, "the group has no other rank"),
        (config_with(), FakeGroup(), "cpu", True, "the device is cpu, not CUDA"),
        (config_with(), FakeGroup(backend="gloo"), "cuda", True, "backend for CUDA is gloo, not nccl"),
        (config_with(), FakeGroup(backend=None), "cuda", True, "backend for CUDA is none, not nccl"),
        (config_with(comm_buffer_size=0), FakeGroup(), "cuda", True, "comm_buffer_size is 0"),
    ],
)
def test_user_buffers_name_the_check_that_failed(
    config: ParallelismConfig,
    group: FakeGroup | None,
    device: str,
    initialised: bool,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: initialised)
    with caplog.at_level(logging.INFO):
        assert comm.init_user_buffers_environment(config, group, device) is False  # type: ignore[arg-type]
    assert len(caplog.records) == 1
    with pytest.raises(RuntimeError, match=reason) as error:
        comm.init_user_buffers_environment(config, group, device, strict=True)  # type: ignore[arg-type]
    assert str(error.value).removeprefix("init_user_buffers_environment: ") in caplog.text


@pytest.mark.parametrize(
    ("registered_here", "registered_there", "bytes_there", "reason"),
    [
        (False, True, 512 << 20, "OSError: no such transport"),
        (True, False, 512 << 20, "another rank could not register"),
        (True, True, 1 << 20, "comm_buffer_size differs between the ranks: 1048576 to 536870912 bytes"),
        (True, True, 1 << 30, "comm_buffer_size differs between the ranks: 536870912 to 1073741824 bytes"),
        (True, True, 512 << 20, None),
    ],
)
def test_all_ranks_use_registered_memory_or_none_does(
    registered_here: bool,
    registered_there: bool,
    bytes_there: int,
    reason: str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A backend that cannot register is no crash, and neither is one that only failed elsewhere."""
    group = FakeGroup()

    def register(*arguments: object) -> RegisteredBuffer:
        if not registered_here:
            raise OSError("no such transport")
        return RegisteredBuffer(torch.empty(16, dtype=torch.uint8))

    def of_two_ranks(x: torch.Tensor, group: object, op: object = dist.ReduceOp.SUM) -> None:
        if op == dist.ReduceOp.MIN:
            torch.minimum(x, torch.tensor([int(registered_there), bytes_there, -bytes_there]), out=x)

    zeros, tensor = torch.zeros, torch.tensor
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "all_reduce", of_two_ranks)
    monkeypatch.setattr(RegisteredBuffer, "register", register)
    monkeypatch.setattr(torch, "zeros", lambda *sizes, device: zeros(*sizes))
    monkeypatch.setattr(torch, "tensor", lambda data, dtype=None, device=None: tensor(data, dtype=dtype))
    with caplog.at_level(logging.INFO):
        done = comm.init_user_buffers_environment(config_with(), group, "cuda")  # type: ignore[arg-type]
    assert done is (reason is None)
    assert done is (group in comm._registered_buffers)
    assert reason is None or reason in caplog.text


def test_registered_memory_is_lent_to_one_gather_at_a_time() -> None:
    group = comm.CpGroup(2, 1, "fake", FakeGroup())  # type: ignore[arg-type]
    memory = torch.empty(64, dtype=torch.uint8)
    comm._registered_buffers[group.process_group] = RegisteredBuffer(memory)  # type: ignore[index]

    def gather(block_bytes: int = 32, limit: int = 64, borrower: int = 7) -> tuple[comm.BlockGather, bool]:
        made = comm.BlockGather(group, block_bytes, torch.device("cpu"), limit, borrower)
        return made, made.own.untyped_storage().data_ptr() == memory.data_ptr()

    assert gather(48, 1000)[1] is False  # larger than the buffer
    assert gather(32, 63)[1] is False  # larger than comm_buffer_size
    first, registered = gather()
    assert registered
    assert first.own.data_ptr() == memory.data_ptr() + 32  # the block of rank 1, gathered in place
    assert gather()[1] is False  # two gathers in flight
    assert first.wait().data_ptr() == memory.data_ptr()
    with pytest.raises(RuntimeError, match="waited for already"):
        first.wait()
    second, registered = gather(16)
    assert registered
    del second  # by an error: on all ranks, or the group is broken anyway
    assert gather()[1] is False
    comm.begin_forward(group, 8)  # another model's: the gather may be under way
    assert gather()[1] is False
    comm.begin_forward(group, 7)
    assert gather()[1] is True


def test_a_model_of_several_ranks_can_be_copied() -> None:
    class NoCopies(FakeGroup):
        def __deepcopy__(self, memo: dict[int, object]) -> FakeGroup:
            raise TypeError("cannot pickle ProcessGroup")

    layer = MlaAttention(mla_config(), 0, parallelism(2), NoCopies())  # type: ignore[arg-type]
    copied = copy.deepcopy(layer)
    assert copied.group == layer.group
    assert copied.o_proj.weight.data_ptr() != layer.o_proj.weight.data_ptr()
