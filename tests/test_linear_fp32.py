"""Products with float32 results: exact factors, whatever the dtypes and the number of rows."""

import pytest
import torch
from torch import Tensor

from sparse_cp_ops.nn.linear_fp32 import MANY_ROWS, bf16_parts, linear_fp32

K = 7168  # DeepSeek-V3.2's hidden size


def check(out: Tensor, x: Tensor, weight: Tensor) -> None:
    """Against float64: an error of 2^-24 of the sum of magnitudes a step, in any order of at most K steps.

    Errors are as good as independent, so the root of K is left of it; a factor of 4 covers the worst of all elements
    and tensor cores, which cut where fp32 units round.
    """
    x, weight = x.double(), weight.double()
    error = (out.double() - x @ weight.T).abs()
    bound = 4 * K**0.5 * 2**-24 * (x.abs() @ weight.abs().T) + 1e-30
    assert out.dtype == torch.float32
    assert (error <= bound).all(), float((error / bound).max())


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("rows", [0, 3, MANY_ROWS, MANY_ROWS + 5])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@torch.no_grad()
def test_neither_factor_is_rounded(
    dtype: torch.dtype, weight_dtype: torch.dtype, rows: int, compiled: bool, device: str
) -> None:
    torch._dynamo.reset()
    function = torch.compile(linear_fp32, fullgraph=True) if compiled else linear_fp32
    x = torch.randn(rows, K, device=device).to(dtype)
    weight = torch.randn(8, K, device=device).to(weight_dtype)
    out = function(x, weight)
    assert out.shape == (rows, 8)
    check(out, x, weight)


def test_float64_is_rounded_once(device: str) -> None:
    x, weight = (torch.randn(n, 16, dtype=torch.float64).to(device) for n in (3, 5))
    assert torch.equal(linear_fp32(x, weight.float()), (x @ weight.float().double().T).float())


def test_the_parts_are_the_weight(device: str) -> None:
    exponents = torch.randint(-109, 127, (64, 256), device=device)
    weight = torch.ldexp(1 + torch.rand(64, 256, device=device), exponents) * torch.randn(64, 256, device=device).sign()
    parts = bf16_parts(weight)
    assert [part.dtype for part in parts] == [torch.bfloat16] * 3
    assert torch.equal(sum(part.double() for part in parts), weight.double())
    tiny = torch.ldexp(1 + torch.rand(64, 256, device=device), torch.randint(-140, -109, (64, 256), device=device))
    error = sum(part.double() for part in bf16_parts(tiny)) - tiny.double()
    assert (error.abs() <= 2**-134).all()


def test_the_op_says_what_it_does(device: str) -> None:
    x = torch.randn(MANY_ROWS, 16, device=device).bfloat16()
    torch.library.opcheck(torch.ops.sparse_cp_ops_nn.linear_fp32.default, (x, torch.randn(8, 16, device=device)))
