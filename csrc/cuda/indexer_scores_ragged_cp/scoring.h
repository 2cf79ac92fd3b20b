// Scores of a rectangle of (row, key): what the scores op writes and the top-k op ranks, by the same kernels.
#pragma once

#include <cuda_runtime.h>

#include "../../ops/indexer_inputs.h"

namespace sparse_cp_ops {

// The rows of a pass: consecutive ones, or those of a list whose length only the device knows.
struct RowSet {
  int64_t first, count;  // count: at most
  const int32_t* list;   // nullptr: slot s is row first + s; otherwise row list[first + s]
  const int32_t* list_length;
};

struct ScoreTask {
  IndexerInputs in;
  float* scores;  // [slots, score_stride]: the score of slot s and key k is at (s, k - first_key)
  int64_t score_stride;
  RowSet rows;
  int64_t first_key, key_count;
  int64_t skip_keys;  // rows with at most that many keys are not scored
  bool fill;          // columns beyond a row's keys become -inf; otherwise they stay as they are
};

// Device twin of IndexerInputs::keys_of.
__device__ __forceinline__ int64_t visible_keys(const IndexerInputs& in, int64_t row) {
  const int64_t request = in.req_ids[row], length = in.kv_lens[row], capacity = in.table_width * in.page_size;
  if (request < 0 || request >= in.requests) return 0;
  return length < 0 ? 0 : (length < capacity ? length : capacity);
}

void launch_portable_scores(const ScoreTask& task, int32_t device, cudaStream_t stream);

// The kernel set of the device. plan: score_plan_bytes(device, rows of the task) bytes of device memory, aligned to 16.
void launch_scores(const ScoreTask& task, void* plan, int32_t device, cudaStream_t stream);
int64_t score_plan_bytes(int32_t device, int64_t rows);

}  // namespace sparse_cp_ops
