"""The two ways to share the new tokens of a batch among ranks, as index mappings and nothing else.

A split maps request lengths to ``rearrange`` [S * L] and ``restore`` [T] (int64): ``rearrange[rank * L + row]`` is the
packed token in that row of that rank, -1 for a pad, and ``x[rearrange][restore] == x`` for any packed ``x`` [T, ...].
These are host-side definitions for reading and testing; :class:`~sparse_cp_ops.context_parallel.plan.CpPlan` makes
the same maps on the device without a loop over tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Split:
    """Index maps of one batch over ``cp_size`` ranks."""

    rearrange: Tensor  # [cp_size * local_rows] int64: packed token of a gathered row, -1 for a pad
    restore: Tensor  # [total_tokens] int64: gathered row of a packed token
    local_rows: int


def zigzag(new_lens: Sequence[int], cp_size: int) -> Split:
    """Pad each request to 2S chunks; rank r owns chunks r and 2S - 1 - r, request after request.

    With causal attention early and late chunks together cost every rank the same.
    """
    ranks: list[list[int]] = [[] for _ in range(cp_size)]
    start = 0
    for new_len in new_lens:
        chunk = -(-new_len // (2 * cp_size))
        padded = list(range(start, start + new_len)) + [-1] * (2 * cp_size * chunk - new_len)
        chunks = [padded[i * chunk : (i + 1) * chunk] for i in range(2 * cp_size)]
        for rank, rows in enumerate(ranks):
            rows += chunks[rank] + chunks[2 * cp_size - 1 - rank]
        start += new_len
    return _from_rows(ranks)


def interleave(new_lens: Sequence[int], cp_size: int) -> Split:
    """Deal the packed token stream out like cards: token t is row t // S of rank t % S."""
    total = sum(new_lens)
    padded = list(range(total)) + [-1] * (-total % cp_size)
    return _from_rows([padded[rank::cp_size] for rank in range(cp_size)])


def _from_rows(ranks: list[list[int]]) -> Split:
    rearrange = torch.tensor([token for rows in ranks for token in rows], dtype=torch.int64)
    valid = (rearrange >= 0).nonzero().flatten()
    restore = torch.empty(len(valid), dtype=torch.int64)
    restore[rearrange[valid]] = valid
    return Split(rearrange, restore, len(ranks[0]))


SPLITS: dict[str, Callable[[Sequence[int], int], Split]] = {"zigzag": zigzag, "interleave": interleave}
