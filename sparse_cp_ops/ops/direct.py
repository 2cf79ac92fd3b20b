"""The ops without their wrappers' type checks, for callers whose types are certain: each saves the host 1 to 3 us.

The dispatcher refuses other types, too, with a RuntimeError that names the argument; but it takes a bool for an int.
"""

import torch

_ops = torch.ops.sparse_cp_ops

attend_new_rows = _ops.attend_new_rows.default
dequantize_kv = _ops.dequantize_kv.default
expand_cp_plan = _ops.expand_cp_plan.default
indexer_scores_ragged_cp = _ops.indexer_scores_ragged_cp.default
indexer_topk_ragged_cp = _ops.indexer_topk_ragged_cp.default
merge_attention_states = _ops.merge_attention_states.default
pack_mla_kv = _ops.pack_mla_kv.default
quant_q_k_cp = _ops.quant_q_k_cp.default
read_cache_store = _ops.read_cache_store.default
rope_ = _ops.rope_.default
sparse_mla_fp8_cp = _ops.sparse_mla_fp8_cp.default
write_cache_store = _ops.write_cache_store.default
write_kv_cache = _ops.write_kv_cache.default
