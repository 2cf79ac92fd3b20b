"""What holds for every op: schema, wrapper, reference, fake kernel and the autograd refusal."""

import inspect
import re
from pathlib import Path

import pytest
import torch

from sparse_cp_ops import ops, reference
from sparse_cp_ops._autograd import OP_NAMES
from sparse_cp_ops.ops import direct

NAMESPACE = torch.ops.sparse_cp_ops
CUDA_SOURCES = Path(__file__).parents[1] / "csrc" / "cuda"


def registered_ops() -> set[str]:
    return {
        schema.name.split("::")[1]
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("sparse_cp_ops::")
    }


def test_every_schema_has_an_autograd_kernel() -> None:
    assert registered_ops() == set(OP_NAMES)


@pytest.mark.parametrize("name", OP_NAMES)
def test_wrapper_reference_and_schema_agree(name: str) -> None:
    schema = getattr(NAMESPACE, name).default._schema
    wrapper = inspect.signature(getattr(ops, name))
    assert [argument.name for argument in schema.arguments] == list(wrapper.parameters)
    for argument in schema.arguments:
        if argument.has_default_value():
            assert wrapper.parameters[argument.name].default == argument.default_value
    assert getattr(ops, name).__doc__
    assert getattr(direct, name) is getattr(NAMESPACE, name).default
    assert callable(getattr(reference, name))


@pytest.mark.parametrize("name", OP_NAMES)
@pytest.mark.parametrize("key", ["CPU", "Meta", "Autograd"])
def test_kernels_are_registered(name: str, key: str) -> None:
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"sparse_cp_ops::{name}", key)


@pytest.mark.cuda
@pytest.mark.parametrize("name", OP_NAMES)
def test_cuda_kernels_are_registered(name: str) -> None:
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"sparse_cp_ops::{name}", "CUDA")


@pytest.mark.parametrize("name", OP_NAMES)
def test_mutation_is_declared_and_returns_nothing(name: str) -> None:
    schema = getattr(NAMESPACE, name).default._schema
    mutated = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    if mutated and name not in ("quant_q_k_cp", "attend_new_rows"):
        assert not schema.returns
    assert all(result.alias_info is None for result in schema.returns)


def test_cuda_sources_call_nothing_that_waits_allocates_or_makes_a_stream() -> None:
    """Also on paths that no test takes: torch's synchronisation mode sees only what torch calls."""
    called = {
        match: path.name
        for path in CUDA_SOURCES.rglob("*.*")
        for match in re.findall(r"\b(?:cuda|cu)[A-Z]\w+(?=\()", path.read_text())
    }
    assert "cudaLaunchKernelEx" in called
    forbidden = r"Synchronize|Malloc|Alloc|Free|Memcpy|StreamCreate|HostRegister|EventCreate|DeviceSet"
    assert {call: file for call, file in called.items() if re.search(forbidden, call)} == {}
