// Exact top-k of rows of scores, key chunk after key chunk.
#pragma once

#include <cuda_runtime.h>

#include "../../ops/indexer_topk_ragged_cp.h"
#include "../indexer_scores_ragged_cp/score_plan.h"

namespace sparse_cp_ops {

// The best topk of a row's earlier key chunks, ascending by position.
struct KeptKeys {
  uint32_t* ranks;     // [slots, topk], rank_of_score
  int32_t* positions;  // [slots, topk]
};

struct SelectTask {
  IndexerTopkParams op;
  RowSet rows;
  const float* scores;  // [slots, score_stride], 16-byte aligned rows: scores of keys first_key, first_key + 1, ...
  int64_t score_stride;
  int64_t first_key, key_count;
  KeptKeys before, after;  // used if first_key > 0; written if the row has keys behind this chunk
};

void launch_selection(const SelectTask& task, int32_t device, cudaStream_t stream);

// For one chunk that holds all keys, several times faster: kNarrowKeys at most, or with clusters of blocks (compute
// capability 9.0) kNarrowBlocks times as many.
inline constexpr int64_t kNarrowKeys = 16384;
inline constexpr int kNarrowBlocks = 8;
void launch_narrow_selection(const SelectTask& task, int32_t device, cudaStream_t stream);

}  // namespace sparse_cp_ops
