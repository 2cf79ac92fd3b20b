// indexer_scores_ragged_cp on the CPU: workers take blocks of rows x spans of columns.
#include "../ops/indexer_scores_ragged_cp.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "indexer_scoring.h"

namespace sparse_cp_ops {
namespace {

constexpr int64_t kMinSpan = 1024;  // columns of a task that are worth decoding its queries once more

Tensor indexer_scores_ragged_cp(const Tensor& q_fp8, const Tensor& q_weights, const Tensor& indexer_cache,
                                const Tensor& block_table, const Tensor& req_ids, const Tensor& kv_lens, int64_t width,
                                std::string precision) {
  IndexerScoresCall call = prepare_indexer_scores_ragged_cp(q_fp8, q_weights, indexer_cache, block_table, req_ids,
                                                            kv_lens, width, precision);
  const IndexerInputs& in = call.params.in;
  if (value_checks_enabled()) check_indexer_values(in);

  if (in.rows == 0) return call.scores;
  const IndexerKernel& kernel = indexer_kernel(cpu_isa());
  const int64_t workers = torch::stable::get_num_threads();
  const int64_t row_block = row_block_of(in.rows, workers), blocks = ceil_div(in.rows, row_block);
  const int64_t spans = std::clamp<int64_t>(workers * kTasksPerWorker / blocks, 1, width / kMinSpan + 1);
  const int64_t span = ceil_div(ceil_div(width, spans), kKeyTile) * kKeyTile;
  const int64_t scratch_bytes = ScoringScratch::bytes(kernel, in.heads, row_block);
  Tensor memory = new_tensor(q_fp8, {workers * scratch_bytes});

  run_tasks(blocks * spans, workers, [&](int64_t worker, int64_t task) {
    const int64_t row_begin = task / spans * row_block, row_end = std::min(row_begin + row_block, in.rows);
    const int64_t begin = std::min(task % spans * span, width), end = std::min(begin + span, width);
    const ScoringScratch scratch(static_cast<uint8_t*>(memory.data_ptr()) + worker * scratch_bytes, kernel, in.heads,
                                 row_block);
    int64_t limits[kMaxRowBlock];
    for (int64_t row = row_begin; row < row_end; ++row) {
      limits[row - row_begin] = in.keys_of(row);
      float* scores = call.params.scores + row * width;
      std::fill(scores + std::clamp(in.keys_of(row), begin, end), scores + end,
                -std::numeric_limits<float>::infinity());
    }
    score_rows(in, kernel, scratch, row_begin, row_end, limits, begin, end,
               [&](int64_t row, int64_t first_key, int64_t keys, const float* scores) {
                 std::memcpy(call.params.scores + row * width + first_key, scores, keys * sizeof(float));
               });
  });
  return call.scores;
}

}  // namespace
}  // namespace sparse_cp_ops

STABLE_TORCH_LIBRARY_IMPL(sparse_cp_ops, CPU, m) {
  m.impl("indexer_scores_ragged_cp", TORCH_BOX(&sparse_cp_ops::indexer_scores_ragged_cp));
}
