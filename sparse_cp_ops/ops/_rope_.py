from torch import Tensor

from sparse_cp_ops.ops import direct
from sparse_cp_ops.ops._fake import register_fake
from sparse_cp_ops.ops._types import require_bools, require_optional_tensors, require_tensors


def rope_(x: Tensor, positions: Tensor, cos_sin_cache: Tensor, interleaved: bool, source: Tensor | None = None) -> None:
    """Rotate ``x`` in place, or ``source`` into ``x``: the one RoPE of the package (https://arxiv.org/abs/2104.09864).

    Pair i of a row at position p becomes ``(a cos - b sin, b cos + a sin)`` with frequency i of the table, computed in
    fp32 and rounded once. Pairs are (2i, 2i+1) when ``interleaved``, else (i, i + d/2); the layout stays as it was.
    A row whose position is outside the table becomes NaN; nothing outside is read.

    Args:
        x: [n, h, d] or [n, d] bfloat16 or float32, last dimension contiguous, other strides free. Written.
        positions: [n] int32, contiguous.
        cos_sin_cache: [max_positions, d] float32, contiguous: d/2 cosines, then d/2 sines; d even.
        interleaved: which elements form a pair.
        source: what is rotated instead of ``x``: shape and dtype of x, last dimension contiguous, memory of its own.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: dtype, device, shape or stride does not fit; with SPARSE_CP_OPS_CHECK=1 also a position outside
            the table (row, position and value named).
        RuntimeError: an argument requires grad in grad mode.
    """
    require_tensors("rope_", x=x, positions=positions, cos_sin_cache=cos_sin_cache)
    require_bools("rope_", interleaved=interleaved)
    require_optional_tensors("rope_", source=source)
    direct.rope_(x, positions, cos_sin_cache, interleaved, source)


@register_fake("rope_")
def _fake(x: Tensor, positions: Tensor, cos_sin_cache: Tensor, interleaved: bool, source: Tensor | None = None) -> None:
    return None
