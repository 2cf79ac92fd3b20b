// indexer_scores_ragged_cp on the CPU.
#include "../ops/indexer_scores_ragged_cp.h"

#include <torch/csrc/stable/library.h>

#include "indexer_scoring.h"

namespace sparse_cp_ops {
namespace {

Tensor indexer_scores_ragged_cp(const Tensor& q_fp8, const Tensor& q_weights, const Tensor& indexer_cache,
                                const Tensor& block_table, const Tensor& req_ids, const Tensor& kv_lens, int64_t width,
                                std::string precision) {
  IndexerScoresCall call = prepare_indexer_scores_ragged_cp(q_fp8, q_weights, indexer_cache, block_table, req_ids,
                                                            kv_lens, width, precision);
  const auto& p = call.params;
  if (value_checks_enabled()) check_indexer_values(p.in);
  torch::stable::parallel_for(0, p.in.rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      float* scores = p.scores + row * p.width;
      const int64_t keys = std::min(p.in.keys_of(row), p.width);
      for (int64_t key = 0; key < keys; ++key) scores[key] = indexer_score(p.in, row, key);
      std::fill(scores + keys, scores + p.width, -std::numeric_limits<float>::infinity());
    }
  });
  return call.scores;
}

}  // namespace
}  // namespace sparse_cp_ops

STABLE_TORCH_LIBRARY_IMPL(sparse_cp_ops, CPU, m) {
  m.impl("indexer_scores_ragged_cp", TORCH_BOX(&sparse_cp_ops::indexer_scores_ragged_cp));
}
