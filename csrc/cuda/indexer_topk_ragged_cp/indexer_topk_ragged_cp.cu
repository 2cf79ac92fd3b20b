// indexer_topk_ragged_cp on CUDA: scores of a chunk into the workspace, selection from there.
#include "../../ops/indexer_topk_ragged_cp.h"

#include <torch/csrc/stable/library.h>

#include "../indexer_scores_ragged_cp/scoring.h"
#include "../indexer_scores_ragged_cp/value_checks.h"
#include "../launch.h"
#include "selection.h"

namespace sparse_cp_ops {
namespace {

// Rows and keys that are scored at once, so that scores and kept keys fit the workspace. Shapes alone decide.
struct Chunks {
  int64_t rows, keys;
  int64_t
      kept_bytes;  // a row's kept keys, read and written: 2 * topk * (rank + position); 0 if one key chunk is enough
  int64_t bytes() const { return rows * (keys * 4 + kept_bytes); }
};

constexpr int64_t kEnoughRows = 512;  // fewer leave processors idle: then shorter key chunks are better

Chunks plan_chunks(int64_t rows, int64_t capacity, int64_t topk, int64_t workspace_bytes) {
  constexpr int64_t kKeyUnit = 1024;  // keys of one CTA of the scoring kernel
  const int64_t all_keys = (capacity + 3) / 4 * 4;
  if (all_keys * 4 * std::min(rows, kEnoughRows) <= workspace_bytes)
    return {std::min(rows, workspace_bytes / (all_keys * 4)), all_keys, 0};
  const int64_t kept_bytes = 2 * topk * 8;
  // A chunk of 4 * topk keys spends most of its time on new keys; the smallest workspace holds 16 such rows.
  const int64_t shortest = (4 * topk + kKeyUnit - 1) / kKeyUnit * kKeyUnit;
  const int64_t chunk_rows = std::min({rows, kEnoughRows, workspace_bytes / (shortest * 4 + kept_bytes)});
  const int64_t keys = (workspace_bytes / chunk_rows - kept_bytes) / 4 / kKeyUnit * kKeyUnit;
  return {chunk_rows, keys, kept_bytes};
}

void select_all(const IndexerTopkParams& p, uint8_t* workspace, const Chunks& chunks, int32_t device,
                cudaStream_t stream) {
  const int64_t capacity = std::max<int64_t>(p.in.capacity(), 1);  // no keys at all: still one chunk that writes -1
  float* scores = reinterpret_cast<float*>(workspace);
  KeptKeys kept[2]{};
  uint8_t* behind = workspace + chunks.rows * chunks.keys * 4;
  for (int i = 0; i < 2 && chunks.kept_bytes > 0; ++i, behind += chunks.rows * p.topk * 8)
    kept[i] = {reinterpret_cast<uint32_t*>(behind), reinterpret_cast<int32_t*>(behind) + chunks.rows * p.topk};
  for (int64_t row = 0; row < p.in.rows; row += chunks.rows) {
    const int64_t row_count = std::min(chunks.rows, p.in.rows - row);
    int turn = 0;
    for (int64_t key = 0; key < capacity; key += chunks.keys, turn ^= 1) {
      const int64_t key_count = std::min(chunks.keys, capacity - key);
      if (capacity > p.topk)
        launch_scores({p.in, scores, chunks.keys, row, row_count, key, key_count, p.topk, false}, device, stream);
      launch_selection({p, scores, chunks.keys, row, row_count, key, key_count, kept[turn], kept[turn ^ 1]}, device,
                       stream);
    }
  }
}

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
  const bool scored = p.in.capacity() > topk;  // else every row keeps all its keys
  const Chunks chunks = scored ? plan_chunks(p.in.rows, p.in.capacity(), topk, p.workspace_bytes)
                               : Chunks{p.in.rows, std::max<int64_t>(p.in.capacity(), 1), 0};
  Tensor workspace = torch::stable::new_empty(q_fp8, {scored ? chunks.bytes() : 0});
  select_all(p, static_cast<uint8_t*>(workspace.data_ptr()), chunks, device, stream);
  return call.indices;
}

}  // namespace
}  // namespace sparse_cp_ops

STABLE_TORCH_LIBRARY_IMPL(sparse_cp_ops, CUDA, m) {
  m.impl("indexer_topk_ragged_cp", TORCH_BOX(&sparse_cp_ops::indexer_topk_ragged_cp));
}
