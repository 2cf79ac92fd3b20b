// indexer_topk_ragged_cp: checks and parameters, shared by the CPU and CUDA kernels.
#pragma once

#include "indexer_inputs.h"

namespace sparse_cp_ops {

inline constexpr int64_t kMaxTopk = 2048;
inline constexpr int64_t kDefaultWorkspaceBytes = int64_t{256} << 20;
inline constexpr int64_t kMinWorkspaceBytes = int64_t{1} << 20;

struct IndexerTopkParams {
  IndexerInputs in;
  int32_t* indices;  // [rows, topk]
  int64_t topk;
  int64_t workspace_bytes;  // bound of all temporary memory
};

struct IndexerTopkCall {
  IndexerTopkParams params;
  Tensor indices;
};

inline IndexerTopkCall prepare_indexer_topk_ragged_cp(const Tensor& q_fp8, const Tensor& q_weights,
                                                      const Tensor& indexer_cache, const Tensor& block_table,
                                                      const Tensor& req_ids, const Tensor& kv_lens, int64_t topk,
                                                      int64_t workspace_bytes, const std::string& precision) {
  const IndexerInputs in =
      check_indexer_inputs(q_fp8, q_weights, indexer_cache, block_table, req_ids, kv_lens, precision);
  SCO_CHECK(topk >= 64 && topk <= kMaxTopk && topk % 64 == 0, "topk: expected a multiple of 64 from 64 to ", kMaxTopk,
            ", got ", topk);
  SCO_CHECK(workspace_bytes == 0 || workspace_bytes >= kMinWorkspaceBytes, "workspace_bytes: expected 0 (the default, ",
            kDefaultWorkspaceBytes, ") or at least ", kMinWorkspaceBytes, ", got ", workspace_bytes);
  Tensor indices = new_tensor(req_ids, {in.rows, topk});
  const int64_t workspace = workspace_bytes == 0 ? kDefaultWorkspaceBytes : workspace_bytes;
  return {{in, static_cast<int32_t*>(indices.data_ptr()), topk, workspace}, indices};
}

}  // namespace sparse_cp_ops
