"""Context parallelism: which rank owns which tokens, the plan that a forward carries along, and what ranks exchange."""

from sparse_cp_ops.context_parallel.collectives import (
    CpGroup,
    gather_hidden_states,
    gather_last_tokens,
    init_user_buffers_environment,
    take_local_rows,
)
from sparse_cp_ops.context_parallel.plan import CpPlan, batch_work

__all__ = [
    "CpGroup",
    "CpPlan",
    "batch_work",
    "gather_hidden_states",
    "gather_last_tokens",
    "init_user_buffers_environment",
    "take_local_rows",
]
