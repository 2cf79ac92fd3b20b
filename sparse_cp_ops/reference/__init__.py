"""Plain PyTorch versions of the ops: slow, readable, the definition that the kernels are tested against."""

from sparse_cp_ops.reference._merge_attention_states import merge_attention_states

__all__ = [
    "merge_attention_states",
]
