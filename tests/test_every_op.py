"""What holds for every op, on small samples: opcheck, empty inputs, no aliasing, determinism, streams, CUDA graphs."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sanitize
import torch
from op_samples import sample, tensors
from stream_gate import StreamGate

from sparse_cp_ops._autograd import OP_NAMES


def op(name: str) -> Any:
    return getattr(torch.ops.sparse_cp_ops, name).default


def run_on_clones(name: str, args: tuple[Any, ...]) -> list[torch.Tensor]:
    """Results and arguments after the call, so that what an op mutates is compared too."""
    cloned = tuple(a.clone() if isinstance(a, torch.Tensor) else a for a in args)
    return [*tensors(op(name)(*cloned)), *tensors(cloned)]


def assert_same_bits(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == e.dtype
        assert a.shape == e.shape
        if a.numel():
            assert torch.equal(a.contiguous().view(torch.uint8), e.contiguous().view(torch.uint8))


@pytest.mark.parametrize("name", OP_NAMES)
def test_opcheck(device: str, name: str) -> None:
    torch.library.opcheck(op(name), sample(name, device))


@pytest.mark.parametrize("name", OP_NAMES)
def test_no_rows_give_empty_results(device: str, name: str) -> None:
    results = tensors(op(name)(*sample(name, device, count=0)))
    if name != "expand_cp_plan":  # its rows are given as numbers
        assert all(result.numel() == 0 for result in results)


@pytest.mark.parametrize("name", OP_NAMES)
def test_results_do_not_alias_arguments(device: str, name: str) -> None:
    args = sample(name, device)
    owned = {a.untyped_storage().data_ptr() for a in tensors(args)}
    storages = [r.untyped_storage().data_ptr() for r in tensors(op(name)(*args))]
    assert not owned & set(storages)
    assert len(set(storages)) == len(storages)


@pytest.mark.parametrize("name", OP_NAMES)
def test_same_bits_from_run_to_run(device: str, name: str) -> None:
    args = sample(name, device)
    first = run_on_clones(name, args)
    for _ in range(5):
        assert_same_bits(run_on_clones(name, args), first)


@pytest.mark.parametrize("name", OP_NAMES)
def test_only_declared_arguments_change(device: str, name: str) -> None:
    args = sample(name, device)
    before = [a.clone() if isinstance(a, torch.Tensor) else None for a in args]
    op(name)(*args)
    for argument, value, old in zip(op(name)._schema.arguments, args, before, strict=False):
        if old is not None and argument.alias_info is None:
            assert_same_bits([value], [old])


@pytest.mark.parametrize(
    "name", [name for name in OP_NAMES if any(x.is_floating_point() for x in tensors(sample(name, "cpu")))]
)
def test_every_argument_that_requires_grad_is_refused(device: str, name: str) -> None:
    args = sample(name, device)
    for i, argument in enumerate(op(name)._schema.arguments[: len(args)]):
        if not isinstance(args[i], torch.Tensor) or not args[i].is_floating_point():
            continue
        tracked = (*args[:i], args[i].clone().requires_grad_(), *args[i + 1 :])
        with pytest.raises(RuntimeError, match=f"{name} is inference only, but {argument.name} requires grad"):
            op(name)(*tracked)
        with torch.no_grad():
            op(name)(*tracked)


@pytest.mark.parametrize("name", OP_NAMES)
def test_mutation_bumps_the_version_counter(device: str, name: str) -> None:
    args = sample(name, device)
    before = [a._version if isinstance(a, torch.Tensor) else 0 for a in args]
    with torch.no_grad():
        op(name)(*args)
    for argument, value, old in zip(op(name)._schema.arguments, args, before, strict=False):
        if isinstance(value, torch.Tensor):
            written = argument.alias_info is not None and argument.alias_info.is_write
            assert (value._version > old) == written


@pytest.mark.cuda
@pytest.mark.parametrize("name", OP_NAMES)
def test_no_host_synchronisation(name: str) -> None:
    args = sample(name, "cuda")
    op(name)(*args)  # modules load at the first call
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        op(name)(*args)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.cuda
@pytest.mark.parametrize("name", OP_NAMES)
def test_runs_on_the_current_stream(name: str) -> None:
    """Inputs that come late on a side stream: an op on another stream would run before they are there."""
    args = sample(name, "cuda")
    expected = run_on_clones(name, args)
    late = tuple(a.clone() if isinstance(a, torch.Tensor) else a for a in args)
    for tensor in tensors(late):
        tensor.view(torch.uint8).fill_(0xFF)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        op(name)(*late)  # what the stream needs for the first time is there before it is held
        side.synchronize()
        with StreamGate(side) as gate:
            for target, value in zip(late, args, strict=True):
                if isinstance(target, torch.Tensor):
                    target.copy_(value)
            results = [*tensors(op(name)(*late)), *tensors(late)]
            torch.cuda.default_stream().synchronize()
            assert gate.is_closed
    assert_same_bits(results, expected)


@pytest.mark.cuda
@pytest.mark.parametrize("name", OP_NAMES)
def test_graph_replays_with_other_lengths(name: str) -> None:
    first, second = sample(name, "cuda"), sample(name, "cuda", shift=3)
    expected = run_on_clones(name, second)
    run_on_clones(name, first)
    static = tuple(a.clone() if isinstance(a, torch.Tensor) else a for a in first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = tensors(op(name)(*static))
    for target, source in zip(static, second, strict=True):
        if isinstance(target, torch.Tensor):
            target.copy_(source)
    for result in results:
        result.view(torch.uint8).fill_(0xFF)
    graph.replay()
    torch.cuda.synchronize()
    assert_same_bits([*results, *tensors(static)], expected)


@pytest.mark.cuda
@pytest.mark.parametrize(
    "name", [name for name in OP_NAMES if not name.startswith(("indexer_", "sparse_mla", "attend_"))]
)
def test_memory_bound_ops_are_one_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # which would be kernels, too
    args = sample(name, "cuda")
    op(name)(*args)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        op(name)(*args)
        torch.cuda.synchronize()
    events = profile.profiler.kineto_results.events()
    on_device = [event.name() for event in events if event.device_type() == torch.autograd.DeviceType.CUDA]
    assert len(on_device) == 1, on_device


@pytest.mark.two_gpus
@pytest.mark.parametrize("name", OP_NAMES)
def test_second_device(name: str) -> None:
    args = sample(name, "cuda:1")
    on_first = tuple(a.to("cuda:0") if isinstance(a, torch.Tensor) else a for a in args)
    assert_same_bits([r.cpu() for r in run_on_clones(name, args)], [r.cpu() for r in run_on_clones(name, on_first)])


@pytest.mark.two_gpus
@pytest.mark.parametrize("group", [group for group in sanitize.GROUPS if group is not sanitize.stored_entries])
def test_every_kernel_on_a_second_device(group: Callable[[], Iterator[sanitize.Call]]) -> None:
    """Behind the same call on the first one, which has asked for what a kernel needs once a device: shared memory."""
    for name, call, args in group():
        on_second = tuple(a.to("cuda:1") if isinstance(a, torch.Tensor) and a.is_cuda else a for a in args)
        expected = [*tensors(call(*args)), *tensors(args)]
        actual = [*tensors(call(*on_second)), *tensors(on_second)]
        for mine, theirs in zip(actual, expected, strict=True):
            assert torch.equal(
                mine.cpu().contiguous().view(torch.uint8), theirs.cpu().contiguous().view(torch.uint8)
            ), name
    assert torch.cuda.current_device() == 0
