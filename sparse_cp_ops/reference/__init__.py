"""Plain PyTorch versions of the ops: slow, readable, the definition that the kernels are tested against."""

from sparse_cp_ops.reference._attend_new_rows import attend_new_rows
from sparse_cp_ops.reference._dequantize_kv import dequantize_kv
from sparse_cp_ops.reference._expand_cp_plan import expand_cp_plan
from sparse_cp_ops.reference._indexer_scores_ragged_cp import indexer_scores_ragged_cp
from sparse_cp_ops.reference._indexer_topk_ragged_cp import indexer_topk_ragged_cp, select_topk
from sparse_cp_ops.reference._merge_attention_states import merge_attention_states
from sparse_cp_ops.reference._pack_mla_kv import pack_mla_kv
from sparse_cp_ops.reference._quant_q_k_cp import quant_q_k_cp
from sparse_cp_ops.reference._read_cache_store import read_cache_store
from sparse_cp_ops.reference._rope_ import rope_
from sparse_cp_ops.reference._sparse_mla_fp8_cp import sparse_mla_fp8_cp
from sparse_cp_ops.reference._write_cache_store import write_cache_store
from sparse_cp_ops.reference._write_kv_cache import write_kv_cache

__all__ = [
    "attend_new_rows",
    "dequantize_kv",
    "expand_cp_plan",
    "indexer_scores_ragged_cp",
    "indexer_topk_ragged_cp",
    "merge_attention_states",
    "pack_mla_kv",
    "quant_q_k_cp",
    "read_cache_store",
    "rope_",
    "select_topk",
    "sparse_mla_fp8_cp",
    "write_cache_store",
    "write_kv_cache",
]
