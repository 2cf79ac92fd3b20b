"""Products with float32 results, from bf16 inputs without a float32 copy of them."""

import torch
import torch.nn.functional as F
from torch import Tensor

# Taking a weight apart is seven small kernels, 15 us on an H200; so long take the cast and the product of 1024 rows.
MANY_ROWS = 1024

# An op of its own, because torch.compile would make graphs for few and for many rows.
_library = torch.library.Library("sparse_cp_ops_nn", "FRAGMENT")
_library.define("linear_fp32(Tensor x, Tensor weight) -> Tensor")


def linear_fp32(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight.T`` in float32 without rounding either factor.

    A bf16 ``x`` meets bf16 parts of the weight in one product that sums in float32, in which products of bf16 values
    are exact: what a float32 product of the cast tensors gives, up to its sums. Tensor cores cut what they add, where
    float32 units round: 7168 products are off by up to 1e-5 of the largest result, and by 1e-6 of it there.

    Args:
        x: [rows, k].
        weight: [n, k].

    Returns:
        float32 [rows, n]; float64 inputs are multiplied in float64 and rounded once.
    """
    return _traced(x, weight) if torch.compiler.is_compiling() else _kernel(x, weight)


def _kernel(x: Tensor, weight: Tensor) -> Tensor:
    if x.is_cuda and x.dtype == torch.bfloat16:
        if weight.dtype == torch.bfloat16:
            return torch.mm(x, weight.t(), out_dtype=torch.float32)
        if weight.dtype == torch.float32 and x.shape[0] >= MANY_ROWS:
            parts = torch.mm(x, torch.cat(bf16_parts(weight)).t(), out_dtype=torch.float32)
            return parts.view(x.shape[0], 3, weight.shape[0]).sum(1)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    return as_dtype(F.linear(as_dtype(x, wide), as_dtype(weight, wide)), torch.float32)


def bf16_parts(weight: Tensor) -> list[Tensor]:
    """Three bf16 tensors whose sum is the float32 one: 8 bits of the 24 in each.

    Exact where the last part is no smaller than bf16 holds, that is for magnitudes from 2^-109 on; below, the error is
    at most 2^-134.
    """
    first = weight.bfloat16()
    rest = weight - first
    second = rest.bfloat16()
    return [first, second, (rest - second).bfloat16()]


def as_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x.to(dtype)``, which takes the host a microsecond even where it does nothing."""
    return x if x.dtype == dtype else x.to(dtype)


def _fake(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=torch.float32)


_library.impl("linear_fp32", _kernel, "CompositeExplicitAutograd")
torch.library.register_fake("sparse_cp_ops_nn::linear_fp32", _fake, lib=_library)
_traced = torch.ops.sparse_cp_ops_nn.linear_fp32.default
