"""Everything that travels between ranks: the one file that talks to torch.distributed.

Eager calls and CUDA graphs use the process group itself; the gather of a layer then runs on a stream of its own. Under
torch.compile the functional collectives are traced, and the overlap is where the wait stands.

Every rank of a group calls the same functions in the same order; sizes are equal on all ranks, whatever rows they own.
A rank that fails leaves the others in a collective that ends with an error after the process group's timeout.
"""

from __future__ import annotations

import functools
import logging
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from sparse_cp_ops.context_parallel.registered_buffer import RegisteredBuffer

if TYPE_CHECKING:
    from sparse_cp_ops.config import ParallelismConfig
    from sparse_cp_ops.context_parallel.plan import CpPlan

logger = logging.getLogger(__name__)

# torch 2.13 has a new name and warns at the old one, 2.11 has only the old one, a build without distributed has none.
_all_gather_single: Any = getattr(dist, "all_gather_single", getattr(dist, "all_gather_into_tensor", None))


@dataclass(frozen=True)
class CpGroup:
    """The ranks that share a batch. Made once a model; forwards under torch.compile read ``name`` and ``size`` only.

    Attributes:
        size: number of ranks; 1 means that nothing is ever communicated.
        rank: this process within the group.
        name: how the functional collectives find the group; "" for a single rank.
        process_group: None for a single rank.
    """

    size: int = 1
    rank: int = 0
    name: str = ""
    process_group: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> CpGroup:
        """The ranks of a process group; None is a single rank.

        Raises:
            TypeError: anything else, for example what ``new_group`` returns to a process that is not in the group.
        """
        if group is None:
            return cls()
        if not callable(getattr(group, "size", None)):
            raise TypeError(f"group: expected a ProcessGroup that this process belongs to, or None, got {group!r}")
        if group.size() == 1:
            return cls()
        return cls(group.size(), group.rank(), group.group_name, group)

    def __deepcopy__(self, memo: dict[int, object]) -> CpGroup:
        return self  # a copied model talks to the same ranks; process groups can't be copied


def all_reduce_sum(x: Tensor, group: CpGroup) -> Tensor:
    """Sum over the ranks. Uses up ``x``: eagerly the sum is written into it."""
    if group.size == 1:
        return x
    if torch.compiler.is_compiling():
        return _wait_functional(torch.ops._c10d_functional.all_reduce(x.contiguous(), "sum", group.name))
    x = x.contiguous()
    dist.all_reduce(x, group=group.process_group)
    return x


def all_gather_rows(x: Tensor, group: CpGroup) -> Tensor:
    """[n, ...] of every rank -> [size * n, ...] on all of them, rank after rank. n is the same everywhere."""
    if group.size == 1:
        return x
    x = x.contiguous()
    if torch.compiler.is_compiling():
        return _wait_functional(torch.ops._c10d_functional.all_gather_into_tensor(x, group.size, group.name))
    gathered = x.new_empty(group.size * x.shape[0], *x.shape[1:])
    _all_gather_single(gathered, x, group=group.process_group)
    return gathered


def rows_are_split(plan: CpPlan) -> bool:
    """Whether each rank computes only some of the rows inside the attention layers."""
    return plan.use_cp or plan.head_mode == "batch_slice"


def _require_rows(name: str, rows: Tensor, expected: int, what: str) -> None:
    if rows.shape[0] != expected:
        raise ValueError(f"{name}: expected {expected} rows ({what}), got {rows.shape[0]}")


def _require_ranks(group: CpGroup, plan: CpPlan) -> None:
    if not isinstance(group, CpGroup):
        raise TypeError(f"group: expected a CpGroup (impl.group or CpGroup.of), got {type(group).__name__}")
    if rows_are_split(plan) and group.size != plan.cp_size:
        raise ValueError(f"group: expected the {plan.cp_size} ranks of the plan, got {group.size}")


def take_local_rows(packed: Tensor, plan: CpPlan) -> Tensor:
    """This rank's rows [L, ...] of a packed tensor [T, ...] that all ranks hold; pads repeat row 0.

    Raises:
        ValueError: another number of rows; a plan with spare room takes fewer.
    """
    if not rows_are_split(plan):
        return packed
    if not plan.has_capacity or packed.shape[0] > plan.restore.shape[0]:
        _require_rows("packed", packed, plan.restore.shape[0], "the new tokens of the plan")
    if packed.shape[0] == 0:
        return packed.new_zeros(plan.token_ids.shape[0], *packed.shape[1:])
    return packed.index_select(0, plan.token_ids.clamp(min=0))


def restore_rows(local: Tensor, plan: CpPlan, group: CpGroup) -> Tensor:
    """Rows [L, ...] of all ranks -> all rows [T, ...] in packed order, on every rank; the reverse of take_local_rows.

    Behind the last token of a plan with spare room there are zeros.

    Raises:
        TypeError, ValueError: another group or another number of rows than the plan's.
    """
    _require_ranks(group, plan)
    if not rows_are_split(plan):
        return local
    _require_rows("local", local, plan.token_ids.shape[0], "the local rows of the plan")
    gathered = all_gather_rows(local, group)
    if gathered.shape[0] == 0:
        return local.new_zeros(plan.restore.shape[0], *local.shape[1:])
    rows = gathered.index_select(0, plan.restore.clamp(min=0))
    return torch.where(_like_rows(plan.restore >= 0, rows), rows, 0)


def gather_hidden_states(hidden: Tensor, plan: CpPlan, group: CpGroup) -> Tensor:
    """At the end of a model: [L, ...] of this rank -> [T, ...] of the batch, on every rank.

    Without context parallelism the layers have kept all rows on every rank, and nothing is communicated.
    """
    return restore_rows(hidden, plan, group) if plan.use_cp else hidden


def gather_last_tokens(hidden: Tensor, plan: CpPlan, group: CpGroup) -> Tensor:
    """At the end of a model: the row of the last new token of every request, on every rank; B rows travel, not T.

    Args:
        hidden: [L, ...], this rank's rows.
        plan: the forward's plan.
        group: the ranks.

    Returns:
        [B, ...]; zeros for a request without new tokens.

    Raises:
        TypeError, ValueError: another group or another number of rows than the plan's.
    """
    _require_ranks(group, plan)
    rows = plan.restore if plan.head_mode == "batch_slice" else plan.token_ids
    _require_rows("hidden", hidden, rows.shape[0], "what a layer returns with this plan")
    new_lens = plan.request_table[:, 1]
    requests = new_lens.shape[0]
    if plan.restore.shape[0] == 0 or hidden.shape[0] == 0 or requests == 0:
        return hidden.new_zeros(requests, *hidden.shape[1:])
    last = (new_lens.cumsum(0) - 1).clamp(min=0)  # row of the packed stream
    if plan.use_cp:
        row = plan.restore.index_select(0, last).clamp(min=0)
        # Every rank sends one row a request, whoever owns it, so that sizes don't depend on the rank.
        mine = hidden.index_select(0, row % hidden.shape[0])
        all_ranks = all_gather_rows(mine, group)
        picked = all_ranks.index_select(
            0, row // hidden.shape[0] * requests + torch.arange(requests, device=row.device)
        )
    else:
        picked = hidden.index_select(0, last)
    return torch.where(_like_rows(new_lens > 0, picked), picked, 0)


def _like_rows(mask: Tensor, rows: Tensor) -> Tensor:
    """A mask [n] in a shape that broadcasts over rows [n, ...]."""
    return mask.view(-1, *[1] * (rows.ndim - 1))


def require_agreement(digest: int, group: CpGroup, device: torch.device) -> None:
    """Refuse a forward for which the ranks hold different inputs, before a gather of unequal sizes hangs or aborts.

    On the CPU all ranks raise ValueError. On CUDA, where the host must not wait, the comparison is a kernel: a
    difference ends the process with a device-side assertion.

    Args:
        digest: 64-bit signed number made from everything that the ranks have to agree on.
        device: device of the forward.
    """
    mine = torch.tensor([digest], dtype=torch.int64)
    if device.type == "cpu":
        digests = all_gather_rows(mine, group).tolist()
        if len(set(digests)) > 1:
            differing = [rank for rank, other in enumerate(digests) if other != digest]
            raise ValueError(
                f"prepare: expected the same batch on all {group.size} ranks, but rank {group.rank} has another "
                f"is_prefill, new_lens, prefix_lens, prefix-cache decisions or configuration than ranks {differing}, "
                "or was refused where they were not"
            )
        return
    digests_on_device = all_gather_rows(mine.pin_memory().to(device, non_blocking=True), group)
    torch._assert_async((digests_on_device == digests_on_device[0]).all(), "prepare: the ranks hold different batches")


def agree_on_minimum(values: list[int] | None, group: CpGroup, device: torch.device) -> list[int]:
    """The smallest of each value on any rank. The host waits for it: it is for decisions between forwards.

    Args:
        values: as many on all ranks. None = this rank has failed and is about to raise: it gets nothing, and all others
            an error at once instead of a wait for it.
        group: the ranks.
        device: where the collective takes place.

    Raises:
        ValueError: ranks gave different numbers of values; all of them raise it.
        RuntimeError: another rank has failed.
    """
    if group.size == 1:
        return values or []
    given = values or []
    count, first = len(given), 61

    def smallest(numbers: list[int]) -> list[int]:
        on_device = torch.tensor(numbers, dtype=torch.int64, device=device)
        dist.all_reduce(on_device, dist.ReduceOp.MIN, group=group.process_group)
        return [int(number) for number in on_device.tolist()]

    # Always 64 numbers at first, so that ranks with different counts meet in the same collective and learn of it.
    failed = group.rank if values is None else group.size
    failed, fewest, most, *agreed = smallest([failed, count, -count, *given[:first], *[0] * (first - count)])
    if values is None:
        return []
    if failed < group.size:
        raise RuntimeError(f"agree_on_minimum: rank {failed} has failed, its own error says why")
    if fewest != -most:
        raise ValueError(f"agree_on_minimum: values: expected as many on all ranks, got {fewest} to {-most} of them")
    return agreed[:count] + (smallest(given[first:]) if count > first else [])


class BlockGather:
    """One all-gather of equal blocks, in place: fill ``own``, ``start``, compute something else, ``wait``.

    Attributes:
        own: uint8 [block_bytes], this rank's block.
    """

    def __init__(
        self, group: CpGroup, block_bytes: int, device: torch.device, max_registered_bytes: int, borrower: int
    ) -> None:
        """Take a buffer: the registered one if it is there, free and large enough, plain memory otherwise.

        Args:
            group: the ranks, more than one.
            block_bytes: bytes of a rank's block, the same on all ranks, a multiple of 16.
            device: where the block lives.
            max_registered_bytes: a larger gather uses plain memory.
            borrower: whose next :func:`begin_forward` takes the registered buffer back if this gather is abandoned.
        """
        self.group = group
        total = group.size * block_bytes
        registered = _registered_buffer(group)
        buffer = None
        if registered is not None and total <= max_registered_bytes:
            buffer = registered.take(total, borrower)
        self._registered = None if buffer is None else registered
        if buffer is None:
            buffer = torch.empty(total, dtype=torch.uint8, device=device)
        self._blocks = buffer.view(group.size, block_bytes)
        self.own = self._blocks[group.rank]
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None  # of the buffer
        self._work: Any = None
        self._done: torch.cuda.Event | None = None
        self._borrower = borrower
        self._finished = False

    def start(self, overlap: bool) -> None:
        """Begin: on the gather stream (CUDA) or in the background (CPU) with ``overlap``, else in line."""
        arguments = (self._blocks.view(-1), self.own)
        process_group = self.group.process_group
        if not overlap:
            _all_gather_single(*arguments, group=process_group)
        elif self.own.is_cuda:
            stream = _gather_stream(self.own.device)
            stream.wait_stream(torch.cuda.current_stream(self.own.device))
            with torch.cuda.stream(stream):
                _all_gather_single(*arguments, group=process_group)
                self._done = stream.record_event()
        else:
            self._work = _all_gather_single(*arguments, group=process_group, async_op=True)

    def wait(self) -> Tensor:
        """uint8 [size, block_bytes], all blocks. On CUDA the current stream waits, not the host.

        Whatever reads them has to be enqueued on the current stream before the next gather is made.

        Raises:
            RuntimeError: called a second time, when another gather may be using the memory.
        """
        if self._finished:
            raise RuntimeError("this gather has been waited for already: a write can be finished once")
        self._finished = True
        if self._work is not None:
            self._work.wait()
            self._work = None
        if self._stream is not None:
            stream = torch.cuda.current_stream(self.own.device)
            if self._done is not None:
                stream.wait_event(self._done)
                self._done = None
            if stream != self._stream and self._registered is None:
                self._blocks.record_stream(stream)  # the allocator knows of the stream that the memory is from
        if self._registered is not None:
            self._registered.release(self._borrower)
            self._registered = None
        return self._blocks

    def __del__(self) -> None:
        # Abandoned by an exception: whoever gets this memory next on its stream comes behind the gather.
        done: torch.cuda.Event | None = getattr(self, "_done", None)
        if done is not None and self._stream is not None:
            self._stream.wait_event(done)


def begin_forward(group: CpGroup, borrower: int) -> None:
    """Take back what gathers of the borrower's earlier forward borrowed and, after an error, never returned.

    Forwards of another model on the same ranks keep what they have: they may be in the middle of a layer.
    """
    registered = _registered_buffer(group)
    if registered is not None:
        registered.release(borrower)


@dataclass(frozen=True)
class TracedBlockGather:
    """:class:`BlockGather` under torch.compile: the functional collective, between two graph nodes."""

    group: CpGroup
    own: Tensor

    def start(self) -> Tensor:
        """Node that begins; its result is to be read behind :meth:`wait` only."""
        blocks: Tensor = torch.ops._c10d_functional.all_gather_into_tensor(self.own, self.group.size, self.group.name)
        return blocks

    def wait(self, blocks: Tensor) -> Tensor:
        """uint8 [size, block_bytes], all blocks."""
        return _wait_functional(blocks).view(self.group.size, -1)


def _wait_functional(x: Tensor) -> Tensor:
    waited: Tensor = torch.ops._c10d_functional.wait_tensor(x)
    return waited


@functools.cache
def _gather_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of all gathers of a device: one, as the ranks have to issue them in one order."""
    return torch.cuda.Stream(device)


# Weak: a buffer goes with its group's communicator.
_registered_buffers: weakref.WeakKeyDictionary[dist.ProcessGroup, RegisteredBuffer] = weakref.WeakKeyDictionary()


def _registered_buffer(group: CpGroup) -> RegisteredBuffer | None:
    return None if group.process_group is None else _registered_buffers.get(group.process_group)


def init_user_buffers_environment(
    config: ParallelismConfig, group: dist.ProcessGroup | None, device: torch.device | str, strict: bool = False
) -> bool:
    """Give the gathers of a group persistent buffers that NCCL has registered. Call it on every rank.

    They are made only if ``use_ub_comm`` is set, torch.distributed is initialised, context parallelism is enabled, the
    group has several ranks, the device is CUDA and the backend can register memory on all ranks. Otherwise the first
    check that failed is logged and plain collectives run, with the same results. Calling it again for a group changes
    nothing.

    Args:
        config: the parallelism; ``prefill_cp_config.comm_buffer_size`` bytes are allocated.
        group: the ranks of the gathers; None = no ranks to talk to.
        device: device of the forwards.
        strict: raise instead of falling back.

    Returns:
        Whether registered buffers are in place.

    Raises:
        RuntimeError: a check failed and ``strict`` is set.
    """
    device = torch.device(device)
    reason = _why_no_user_buffers(config, group, device)
    if reason is None and group is not None and group not in _registered_buffers:
        reason = _register_on_all_ranks(config.prefill_cp_config.comm_buffer_size, device, group)
    if reason is None:
        return True
    if strict:
        raise RuntimeError(f"init_user_buffers_environment: {reason}")
    logger.info("no registered gather buffers, plain collectives run: %s", reason)
    return False


def _register_on_all_ranks(nbytes: int, device: torch.device, group: dist.ProcessGroup) -> str | None:
    """Register a buffer on every rank or on none; says why not."""
    buffer, reason = None, "another rank could not register its buffer"
    dist.all_reduce(torch.zeros(1, device=device), group=group)  # makes the communicator, if nothing has yet
    try:
        buffer = RegisteredBuffer.register(nbytes, device, group)
    except Exception as error:  # whatever the backend can't do, plain collectives still can
        reason = f"the backend did not register the buffer ({type(error).__name__}: {error})"
    # The least of each over the ranks: registered everywhere, and equally large everywhere?
    least = torch.tensor([int(buffer is not None), nbytes, -nbytes], dtype=torch.int64, device=device)
    dist.all_reduce(least, op=dist.ReduceOp.MIN, group=group)
    registered, smallest, minus_largest = least.tolist()
    if smallest != -minus_largest:
        return f"comm_buffer_size differs between the ranks: {smallest} to {-minus_largest} bytes, {nbytes} here"
    if buffer is None or not registered:
        return reason
    _registered_buffers[group] = buffer
    return None


def _why_no_user_buffers(
    config: ParallelismConfig, group: dist.ProcessGroup | None, device: torch.device
) -> str | None:
    cp = config.prefill_cp_config
    if not config.use_ub_comm:
        return "use_ub_comm is not set"
    if not (dist.is_available() and dist.is_initialized()):
        return "torch.distributed is not initialised"
    if not cp.is_enabled():
        return f"context parallelism is not enabled (method {cp.method.name})"
    if group is None or group.size() == 1:
        return "the group has no other rank"
    if device.type != "cuda":
        return f"the device is {device}, not CUDA"
    backend = _backend_name(group, device)
    if backend != "nccl":
        return f"the group's backend for CUDA is {backend}, not nccl"
    if cp.comm_buffer_size == 0:
        return "comm_buffer_size is 0"
    return None


def _backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    try:
        return str(group._get_backend(device).name())
    except RuntimeError:  # torch's way to say that there is none
        return "none"
