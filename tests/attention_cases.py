"""Inputs of sparse_mla_fp8_cp and its error bounds."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from builders import num_pages, random_block_table, random_mla_cache, slots_of
from torch import Tensor

from sparse_cp_ops import reference

SCALE = 576**-0.5


@dataclass(frozen=True)
class AttentionCase:
    """The six tensors of the op, in the order of its signature."""

    q: Tensor
    kv_cache: Tensor
    indices: Tensor
    block_table: Tensor | None
    req_ids: Tensor | None
    kv_lens: Tensor | None

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return tuple(getattr(self, field.name) for field in fields(self))

    def to(self, device: str) -> "AttentionCase":
        return AttentionCase(*(None if t is None else t.to(device) for t in self.tensors))

    def rows(self, index: Tensor | slice | list[int]) -> "AttentionCase":
        """The same cache and requests, other query rows."""
        assert self.req_ids is not None
        assert self.kv_lens is not None
        return replace(
            self,
            q=self.q[index],
            indices=self.indices[index],
            req_ids=self.req_ids[index],
            kv_lens=self.kv_lens[index],
        )

    def with_slots(self) -> "AttentionCase":
        """The same attention with physical slots; entries that are not used become -1."""
        assert self.block_table is not None
        assert self.req_ids is not None
        assert self.kv_lens is not None
        page_size = self.kv_cache.shape[1]
        slots = torch.full_like(self.indices, -1)
        for row, (request, length) in enumerate(zip(self.req_ids.tolist(), self.kv_lens.tolist(), strict=True)):
            used = (self.indices[row] >= 0) & (self.indices[row] < length)
            if 0 <= request < self.block_table.shape[0]:
                of_position = slots_of(self.block_table, request, length, page_size)
                slots[row, used] = of_position[self.indices[row, used].long()].int()
        return AttentionCase(self.q, self.kv_cache, slots, None, None, None)


def index_list(length: int, count: int, width: int) -> Tensor:
    """int32 [width]: ``count`` different positions below ``length`` among holes, in random order."""
    entries = torch.full((width,), -1, dtype=torch.int32)
    entries[torch.randperm(width)[:count]] = torch.randperm(length)[:count].int()
    return entries


def random_case(
    rows: Sequence[tuple[int, int, int]],
    heads: int = 8,
    width: int = 128,
    page_size: int = 64,
    scale_kind: str = "fp32",
) -> AttentionCase:
    """``rows`` lists (req_id, kv_len, listed keys); req_id -1 is a pad."""
    requests = max([request for request, _, _ in rows], default=-1) + 1
    longest = [max([length for r, length, _ in rows if r == request], default=0) for request in range(requests)]
    lists = [index_list(length, count, width) for _, length, count in rows]
    return AttentionCase(
        torch.randn(len(rows), heads, 576).bfloat16(),
        random_mla_cache(num_pages(longest, page_size), page_size, scale_kind),
        torch.stack(lists) if lists else torch.empty(0, width, dtype=torch.int32),
        random_block_table(longest, page_size),
        torch.tensor([request for request, _, _ in rows], dtype=torch.int32),
        torch.tensor([length for _, length, _ in rows], dtype=torch.int32),
    )


def comparable(out: Tensor, lse: Tensor, exact_lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Results in f64 on the CPU, and which rows and heads have no key: those are zero, with an LSE of -inf."""
    assert out.dtype == torch.bfloat16
    assert lse.dtype == torch.float32
    out, lse = out.cpu().double(), lse.cpu().double()
    empty = exact_lse.isneginf()
    assert torch.equal(lse.isneginf(), empty)
    assert (out[empty] == 0).all()
    return out, lse, empty


def assert_within_bounds(out: Tensor, lse: Tensor, exact_out: Tensor, exact_lse: Tensor) -> None:
    """The error bounds of docs/semantics.md against fp64 over the dequantised cache."""
    out, lse, empty = comparable(out, lse, exact_lse)
    torch.testing.assert_close(out, exact_out, rtol=2.01 / 128, atol=1e-3)
    torch.testing.assert_close(lse[~empty], exact_lse[~empty], rtol=8.01 / 65536, atol=1e-5)
    norms = (out.square().sum() + exact_out.square().sum()).item()
    if norms:
        assert 1 - 2 * (out * exact_out).sum().item() / norms <= 5e-6


def assert_same_bits(mine: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor]) -> None:
    """Equal as bytes: NaN equals NaN, 0 differs from -0."""
    assert torch.equal(mine[0].view(torch.int16), theirs[0].view(torch.int16))
    assert torch.equal(mine[1].view(torch.int32), theirs[1].view(torch.int32))


def logit_noise(case: AttentionCase, scale: float) -> Tensor:
    """f64 [rows, heads]: |scale| * max over the listed keys of |q * k|, element by element over the latent part.

    Rounding q to e4m3 moves a logit by 0.026 of that in root mean square.
    """
    slots = case.indices if case.block_table is None else case.with_slots().indices
    total = case.kv_cache.shape[0] * case.kv_cache.shape[1]
    noise = torch.zeros(case.q.shape[:2], dtype=torch.float64)
    for row, listed in enumerate(slots.long()):
        used = listed[(listed >= 0) & (listed < total)]
        if len(used):
            keys = reference.dequantize_kv(case.kv_cache, used).double()[:, :512].square()
            noise[row] = (case.q[row, :, :512].double().square() @ keys.T).amax(1).sqrt()
    return noise * abs(scale)


def assert_within_fp8_bounds(
    out: Tensor, lse: Tensor, exact_out: Tensor, exact_lse: Tensor, noise: Tensor, lse_factor: float = 0.18
) -> None:
    """The bounds of precision="fp8" in docs/semantics.md; ``noise``: logit_noise()."""
    out, lse, empty = comparable(out, lse, exact_lse)
    assert out.isfinite().all()
    assert (out - exact_out).norm() <= 0.1 * exact_out.norm()
    excess = (lse - exact_lse)[~empty].abs() - lse_factor * noise[~empty]
    assert excess.numel() == 0 or excess.max() < 1e-4 + 8.01 / 65536 * exact_lse[~empty].abs().max()
