"""Decides how one forward runs and makes its plan; also refuses plans of other forwards."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparse_cp_ops.config import CPRotateMethod, ParallelismConfig, PrefillCPConfig
from sparse_cp_ops.context_parallel.collectives import CpGroup, begin_forward, require_agreement
from sparse_cp_ops.context_parallel.plan import CpPlan, PlanLease, batch_work
from sparse_cp_ops.nn.inputs import AttentionInputs
from sparse_cp_ops.nn.mla_config import MlaConfig
from sparse_cp_ops.ops._types import require_optional_ints

# Both are counted over the whole process: no two plans share a generation, no two planners an id.
_generations = itertools.count(1)
_planner_ids = itertools.count(1)

RUNNING_METHODS = (CPRotateMethod.ALL_GATHER, CPRotateMethod.ALL_GATHER_WITH_OVERLAP)


def require_supported(config: ParallelismConfig) -> None:
    """Refuse what no implementation of this package runs, instead of ignoring it.

    Raises:
        ValueError: the method is ALLTOALL or UNKNOWN, or ``kv_cache_sharded`` is set.
    """
    cp = config.prefill_cp_config
    if cp.method in (CPRotateMethod.ALLTOALL, CPRotateMethod.UNKNOWN):
        raise ValueError(
            "prefill_cp_config.method: expected DISABLED, ALL_GATHER, ALL_GATHER_WITH_OVERLAP or PREFILL_CP, "
            f"got {cp.method.name}, which is not implemented"
        )
    if cp.kv_cache_sharded:
        raise ValueError(
            "prefill_cp_config.kv_cache_sharded: expected False, got True: every rank holds the whole cache"
        )


def runs_context_parallel(config: ParallelismConfig) -> bool:
    """Whether prefill rows are split among the ranks of this configuration's tensor-parallel group."""
    return config.prefill_cp_config.method in RUNNING_METHODS and config.tp_size > 1


@dataclass(frozen=True)
class _Settings:
    """What every forward under one configuration has in common, read once: each field of a config costs the host."""

    parallelism_config: ParallelismConfig
    cp: PrefillCPConfig
    method: int
    split: str
    decode_mode: str
    agreed: Any  # hash of both configurations

    @classmethod
    def of(cls, mla_config: MlaConfig, config: ParallelismConfig) -> _Settings:
        """Raises ValueError for an unsupported configuration."""
        require_supported(config)
        cp = config.prefill_cp_config
        agreed = hashlib.blake2b(repr((cp, mla_config)).encode(), digest_size=8)
        return cls(config, cp, int(cp.method), cp.split, cp.decode_mode, agreed)

    def digest(self, agreed: tuple[object, ...], *lens: NDArray[np.int32]) -> int:
        """64 bits of everything that the ranks have to agree on."""
        digest = self.agreed.copy()
        digest.update(repr(agreed).encode())
        for values in lens:
            digest.update(values.tobytes())
        return int.from_bytes(digest.digest(), "little", signed=True)


class ForwardPlanner:
    """Makes the plan of each forward of a model. It remembers which plan is the current one, and nothing else."""

    def __init__(self, mla_config: MlaConfig, parallelism_config: ParallelismConfig, group: CpGroup) -> None:
        self.mla_config = mla_config
        self.parallelism_config = parallelism_config
        self.group = group
        self._settings = _Settings.of(mla_config, parallelism_config)
        self.planner_id = next(_planner_ids)
        self._lease: PlanLease | None = None

    def prepare(
        self,
        inputs: AttentionInputs,
        split_prefill: bool,
        max_requests: int | None = None,
        local_rows: int | None = None,
        total_tokens: int | None = None,
    ) -> CpPlan:
        """The plan of one forward; every earlier plan becomes stale.

        Args:
            inputs: the batch; read only, and the same on all ranks.
            split_prefill: whether prefill rows may be split among the ranks.
            max_requests, local_rows, total_tokens: room for CUDA graphs, see :meth:`CpPlan.build`.

        Raises:
            TypeError: ``inputs`` is no AttentionInputs.
            ValueError: an unsupported configuration, lengths that don't fit, or ranks with different inputs.
        """
        if not isinstance(inputs, AttentionInputs):
            raise TypeError(f"prepare: inputs: expected AttentionInputs, got {type(inputs).__name__}")
        if self._settings.parallelism_config is not self.parallelism_config:
            self._settings = _Settings.of(self.mla_config, self.parallelism_config)
        group, settings = self.group, self._settings
        may_split = split_prefill and inputs.is_prefill and group.size > 1
        slices = not inputs.is_prefill and group.size > 1 and settings.decode_mode != "replicated"
        head_mode = settings.decode_mode if slices else "full"
        new_lens, prefix_lens = inputs.new_lens.numpy(), inputs.prefix_lens.numpy()
        refusal: Exception | None = None
        try:
            use_cp = may_split and settings.cp.pays(*batch_work(new_lens, prefix_lens))
            split_rows = use_cp or head_mode == "batch_slice"
            require_optional_ints(
                "prepare", max_requests=max_requests, local_rows=local_rows, total_tokens=total_tokens
            )
            plan = CpPlan.build_checked(
                new_lens,
                prefix_lens,
                group.rank if split_rows else 0,
                group.size if split_rows else 1,
                # Interleaving is the one that leaves all rows on one rank in packed order and without pads, and that
                # spreads requests of one token evenly.
                settings.split if use_cp else "interleave",
                self.mla_config.page_size,
                inputs.block_table,
                self.mla_config.max_positions,
                inputs.device,
                max_requests,
                local_rows,
                total_tokens,
            )
        except Exception as error:
            refusal = error
        if may_split or slices:
            # Also from a rank that refuses its inputs: what is wrong on one rank only is an error on all of them.
            agreed = (inputs.is_prefill, max_requests, local_rows, total_tokens, inputs.decisions, refusal is not None)
            digest = settings.digest(agreed, new_lens, prefix_lens)
            with contextlib.suppress(*[] if refusal is None else [ValueError]):
                require_agreement(digest, group, inputs.device)
        if refusal is not None:
            raise refusal
        begin_forward(group, self.planner_id)
        if self._lease is not None:
            self._lease.current = False
        self._lease = PlanLease(self.planner_id)
        plan.decide(next(_generations), self._lease, inputs.is_prefill, use_cp, head_mode, settings.method)
        return plan
