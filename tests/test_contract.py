"""What holds for every op: schema, wrapper, reference, fake kernel and the autograd refusal."""

import inspect

import pytest
import torch

from sparse_cp_ops import ops, reference
from sparse_cp_ops._autograd import OP_NAMES
from sparse_cp_ops.ops import direct

NAMESPACE = torch.ops.sparse_cp_ops


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
    if mutated and name != "quant_q_k_cp":
        assert not schema.returns
    assert all(result.alias_info is None for result in schema.returns)
