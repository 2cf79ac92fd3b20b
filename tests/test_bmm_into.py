"""The batched product into a strided view: eager, traced, as an op of its own."""

import pytest
import torch
from torch import Tensor

from sparse_cp_ops.nn.bmm_into import bmm_into


def operands(device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A buffer [rows, heads, 40], the view of its columns 8 to 31 as [heads, rows, 24], and the two factors."""
    buffer = torch.full((7, 3, 40), 5.0, dtype=dtype, device=device)
    a = torch.randn(7, 3, 16, device=device).to(dtype).transpose(0, 1)
    b = torch.randn(3, 24, 16, device=device).to(dtype).mT
    return buffer, buffer[..., 8:32].transpose(0, 1), a, b


def check(buffer: Tensor, a: Tensor, b: Tensor, relative_error: float) -> None:
    """Against products in float64; the columns beside the view are as they were."""
    a, b = a.double(), b.double()
    expected = torch.einsum("hrk,hkc->rhc", a, b)
    # Of sums of 16 products, rounded once from a float32 accumulator of 2^-24 a step.
    bound = relative_error * expected.abs() + 16 * 2**-23 * torch.einsum("hrk,hkc->rhc", a.abs(), b.abs())
    assert ((buffer[..., 8:32].double() - expected).abs() <= bound).all()
    assert (buffer[..., :8] == 5).all()
    assert (buffer[..., 32:] == 5).all()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("dtype", "error"), [(torch.bfloat16, 2**-8), (torch.float32, 2**-22)])
@torch.no_grad()
def test_products_in_a_view(dtype: torch.dtype, error: float, compiled: bool, device: str) -> None:
    torch._dynamo.reset()
    function = torch.compile(bmm_into, fullgraph=True) if compiled else bmm_into
    buffer, out, a, b = operands(device, dtype)
    function(out, a, b)
    check(buffer, a, b, error)


@pytest.mark.parametrize("compiled", [False, True])
@torch.no_grad()
def test_another_dtype_is_rounded_once(compiled: bool, device: str) -> None:
    torch._dynamo.reset()
    function = torch.compile(bmm_into, fullgraph=True) if compiled else bmm_into
    _, _, a, b = operands(device, torch.float64)
    buffer, out, _, _ = operands(device, torch.bfloat16)
    function(out, a, b)
    check(buffer, a, b, 2**-8)


def test_the_op_says_what_it_does(device: str) -> None:
    _, out, a, b = operands(device, torch.bfloat16)
    torch.library.opcheck(torch.ops.sparse_cp_ops_nn.bmm_into.default, (out, a, b))
