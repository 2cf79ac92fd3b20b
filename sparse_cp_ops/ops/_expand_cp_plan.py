from typing import NamedTuple

from torch import Tensor

from sparse_cp_ops.ops import direct
from sparse_cp_ops.ops._fake import register_fake
from sparse_cp_ops.ops._types import require_ints, require_strs, require_tensors


class CpPlanRows(NamedTuple):
    """What :func:`expand_cp_plan` returns; all int32. L = local rows, S = ranks, T = tokens."""

    req_ids: Tensor  # [L] request of a local row, -1 for a pad
    positions: Tensor  # [L] prefix_len + offset in the new tokens, 0 for a pad
    kv_lens: Tensor  # [L] position + 1, 0 for a pad
    token_ids: Tensor  # [L] row of the packed token stream, -1 for a pad
    gathered_req_ids: Tensor  # [S * L], gathered row = rank * L + local row
    gathered_positions: Tensor  # [S * L]
    restore: Tensor  # [T] gathered row of a token, -1 if it has none


def expand_cp_plan(
    request_table: Tensor, cp_rank: int, cp_size: int, split: str, local_rows: int, total_tokens: int
) -> CpPlanRows:
    """Expand a table of requests into the per-row tensors of one rank and of all gathered rows.

    ``"zigzag"``: each request is padded to a multiple of 2 * cp_size and cut into 2 * cp_size chunks; rank r owns
    chunks r and 2 * cp_size - 1 - r; its rows run request after request, each [chunk r | chunk 2 * cp_size - 1 - r].
    ``"interleave"``: token t of the packed stream is local row t // cp_size of rank t % cp_size.

    Rows behind the batch are pads, ``restore`` behind it is -1. With too few rows or tokens the rest is cut: a token
    without a row has restore -1. A negative length counts as 0; a token whose kv_len would not fit int32 has no row.

    Args:
        request_table: [B, 2] int32, contiguous: (prefix_len, new_len) of every request.
        cp_rank: this rank, in [0, cp_size).
        cp_size: number of ranks.
        split: "zigzag" or "interleave".
        local_rows: L, rows of every rank.
        total_tokens: T, length of ``restore``.

    Returns:
        :class:`CpPlanRows` on the table's device.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: dtype, shape, stride or a number does not fit; under SPARSE_CP_OPS_CHECK=1 also where lengths are
            negative or tokens were cut.
    """
    require_tensors("expand_cp_plan", request_table=request_table)
    require_ints("expand_cp_plan", cp_rank=cp_rank, cp_size=cp_size, local_rows=local_rows, total_tokens=total_tokens)
    require_strs("expand_cp_plan", split=split)
    rows = direct.expand_cp_plan(request_table, cp_rank, cp_size, split, local_rows, total_tokens)
    return CpPlanRows(*rows)


@register_fake("expand_cp_plan")
def _fake(
    request_table: Tensor, cp_rank: int, cp_size: int, split: str, local_rows: int, total_tokens: int
) -> tuple[Tensor, ...]:
    sizes = [local_rows] * 4 + [cp_size * local_rows] * 2 + [total_tokens]
    return tuple(request_table.new_empty(size) for size in sizes)
