"""Typed wrappers of ``torch.ops.sparse_cp_ops``: the documented way to call the ops from Python.

Wrong types raise TypeError; wrong devices, dtypes, shapes, strides or values raise ValueError; both name the argument,
what was expected and what came. Each module holds one op: its wrapper and its fake kernel for torch.compile.
Layouts and exact semantics: docs/semantics.md and docs/kv_record.md.
"""

from sparse_cp_ops.ops._attend_new_rows import attend_new_rows
from sparse_cp_ops.ops._dequantize_kv import dequantize_kv
from sparse_cp_ops.ops._expand_cp_plan import CpPlanRows, expand_cp_plan
from sparse_cp_ops.ops._indexer_scores_ragged_cp import indexer_scores_ragged_cp
from sparse_cp_ops.ops._indexer_topk_ragged_cp import indexer_topk_ragged_cp
from sparse_cp_ops.ops._merge_attention_states import merge_attention_states
from sparse_cp_ops.ops._pack_mla_kv import pack_mla_kv
from sparse_cp_ops.ops._quant_q_k_cp import quant_q_k_cp
from sparse_cp_ops.ops._read_cache_store import read_cache_store
from sparse_cp_ops.ops._rope_ import rope_
from sparse_cp_ops.ops._sparse_mla_fp8_cp import sparse_mla_fp8_cp
from sparse_cp_ops.ops._write_cache_store import write_cache_store
from sparse_cp_ops.ops._write_kv_cache import write_kv_cache

__all__ = [
    "CpPlanRows",
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
    "sparse_mla_fp8_cp",
    "write_cache_store",
    "write_kv_cache",
]
