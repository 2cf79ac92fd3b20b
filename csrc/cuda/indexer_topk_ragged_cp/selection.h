// Exact top-k of rows of scores, key chunk after key chunk.
#pragma once

#include <cuda_runtime.h>

#include "../../ops/indexer_topk_ragged_cp.h"

namespace sparse_cp_ops {

// The best topk of a row's earlier key chunks, ascending by position.
struct KeptKeys {
  uint32_t* ranks;     // [row_count, topk], rank_of_score
  int32_t* positions;  // [row_count, topk]
};

struct SelectTask {
  IndexerTopkParams op;
  const float* scores;  // [row_count, score_stride], 16-byte aligned rows: scores of keys first_key, first_key + 1, ...
  int64_t score_stride;
  int64_t first_row, row_count;
  int64_t first_key, key_count;
  KeptKeys before, after;  // used if first_key > 0; written if the row has keys behind this chunk
};

void launch_selection(const SelectTask& task, int32_t device, cudaStream_t stream);

}  // namespace sparse_cp_ops
