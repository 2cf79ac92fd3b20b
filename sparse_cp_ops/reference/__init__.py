"""Plain PyTorch versions of the ops: slow, readable, the definition that the kernels are tested against."""

from sparse_cp_ops.reference._indexer_scores_ragged_cp import indexer_scores_ragged_cp
from sparse_cp_ops.reference._indexer_topk_ragged_cp import indexer_topk_ragged_cp, select_topk
from sparse_cp_ops.reference._merge_attention_states import merge_attention_states
from sparse_cp_ops.reference._sparse_mla_fp8_cp import sparse_mla_fp8_cp

__all__ = [
    "indexer_scores_ragged_cp",
    "indexer_topk_ragged_cp",
    "merge_attention_states",
    "select_topk",
    "sparse_mla_fp8_cp",
]
