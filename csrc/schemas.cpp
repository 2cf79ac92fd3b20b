// The schemas of all ops: the package's public C++ surface. Kernels are registered beside their code in cpu/ and cuda/.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(sparse_cp_ops, m) {
  m.def("rope_(Tensor(a!) x, Tensor positions, Tensor cos_sin_cache, bool interleaved, Tensor? source=None) -> ()");
  m.def(
      "quant_q_k_cp(Tensor q, Tensor k, Tensor weights, Tensor positions, Tensor cos_sin_cache, "
      "Tensor(a!) k_records, bool interleaved, bool hadamard, float weight_scale, str scale_format, "
      "float q_absmax=448.0) -> (Tensor q_fp8, Tensor q_weights)");
  m.def(
      "pack_mla_kv(Tensor compressed_kv, Tensor k_pe, Tensor positions, Tensor cos_sin_cache, Tensor(a!) records, "
      "bool interleaved, str scale_format) -> ()");
  m.def(
      "write_kv_cache(Tensor mla_records, Tensor? k_records, Tensor? req_ids, Tensor? positions, Tensor? block_table, "
      "Tensor(a!) mla_cache, Tensor(b!)? indexer_cache, Tensor? slots=None) -> ()");
  m.def("dequantize_kv(Tensor kv_cache, Tensor slots) -> Tensor");
  m.def(
      "indexer_topk_ragged_cp(Tensor q_fp8, Tensor q_weights, Tensor indexer_cache, Tensor block_table, "
      "Tensor req_ids, Tensor kv_lens, int topk, int workspace_bytes, str precision=\"fp32\") -> Tensor");
  m.def(
      "indexer_scores_ragged_cp(Tensor q_fp8, Tensor q_weights, Tensor indexer_cache, Tensor block_table, "
      "Tensor req_ids, Tensor kv_lens, SymInt width, str precision=\"fp32\") -> Tensor");
  m.def(
      "sparse_mla_fp8_cp(Tensor q, Tensor kv_cache, Tensor indices, Tensor? block_table, Tensor? req_ids, "
      "Tensor? kv_lens, float softmax_scale, str precision=\"high\", bool batch_invariant=True) "
      "-> (Tensor out, Tensor lse)");
  m.def(
      "attend_new_rows(Tensor(a!) q, Tensor queries, Tensor compressed_kv, Tensor k_pe, Tensor index_q, "
      "Tensor index_k, Tensor index_weights, Tensor positions, Tensor cos_sin_cache, Tensor req_ids, Tensor kv_lens, "
      "Tensor block_table, Tensor(b!) mla_cache, Tensor(c!) indexer_cache, bool index_interleaved, "
      "float index_weight_scale, float index_q_absmax, str scale_format, int topk, int workspace_bytes, "
      "str index_precision, float softmax_scale, str precision, bool batch_invariant) -> (Tensor out, Tensor indices)");
  m.def("merge_attention_states(Tensor outs, Tensor lses) -> (Tensor out, Tensor lse)");
  m.def(
      "expand_cp_plan(Tensor request_table, int cp_rank, int cp_size, str split, SymInt local_rows, "
      "SymInt total_tokens) -> (Tensor req_ids, Tensor positions, Tensor kv_lens, Tensor token_ids, "
      "Tensor gathered_req_ids, Tensor gathered_positions, Tensor restore)");
  m.def(
      "write_cache_store(Tensor mla_cache, Tensor? indexer_cache, Tensor page_ids, Tensor store_slots, "
      "Tensor(a!) mla_store, Tensor(b!)? indexer_store) -> ()");
  m.def(
      "read_cache_store(Tensor mla_store, Tensor? indexer_store, Tensor store_slots, Tensor page_ids, "
      "Tensor(a!) mla_cache, Tensor(b!)? indexer_cache) -> ()");
}
