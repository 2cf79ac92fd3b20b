"""Context parallelism: which rank owns which tokens, and the plan that a forward carries along."""

from sparse_cp_ops.context_parallel.plan import CpPlan, batch_work

__all__ = ["CpPlan", "batch_work"]
