// attend_new_rows: the steps of an attention layer between its projections, one op after the other.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <cmath>

#include "../kv_record.h"
#include "../new_tensor.h"
#include "../tensor_checks.h"
#include "fp8_scale.h"
#include "op_functions.h"
#include "write_kv_cache.h"

namespace sparse_cp_ops {

// What the ops below cannot check, or would name otherwise; all other arguments are checked there, by the same names.
inline void check_attend_new_rows(const Tensor& q, const Tensor& queries, const Tensor& compressed_kv,
                                  const Tensor& index_q, const Tensor& index_k, const Tensor& index_weights,
                                  double index_weight_scale, double index_q_absmax,
                                  const std::string& index_precision) {
  check_tensor(q, "q", q, "q", ScalarType::BFloat16, {kAny, kAny, kQkDim});
  const int64_t rows = q.size(0);
  check_tensor(queries, "queries", q, "q", ScalarType::BFloat16, {rows, kAny, kAny});
  SCO_CHECK(queries.size(1) <= q.size(1) && queries.size(2) >= kRopeDim, "queries: expected at most ", q.size(1),
            " heads as in q, of at least ", kRopeDim, " values, got shape ", shape_string(queries));
  check_last_contiguous(q, "q");
  check_writable(q, "q");
  check_last_contiguous(queries, "queries");
  check_tensor(compressed_kv, "compressed_kv", q, "q", ScalarType::BFloat16, {rows, kLatentDim});
  check_tensor(index_q, "index_q", q, "q", ScalarType::BFloat16, {rows, kAny, kIndexDim});
  check_last_contiguous(index_q, "index_q");
  check_tensor(index_k, "index_k", q, "q", ScalarType::BFloat16, {rows, kIndexDim});
  check_last_contiguous(index_k, "index_k");
  check_tensor(index_weights, "index_weights", q, "q", ScalarType::Float, {rows, index_q.size(1)});
  check_last_contiguous(index_weights, "index_weights");
  SCO_CHECK(std::isfinite(static_cast<float>(index_weight_scale)),
            "index_weight_scale: expected a finite float32, got ", index_weight_scale);
  const float absmax = static_cast<float>(index_q_absmax);
  SCO_CHECK(absmax > 0.0f && absmax <= kFp8Max, "index_q_absmax: expected a value in (0, 448], got ", index_q_absmax);
  SCO_CHECK(index_precision == "fp32" || index_precision == "f16",
            "index_precision: expected \"fp32\" or \"f16\", got \"", index_precision, "\"");
}

inline std::tuple<Tensor, Tensor> attend_new_rows(
    Tensor q, Tensor queries, const Tensor& compressed_kv, const Tensor& k_pe, const Tensor& index_q,
    const Tensor& index_k, const Tensor& index_weights, const Tensor& positions, const Tensor& cos_sin_cache,
    const Tensor& req_ids, const Tensor& kv_lens, const Tensor& block_table, Tensor mla_cache, Tensor indexer_cache,
    bool index_interleaved, double index_weight_scale, double index_q_absmax, std::string scale_format, int64_t topk,
    int64_t workspace_bytes, std::string index_precision, double softmax_scale, std::string precision,
    bool batch_invariant) {
  check_attend_new_rows(q, queries, compressed_kv, index_q, index_k, index_weights, index_weight_scale, index_q_absmax,
                        index_precision);
  // Each op below knows its own arguments alone, but what one has written another one reads.
  const std::initializer_list<NamedTensor> read = {{"queries", queries},
                                                   {"compressed_kv", compressed_kv},
                                                   {"k_pe", k_pe},
                                                   {"index_q", index_q},
                                                   {"index_k", index_k},
                                                   {"index_weights", index_weights},
                                                   {"positions", positions},
                                                   {"cos_sin_cache", cos_sin_cache},
                                                   {"req_ids", req_ids},
                                                   {"kv_lens", kv_lens},
                                                   {"block_table", block_table}};
  check_no_overlap(q, "q", read);
  check_caches_overlap_none(mla_cache, indexer_cache, read);
  check_caches_overlap_none(mla_cache, indexer_cache, {{"q", q}});
  const int64_t rows = q.size(0);
  const Tensor mla_records = new_tensor(q, {rows, kMlaRecordBytes}, ScalarType::Byte);
  const Tensor k_records = new_tensor(q, {rows, kIndexRecordBytes}, ScalarType::Byte);
  pack_mla_kv(compressed_kv, k_pe, positions, cos_sin_cache, mla_records, true, scale_format);
  const auto [q_fp8, q_weights] =
      quant_q_k_cp(index_q, index_k, index_weights, positions, cos_sin_cache, k_records, index_interleaved, true,
                   index_weight_scale, scale_format, index_q_absmax);
  write_kv_cache(mla_records, k_records, req_ids, positions, block_table, mla_cache, indexer_cache, std::nullopt);
  const Tensor indices = indexer_topk_ragged_cp(q_fp8, q_weights, indexer_cache, block_table, req_ids, kv_lens, topk,
                                                workspace_bytes, index_precision);
  const int64_t heads = queries.size(1);
  Tensor own = heads == q.size(1) ? q : torch::stable::narrow(q, 1, 0, heads);
  const Tensor source = torch::stable::narrow(queries, 2, queries.size(2) - kRopeDim, kRopeDim);
  rope_(torch::stable::narrow(own, 2, kLatentDim, kRopeDim), positions, cos_sin_cache, true, source);
  auto [out, lse] = sparse_mla_fp8_cp(q, mla_cache, indices, block_table, req_ids, kv_lens, softmax_scale, precision,
                                      batch_invariant);
  return {out, indices};
}

}  // namespace sparse_cp_ops
