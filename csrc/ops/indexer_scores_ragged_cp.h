// indexer_scores_ragged_cp: checks and parameters, shared by the CPU and CUDA kernels.
#pragma once

#include "indexer_inputs.h"

namespace sparse_cp_ops {

struct IndexerScoresParams {
  IndexerInputs in;
  float* scores;  // [rows, width]
  int64_t width;
};

struct IndexerScoresCall {
  IndexerScoresParams params;
  Tensor scores;
};

inline IndexerScoresCall prepare_indexer_scores_ragged_cp(const Tensor& q_fp8, const Tensor& q_weights,
                                                          const Tensor& indexer_cache, const Tensor& block_table,
                                                          const Tensor& req_ids, const Tensor& kv_lens, int64_t width,
                                                          const std::string& precision) {
  const IndexerInputs in =
      check_indexer_inputs(q_fp8, q_weights, indexer_cache, block_table, req_ids, kv_lens, precision);
  SCO_CHECK(width >= 0, "width: expected at least 0, got ", width);
  Tensor scores = new_tensor(q_weights, {in.rows, width});
  return {{in, static_cast<float*>(scores.data_ptr()), width}, scores};
}

}  // namespace sparse_cp_ops
