// indexer_topk_ragged_cp on the CPU: exact top-k of the scores of indexer_scores_ragged_cp.
#include "../ops/indexer_topk_ragged_cp.h"

#include <torch/csrc/stable/library.h>

#include <bit>

#include "indexer_scoring.h"

namespace sparse_cp_ops {
namespace {

// Larger is better: score, then the smaller position. NaN is below -inf; -0.0 equals +0.0.
uint64_t rank_of(float score, int64_t position) {
  uint32_t ordered = 0;
  if (score == score) {
    const uint32_t bits = std::bit_cast<uint32_t>(score + 0.0f);
    ordered = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  }
  return static_cast<uint64_t>(ordered) << 32 | ~static_cast<uint32_t>(position);
}

void select_row(const IndexerTopkParams& p, int64_t row, std::vector<uint64_t>& best) {
  int32_t* indices = p.indices + row * p.topk;
  const int64_t keys = p.in.keys_of(row), count = std::min(keys, p.topk);
  best.clear();
  for (int64_t key = 0; key < keys && keys > p.topk; ++key) {
    best.push_back(rank_of(indexer_score(p.in, row, key), key));
    if (static_cast<int64_t>(best.size()) < 2 * p.topk && key + 1 < keys) continue;
    std::nth_element(best.begin(), best.begin() + p.topk, best.end(), std::greater<>());
    best.resize(p.topk);
  }
  for (int64_t i = 0; i < count; ++i) indices[i] = keys > p.topk ? ~static_cast<uint32_t>(best[i]) : i;
  std::sort(indices, indices + count);
  std::fill(indices + count, indices + p.topk, -1);
}

Tensor indexer_topk_ragged_cp(const Tensor& q_fp8, const Tensor& q_weights, const Tensor& indexer_cache,
                              const Tensor& block_table, const Tensor& req_ids, const Tensor& kv_lens, int64_t topk,
                              int64_t workspace_bytes, std::string precision) {
  IndexerTopkCall call = prepare_indexer_topk_ragged_cp(q_fp8, q_weights, indexer_cache, block_table, req_ids, kv_lens,
                                                        topk, workspace_bytes, precision);
  const auto& p = call.params;
  if (value_checks_enabled()) check_indexer_values(p.in);
  torch::stable::parallel_for(0, p.in.rows, 1, [&](int64_t begin, int64_t end) {
    std::vector<uint64_t> best;
    for (int64_t row = begin; row < end; ++row) select_row(p, row, best);
  });
  return call.indices;
}

}  // namespace
}  // namespace sparse_cp_ops

STABLE_TORCH_LIBRARY_IMPL(sparse_cp_ops, CPU, m) {
  m.impl("indexer_topk_ragged_cp", TORCH_BOX(&sparse_cp_ops::indexer_topk_ragged_cp));
}
