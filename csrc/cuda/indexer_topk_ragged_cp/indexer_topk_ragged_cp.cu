// indexer_topk_ragged_cp on CUDA.
#include "../../ops/indexer_topk_ragged_cp.h"

#include <torch/csrc/stable/library.h>

#include "../../ops/op_functions.h"
#include "../indexer_scores_ragged_cp/value_checks.h"
#include "../launch.h"
#include "topk_paths.h"

namespace sparse_cp_ops {

Tensor indexer_topk_ragged_cp(const Tensor& q_fp8, const Tensor& q_weights, const Tensor& indexer_cache,
                              const Tensor& block_table, const Tensor& req_ids, const Tensor& kv_lens, int64_t topk,
                              int64_t workspace_bytes, std::string precision) {
  const int32_t device = q_fp8.get_device_index();
  torch::stable::accelerator::DeviceGuard guard(device);
  IndexerTopkCall call = prepare_indexer_topk_ragged_cp(q_fp8, q_weights, indexer_cache, block_table, req_ids, kv_lens,
                                                        topk, workspace_bytes, precision);
  cudaStream_t stream = current_stream(device);
  const auto& p = call.params;
  if (value_checks_possible(stream)) check_indexer_values_on_host(p.in, q_fp8, block_table, req_ids, kv_lens);
  if (p.in.rows == 0) return call.indices;
  const bool streamed = streamed_topk_fits(p, p.workspace_bytes, device);
  const int64_t bytes = streamed ? streamed_topk_bytes(p, p.workspace_bytes, device)
                                 : dense_topk_bytes(p, p.in.rows, p.workspace_bytes, device);
  Tensor memory = new_tensor(q_fp8, {bytes});
  const Workspace workspace{static_cast<uint8_t*>(memory.data_ptr()), p.workspace_bytes};
  if (streamed) streamed_topk(p, workspace, device, stream);
  else dense_topk(p, {0, p.in.rows, nullptr, nullptr}, workspace, device, stream);
  return call.indices;
}

}  // namespace sparse_cp_ops

STABLE_TORCH_LIBRARY_IMPL(sparse_cp_ops, CUDA, m) {
  m.impl("indexer_topk_ragged_cp", TORCH_BOX(&sparse_cp_ops::indexer_topk_ragged_cp));
}
