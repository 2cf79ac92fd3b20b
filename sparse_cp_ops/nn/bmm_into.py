"""Batched products written straight into a strided view, eager and under torch.compile."""

import torch
from torch import Tensor

# torch.compile turns ``bmm(out=view)`` into a product of its own and a copy: for q at 8192 rows of 128 heads 1 GiB
# written twice and read once. An op that mutates its argument it calls as it stands, on the view.
_library = torch.library.Library("sparse_cp_ops_nn", "DEF")
_library.define("bmm_into(Tensor(a!) out, Tensor a, Tensor b) -> ()")


def bmm_into(out: Tensor, a: Tensor, b: Tensor) -> None:
    """``out[...] = a @ b``; where the dtypes differ, through a product in the dtype of ``a`` that is rounded once.

    Args:
        out: [n, rows, columns], any strides. Written.
        a: [n, rows, k].
        b: [n, k, columns], dtype of ``a``.

    Raises:
        RuntimeError: shapes or dtypes do not fit.
    """
    if out.dtype != a.dtype:
        out.copy_(torch.bmm(a, b))
    elif torch.compiler.is_compiling():
        _traced(out, a, b)
    else:
        torch.bmm(a, b, out=out)


def _kernel(out: Tensor, a: Tensor, b: Tensor) -> None:
    torch.bmm(a, b, out=out)


def _fake(out: Tensor, a: Tensor, b: Tensor) -> None:
    return None


_library.impl("bmm_into", _kernel, "CompositeExplicitAutograd")
torch.library.register_fake("sparse_cp_ops_nn::bmm_into", _fake, lib=_library)
_traced = torch.ops.sparse_cp_ops_nn.bmm_into.default
