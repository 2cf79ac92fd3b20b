// Scores of a rectangle of (row, key): what the scores op writes and the top-k op ranks, by the same kernels.
#pragma once

#include <cuda_runtime.h>

#include "../../ops/indexer_inputs.h"

namespace sparse_cp_ops {

struct ScoreTask {
  IndexerInputs in;
  float* scores;  // [row_count, score_stride]: the score of (row, key) is at (row - first_row, key - first_key)
  int64_t score_stride;
  int64_t first_row, row_count;
  int64_t first_key, key_count;
  int64_t skip_keys;  // rows with at most that many keys are not scored
  bool fill;          // columns beyond a row's keys become -inf; otherwise they stay as they are
};

// Device twin of IndexerInputs::keys_of.
__device__ __forceinline__ int64_t visible_keys(const IndexerInputs& in, int64_t row) {
  const int64_t request = in.req_ids[row];
  if (request < 0 || request >= in.requests) return 0;
  const int64_t length = in.kv_lens[row], capacity = in.table_width * in.page_size;
  return length < 0 ? 0 : (length < capacity ? length : capacity);
}

void launch_portable_scores(const ScoreTask& task, int32_t device, cudaStream_t stream);
void launch_scores(const ScoreTask& task, int32_t device, cudaStream_t stream);  // the kernel set of the current device

}  // namespace sparse_cp_ops
