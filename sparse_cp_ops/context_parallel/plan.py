"""The plan of one forward: which rows this rank computes, where they go, and what the forward decided beforehand."""

import functools
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparse_cp_ops import _config
from sparse_cp_ops.ops import CpPlanRows, direct
from sparse_cp_ops.ops._types import require_ints, require_optional_ints, require_strs

Lengths = Tensor | NDArray[np.int32] | Sequence[int]


@dataclass(eq=False)
class PlanLease:
    """Whether a plan is the one of the running forward; ``prepare`` ends the lease of the plan before it.

    A flag rather than a comparison of generations, which torch.compile would guard on and recompile at every forward.
    ``planner_id`` tells whose plan it is.
    """

    planner_id: int
    current: bool = True

    def __deepcopy__(self, memo: dict[int, object]) -> "PlanLease":
        return self  # a copied plan becomes stale together with the original

    def __reduce__(self) -> tuple[type["PlanLease"], tuple[int, bool]]:
        # Nobody could end the lease of a plan from a pickle: it is stale from the start.
        return PlanLease, (self.planner_id, False)


@dataclass(frozen=True, eq=False)
class CpPlan:
    """Made once a forward by :meth:`build` (usually through ``impl.prepare``) and passed explicitly to every call.

    All tensors are int32 on one device. B = requests, T = packed new tokens of the batch, S = ranks, L = local rows of
    every rank, pads included. A pad row has req_id -1, position 0, kv_len 0, token_id -1.

    A plan is a plain argument under torch.compile: tensors, ints and strs, no object of ``sparse_cp_ops.config``.
    Dynamo guards on the fields that the compiled region reads; ``generation``, ``used_rows`` and ``used_tokens`` change
    every forward, so only eager code may read them.
    """

    req_ids: Tensor  # [L] request of a local row
    positions: Tensor  # [L] position in its request, prefix included
    kv_lens: Tensor  # [L] keys that the row may see: position + 1
    token_ids: Tensor  # [L] row of the packed token stream
    gathered_req_ids: Tensor  # [S * L] gathered row = rank * L + local row
    gathered_positions: Tensor  # [S * L]
    restore: Tensor  # [T] gathered row of a packed token
    request_table: Tensor  # [B, 2] (prefix_len, new_len)
    block_table: Tensor | None  # [B, W] page of every page_size tokens, negative = no page
    cp_rank: int
    cp_size: int
    split: str  # "zigzag" or "interleave"
    page_size: int
    local_rows: int  # L
    total_tokens: int  # T
    num_requests: int  # B
    used_rows: int  # of L and T, what the batch needs: less than a plan with capacities has
    used_tokens: int
    has_capacity: bool = False  # built with capacities: the one kind that copy_ may refill
    generation: int = 0  # set by prepare, as is the lease: an impl refuses the plan of another forward
    lease: PlanLease | None = None
    is_prefill: bool = True  # the rest is decided by prepare, too
    use_cp: bool = True  # False: every rank runs the whole batch
    head_mode: str = "full"  # "full", "head_slice" or "batch_slice"
    method: int = 0  # value of a CPRotateMethod

    @classmethod
    def build(
        cls,
        new_lens: Lengths,
        prefix_lens: Lengths,
        cp_rank: int = 0,
        cp_size: int = 1,
        split: str = "interleave",
        page_size: int = 64,
        block_table: Tensor | None = None,
        max_positions: int | None = None,
        device: torch.device | str = "cpu",
        max_requests: int | None = None,
        local_rows: int | None = None,
        total_tokens: int | None = None,
    ) -> "CpPlan":
        """Check a batch and plan its rows; host time grows with the requests, not with the tokens.

        Args:
            new_lens: [B] int32 CPU tensor, int32 array or sequence of ints, new tokens of each request.
            prefix_lens: [B] likewise, tokens that are in the cache already.
            cp_rank: this rank, in [0, cp_size).
            cp_size: number of ranks that share the batch.
            split: "zigzag" or "interleave", see :mod:`sparse_cp_ops.context_parallel.split`.
            page_size: tokens a page: 16, 32, 64 or 128.
            block_table: [B, W] int32 on ``device``; its width must cover prefix_len + new_len of every request, its
                entries are read under SPARSE_CP_OPS_CHECK=1 only.
            max_positions: rows of the RoPE cache, if prefix_len + new_len is to be checked against them.
            device: where the tensors are made.
            max_requests: with the next two, capacities of a plan that CUDA graphs capture and :meth:`copy_` refills;
                what is not given is what this batch needs. Rows behind the batch are pads, requests behind it have no
                tokens and no pages.
            local_rows: capacity L.
            total_tokens: capacity T.

        Raises:
            TypeError: an argument has the wrong type.
            ValueError: a value does not fit; the message names the argument or request and what was expected. With
                SPARSE_CP_OPS_CHECK=1 also a token that has no page in the block table.
            RuntimeError: a CUDA graph is being captured.
        """
        require_ints("CpPlan.build", cp_rank=cp_rank, cp_size=cp_size, page_size=page_size)
        require_strs("CpPlan.build", split=split)
        require_optional_ints(
            "CpPlan.build",
            max_positions=max_positions,
            max_requests=max_requests,
            local_rows=local_rows,
            total_tokens=total_tokens,
        )
        device = _device(device)
        new, prefix = _lengths("new_lens", new_lens), _lengths("prefix_lens", prefix_lens)
        if len(prefix) != len(new):
            raise ValueError(f"prefix_lens: expected shape [{len(new)}] (that of new_lens), got [{len(prefix)}]")
        if block_table is not None:
            _check_block_table(block_table, len(new), device)
        return cls.build_checked(
            new, prefix, cp_rank, cp_size, split, page_size, block_table, max_positions, device,
            max_requests, local_rows, total_tokens,
        )  # fmt: skip

    @classmethod
    def build_checked(
        cls,
        new: NDArray[np.int32],
        prefix: NDArray[np.int32],
        cp_rank: int,
        cp_size: int,
        split: str,
        page_size: int,
        block_table: Tensor | None,
        max_positions: int | None,
        device: torch.device,
        max_requests: int | None,
        local_rows: int | None,
        total_tokens: int | None,
    ) -> "CpPlan":
        """:meth:`build` for types, shapes and devices that are known to fit; lengths and capacities are checked here.

        Raises:
            ValueError: as :meth:`build`.
            RuntimeError: a CUDA graph is being captured.
        """
        if _is_capturing(device):
            # The copy from pinned memory would be repeated by every replay, when other plans use that memory.
            raise RuntimeError("CpPlan.build: expected no CUDA graph capture: build plans outside, refill with copy_")
        requests = len(new)
        width = None if block_table is None else block_table.shape[1]
        num_requests = _fit("max_requests", requests, max_requests)
        has_capacity = not (max_requests is None and local_rows is None and total_tokens is None)
        # Never inference tensors: copy_ outside of inference mode could not refill those. Below autograd, whose kernel
        # of our ops is Python and costs more than the launch.
        with torch._C._InferenceMode(False), torch._C._AutoDispatchBelowAutograd():
            table = _host_table(num_requests, device)
            used_rows, used_tokens, _ = _config.plan_requests(
                new, prefix, cp_rank, cp_size, split, page_size, width, max_positions, table.numpy()
            )
            if block_table is not None and _config.value_checks_enabled():
                _check_pages(block_table, new.astype(np.int64) + prefix, page_size)
            local_rows = _fit("local_rows", used_rows, local_rows)
            total_tokens = _fit("total_tokens", used_tokens, total_tokens)
            request_table = table.to(device, non_blocking=True)
            rows = direct.expand_cp_plan(request_table, cp_rank, cp_size, split, local_rows, total_tokens)
            if has_capacity and block_table is not None:
                own = block_table.new_full((num_requests, block_table.shape[1]), -1)
                own[:requests] = block_table
                block_table = own
        # A frozen dataclass sets its fields one by one, which takes the host 3 us.
        plan = object.__new__(cls)
        plan.__dict__.update(
            _UNDECIDED,
            **dict(zip(CpPlanRows._fields, rows, strict=True)),
            request_table=request_table,
            block_table=block_table,
            cp_rank=cp_rank,
            cp_size=cp_size,
            split=split,
            page_size=page_size,
            local_rows=local_rows,
            total_tokens=total_tokens,
            num_requests=num_requests,
            used_rows=used_rows,
            used_tokens=used_tokens,
            has_capacity=has_capacity,
            use_cp=cp_size > 1,
        )
        return plan

    def decide(
        self, generation: int, lease: PlanLease, is_prefill: bool, use_cp: bool, head_mode: str, method: int
    ) -> None:
        """Set what ``prepare`` decides, once, on a plan that nobody else has yet: a copy of it would cost 10 us."""
        self.__dict__.update(
            generation=generation,
            lease=lease,
            is_prefill=is_prefill,
            use_cp=use_cp,
            head_mode=head_mode,
            method=method,
        )

    def copy_(self, new: "CpPlan") -> "CpPlan":
        """Refill the buffers of a plan built with capacities from the plan of another batch, on the current stream.

        Captured graphs read the same buffers at the next replay. What a capture has baked in must agree: rank, split,
        page size, and what prepare decided. The generation becomes that of ``new``.

        Raises:
            TypeError: ``new`` is no CpPlan.
            ValueError: this plan has no capacities, ``new`` exceeds them, or a fixed field differs.
        """
        if not isinstance(new, CpPlan):
            raise TypeError(f"CpPlan.copy_: new: expected a CpPlan, got {type(new).__name__}")
        if not self.has_capacity:
            raise ValueError(
                "CpPlan.copy_: only a plan built with capacities (max_requests, local_rows, ...) is mutable"
            )
        for name in _FIXED:
            mine, theirs = getattr(self, name), getattr(new, name)
            if mine != theirs:
                raise ValueError(f"CpPlan.copy_: {name}: expected {mine!r} as in this plan, got {theirs!r}")
        if self.request_table.device != new.request_table.device:
            raise ValueError(
                f"CpPlan.copy_: expected a plan on {self.request_table.device}, got one on {new.request_table.device}"
            )
        _fit("num_requests", new.num_requests, self.num_requests)
        _fit("local_rows", new.used_rows, self.local_rows)
        _fit("total_tokens", new.used_tokens, self.total_tokens)
        with torch._C._AutoDispatchBelowAutograd():
            self._copy_block_table(new)
            _fill_rows(self.request_table, new.request_table, 0)
            if (new.local_rows, new.total_tokens) == (self.local_rows, self.total_tokens):
                rows = [getattr(new, name) for name in CpPlanRows._fields]
            else:
                rows = direct.expand_cp_plan(
                    self.request_table, self.cp_rank, self.cp_size, self.split, self.local_rows, self.total_tokens
                )
            torch._foreach_copy_([getattr(self, name) for name in CpPlanRows._fields], rows)
        for name in ("used_rows", "used_tokens", "generation", "lease"):
            object.__setattr__(self, name, getattr(new, name))
        return self

    def _copy_block_table(self, new: "CpPlan") -> None:
        if (self.block_table is None) != (new.block_table is None):
            expected = "no block_table" if self.block_table is None else "a block_table"
            raise ValueError(f"CpPlan.copy_: expected a plan with {expected}, as this one")
        if self.block_table is not None and new.block_table is not None:
            width = new.block_table.shape[1]
            _fit("block_table width", width, self.block_table.shape[1])
            table = self.block_table
            if width < table.shape[1]:
                table[:, width:] = -1
                table = table[:, :width]
            _fill_rows(table, new.block_table, -1)


def batch_work(new_lens: Lengths, prefix_lens: Lengths) -> tuple[int, int]:
    """New tokens of a batch and its (query, key) pairs: what ``PrefillCPConfig.pays`` decides by.

    Args and errors as in :meth:`CpPlan.build`.
    """
    new, prefix = _lengths("new_lens", new_lens), _lengths("prefix_lens", prefix_lens)
    if len(prefix) != len(new):
        raise ValueError(f"prefix_lens: expected shape [{len(new)}] (that of new_lens), got [{len(prefix)}]")
    _, tokens, kv_work = _config.plan_requests(new, prefix, 0, 1, "interleave", 64, None, None)
    return tokens, kv_work


# What prepare decides and build leaves as the class has it.
_UNDECIDED = {f.name: f.default for f in fields(CpPlan) if f.default is not MISSING}
_FIXED = ("cp_rank", "cp_size", "split", "page_size", "is_prefill", "use_cp", "head_mode", "method")
_INT32 = np.iinfo(np.int32)
_PINNED_ROWS = 512  # one block of 4 KB for every batch up to this size
_PINNED_BLOCKS = 64  # plans whose copies may be under way; a serving loop has two or three


def _lengths(name: str, value: Lengths) -> NDArray[np.int32]:
    """int32 array [B] over the lengths; no copy of a tensor."""
    if isinstance(value, (Tensor, np.ndarray)):
        if value.ndim != 1:
            raise ValueError(f"{name}: expected 1 dimension, got {value.ndim} (shape {list(value.shape)})")
        if isinstance(value, Tensor) and not value.is_cpu:
            raise ValueError(f"{name}: expected device cpu (the plan reads it on the host), got {value.device}")
        if value.dtype != (torch.int32 if isinstance(value, Tensor) else np.int32):
            raise ValueError(f"{name}: expected dtype int32, got {str(value.dtype).removeprefix('torch.')}")
        return value.numpy() if isinstance(value, Tensor) else value
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"{name}: expected an int32 CPU tensor or a sequence of ints, got {type(value).__name__}")
    for i, length in enumerate(value):
        if not isinstance(length, int) or isinstance(length, bool):
            raise TypeError(f"{name}[{i}]: expected int, got {type(length).__name__}")
        if not _INT32.min <= length <= _INT32.max:
            raise ValueError(f"{name}[{i}]: expected an int32, got {length}")
    return np.array(value, dtype=np.int32)


def _device(device: torch.device | str) -> torch.device:
    if not isinstance(device, (torch.device, str)):
        raise TypeError(f"device: expected a torch.device or str, got {type(device).__name__}")
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device


def _check_block_table(block_table: Tensor, requests: int, device: torch.device) -> None:
    if not isinstance(block_table, Tensor):
        raise TypeError(f"block_table: expected a torch.Tensor, got {type(block_table).__name__}")
    if block_table.ndim != 2 or block_table.shape[0] != requests:
        raise ValueError(f"block_table: expected shape [{requests}, *] (B of new_lens), got {list(block_table.shape)}")
    if block_table.dtype != torch.int32:
        raise ValueError(f"block_table: expected dtype int32, got {str(block_table.dtype).removeprefix('torch.')}")
    if block_table.device != device:
        raise ValueError(f"block_table: expected device {device} (that of the plan), got {block_table.device}")


def _check_pages(block_table: Tensor, kv_lens: NDArray[np.int64], page_size: int) -> None:
    """Every token of the batch has a page. Waits for the device; whether the cache has the page, the ops know."""
    for request, (row, kv_len) in enumerate(zip(block_table.tolist(), kv_lens.tolist(), strict=True)):
        for column, page in enumerate(row[: -(-kv_len // page_size)]):
            if page < 0:
                raise ValueError(
                    f"block_table: request {request}, position {column * page_size}: expected a page >= 0, got {page}"
                )


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _fit(name: str, needed: int, capacity: int | None) -> int:
    """The size of a buffer: its capacity, which must hold what is needed, or just that."""
    if capacity is None:
        return needed
    if needed > capacity:
        raise ValueError(f"{name}: the batch needs {needed}, over the capacity of {capacity}")
    return capacity


@functools.cache
def _reserve_pinned_memory() -> None:
    """Fill torch's pool of pinned memory once: a block from the driver can wait until the device is idle."""
    blocks = [_pinned_table(0) for _ in range(_PINNED_BLOCKS)]
    del blocks


def _pinned_table(rows: int) -> Tensor:
    """[rows, 2] from the pool, which gives memory out again only when the copies from it have run."""
    return torch.empty((max(rows, _PINNED_ROWS), 2), dtype=torch.int32, pin_memory=True).narrow(0, 0, rows)


def _host_table(rows: int, device: torch.device) -> Tensor:
    """int32 [rows, 2] that can be copied to the device without waiting."""
    if device.type != "cuda":
        return torch.empty((rows, 2), dtype=torch.int32)
    _reserve_pinned_memory()
    return _pinned_table(rows)


def _fill_rows(target: Tensor, source: Tensor, fill: int) -> None:
    """``source`` into the first rows of ``target``, ``fill`` behind it."""
    rows = source.shape[0]
    if rows < target.shape[0]:
        target[rows:] = fill
        target = target[:rows]
    target.copy_(source)
