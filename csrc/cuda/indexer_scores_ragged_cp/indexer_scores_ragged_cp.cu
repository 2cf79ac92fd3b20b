// indexer_scores_ragged_cp on CUDA.
#include "../../ops/indexer_scores_ragged_cp.h"

#include <torch/csrc/stable/library.h>

#include "../launch.h"
#include "scoring.h"
#include "value_checks.h"

namespace sparse_cp_ops {

namespace {

Tensor indexer_scores_ragged_cp(const Tensor& q_fp8, const Tensor& q_weights, const Tensor& indexer_cache,
                                const Tensor& block_table, const Tensor& req_ids, const Tensor& kv_lens, int64_t width,
                                std::string precision) {
  const int32_t device = q_fp8.get_device_index();
  torch::stable::accelerator::DeviceGuard guard(device);
  IndexerScoresCall call = prepare_indexer_scores_ragged_cp(q_fp8, q_weights, indexer_cache, block_table, req_ids,
                                                            kv_lens, width, precision);
  cudaStream_t stream = current_stream(device);
  const auto& p = call.params;
  if (value_checks_possible(stream)) check_indexer_values_on_host(p.in, q_fp8, block_table, req_ids, kv_lens);
  Tensor plan = new_tensor(q_fp8, {score_plan_bytes(device, p.in.rows)});
  const RowSet rows{0, p.in.rows, nullptr, nullptr};
  launch_scores({p.in, p.scores, p.width, rows, 0, p.width, 0, true}, plan.data_ptr(), device, stream);
  return call.scores;
}

}  // namespace
}  // namespace sparse_cp_ops

STABLE_TORCH_LIBRARY_IMPL(sparse_cp_ops, CUDA, m) {
  m.impl("indexer_scores_ragged_cp", TORCH_BOX(&sparse_cp_ops::indexer_scores_ragged_cp));
}
