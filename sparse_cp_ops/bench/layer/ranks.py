"""Ranks that share one device: each rank's own work is real, what travels between ranks is modelled.

A gather's time comes from a measured table (two H200 with NVLink, one NCCL all-gather of 788-byte rows from memory that
is not registered); more ranks take the entry of the bytes that a rank receives. Nothing here says how ranks disturb
each other.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from sparse_cp_ops.config import CPRotateMethod, ParallelismConfig, PrefillCPConfig
from sparse_cp_ops.context_parallel import collectives
from sparse_cp_ops.context_parallel.registered_buffer import RegisteredBuffer

# Bytes that a rank receives -> microseconds of one packed gather, benchmarks/results/H200x2.md.
GATHER_TABLE = (
    (100_864, 45.0),
    (3_227_648, 45.0),
    (12_910_592, 78.0),
    (25_821_184, 133.0),
    (51_642_368, 248.0),
)


def modelled_gather_us(received_bytes: int) -> float:
    """Time of an all-gather in which a rank receives so many bytes: between the table's entries, and beyond its last
    one, a straight line."""
    sizes = [size for size, _ in GATHER_TABLE]
    if received_bytes <= sizes[0]:
        return GATHER_TABLE[0][1] if received_bytes else 0.0
    i = min(bisect_left(sizes, received_bytes), len(sizes) - 1)
    (left, left_us), (right, right_us) = GATHER_TABLE[i - 1], GATHER_TABLE[i]
    return left_us + (right_us - left_us) * (received_bytes - left) / (right - left)


class SimulatedRanks:
    """Stands in for a process group; the modules see ``size`` ranks and are ``rank``."""

    group_name = "simulated"

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def context_parallel(
    rank: int, size: int, split: str = "interleave", decode_mode: str = "replicated", min_tokens: int = 0
) -> ParallelismConfig:
    """Context parallelism on ``size`` ranks, whatever the batch unless ``min_tokens`` says otherwise."""
    method = CPRotateMethod.ALL_GATHER_WITH_OVERLAP
    cp = PrefillCPConfig(
        method=method, min_tokens=min_tokens, min_kv_work=0, split=split, decode_mode=decode_mode,
        comm_buffer_size=4 << 30,
    )  # fmt: skip
    return ParallelismConfig(tp_size=size, tp_rank=rank, world_size=size, world_rank=rank, prefill_cp_config=cp)


class _Clock:
    """Cycles of ``torch.cuda._sleep`` a microsecond, at the clock of a busy device."""

    def __init__(self, device: torch.device) -> None:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        matrix = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
        for _ in range(20):
            matrix @ matrix
        start.record()
        torch.cuda._sleep(1_000_000)
        stop.record()
        stop.synchronize()
        self.cycles_per_us = 1_000_000 / (start.elapsed_time(stop) * 1e3)


@contextlib.contextmanager
def simulated_communication(device: torch.device) -> Iterator[None]:
    """Collectives of :class:`SimulatedRanks` take their modelled time on their stream and move nothing.

    The other ranks' records have to be in the registered buffer beforehand (:func:`registered_blocks`); of anything
    else every rank is taken to send the same.
    """
    clock = _Clock(device) if device.type == "cuda" else None

    def all_gather(output: Tensor, own: Tensor, group: Any = None, async_op: bool = False) -> Any:
        if own.dtype != torch.uint8 or group not in collectives._registered_buffers:
            output.view(group.size(), *own.shape).copy_(own.expand(group.size(), *own.shape))
        if clock is not None:
            received = own.nbytes * (group.size() - 1)
            torch.cuda._sleep(int(modelled_gather_us(received) * clock.cycles_per_us))
        return mock.Mock() if async_op else None

    def all_reduce(x: Tensor, group: Any = None) -> None:
        if clock is not None:
            torch.cuda._sleep(int(modelled_gather_us(x.nbytes) * clock.cycles_per_us))

    with (
        mock.patch.object(collectives, "_all_gather_single", all_gather),
        mock.patch.object(dist, "all_reduce", all_reduce),
    ):
        yield


def registered_blocks(group: SimulatedRanks, nbytes: int, device: torch.device) -> Tensor:
    """uint8 [nbytes] that the group's gathers of records use from now on, in place of memory that NCCL registered."""
    memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
    collectives._registered_buffers[group] = RegisteredBuffer(memory)  # type: ignore[index]
    return memory
