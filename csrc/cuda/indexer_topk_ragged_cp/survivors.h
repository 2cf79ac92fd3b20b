// Top-k without a score of every key in memory: a sample gives each row a threshold, the scoring pass over the other
// keys lists what reaches it, and the k best are chosen among sample and lists. Rows where that fails - too few
// survivors, a full list - are reported, to be done with all their scores.
#pragma once

#include <cuda_runtime.h>

#include "../../ops/indexer_topk_ragged_cp.h"
#include "../indexer_scores_ragged_cp/sm90_scores.h"

namespace sparse_cp_ops {

inline constexpr int kMaxSurvivors = 4096;           // of a row; more and the row fails
inline constexpr int kMaxSampleKeys = 8192;          // of a row
inline constexpr int kMaxSurvivorKeys = 256 * 1024;  // of a row: bitmaps of its positions fit shared memory

struct SurvivorTask {
  IndexerTopkParams op;
  RowSet rows;
  ScorePlan plan;  // of the pass over the rest
  int ctas;
  const float* sample;  // [slots, sample_stride]
  int64_t sample_stride;
  SurvivorLists lists;
  float* thresholds;      // [slots], the same as lists.thresholds
  int32_t* failed;        // [slots]: rows that failed, in any order
  int32_t* failed_count;  // [1], 0 at the start
};

void launch_thresholds(const SurvivorTask& task, cudaStream_t stream);
void launch_survivor_selection(const SurvivorTask& task, int32_t device, cudaStream_t stream);

}  // namespace sparse_cp_ops
