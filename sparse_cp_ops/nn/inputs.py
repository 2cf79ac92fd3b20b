"""What the caller says about a batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class AttentionInputs:
    """Lengths and pages of the batch of one forward. The package only reads them.

    Args:
        is_prefill: False for decode: no request has more than one new token. Mixed batches are prefill batches.
        new_lens: int32 [B] on the CPU: tokens of each request that this forward computes.
        prefix_lens: int32 [B] on the CPU: tokens of each request that the cache already holds.
        block_table: int32 [B, pages] on the device of the cache: page of tokens ``[i*page_size, (i+1)*page_size)`` of
            each request, negative where there is none.
        decisions: whatever else the ranks must have decided alike before this forward, for example
            :attr:`PrefixCache.decisions`. ``prepare`` compares it where it compares the lengths.

    Raises:
        TypeError: an argument of another type.
        ValueError: another dtype, device or shape, or a decode batch with a request of several new tokens.
    """

    is_prefill: bool
    new_lens: Tensor
    prefix_lens: Tensor
    block_table: Tensor
    decisions: bytes = b""

    def __post_init__(self) -> None:
        if not isinstance(self.is_prefill, bool):
            raise TypeError(f"AttentionInputs: is_prefill: expected bool, got {type(self.is_prefill).__name__}")
        if not isinstance(self.decisions, bytes):
            raise TypeError(f"AttentionInputs: decisions: expected bytes, got {type(self.decisions).__name__}")
        for name, dims in (("new_lens", 1), ("prefix_lens", 1), ("block_table", 2)):
            value = getattr(self, name)
            if not isinstance(value, Tensor):
                raise TypeError(f"AttentionInputs: {name}: expected a torch.Tensor, got {type(value).__name__}")
            if value.ndim != dims:
                raise ValueError(f"AttentionInputs: {name}: expected {dims} dimensions, got {value.ndim}")
            if value.dtype != torch.int32:
                raise ValueError(f"AttentionInputs: {name}: expected dtype int32, got {value.dtype}")
            if name != "block_table" and value.device.type != "cpu":
                raise ValueError(f"AttentionInputs: {name}: expected a tensor on the CPU, got {value.device}")
        for name in ("prefix_lens", "block_table"):
            rows = getattr(self, name).shape[0]
            if rows != self.num_requests:
                raise ValueError(
                    f"AttentionInputs: {name}: expected {self.num_requests} requests as in new_lens, got {rows}"
                )
        if not self.is_prefill and self.num_requests:
            longest = int(self.new_lens.max())
            if longest > 1:
                raise ValueError(
                    f"AttentionInputs: new_lens: expected at most 1 token a request in a decode batch, got {longest}"
                )

    @property
    def num_requests(self) -> int:
        """Requests of the batch."""
        return self.new_lens.shape[0]

    @property
    def device(self) -> torch.device:
        """Device of the forward."""
        return self.block_table.device
