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
  ScorePlan plan;
  float* sample;  // [slots, sample_stride]; then, in its place, the keys of the sample that reach the threshold
  int64_t sample_stride;
  int32_t* sample_counts;  // [slots]: how many reach it; those behind sample_capacity() are not stored
  SurvivorLists lists;     // counts are 0 at the start
  float* thresholds;       // [slots], the same as lists.thresholds
  int32_t* failed;         // [slots]: rows that failed, in any order
  int32_t* failed_count;   // [1], 0 at the start

  __host__ __device__ int sample_capacity() const { return static_cast<int>(sample_stride / 2); }
  __device__ __forceinline__ Survivor* sample_survivors(int slot) const {
    return reinterpret_cast<Survivor*>(sample + slot * sample_stride);
  }
};

void launch_thresholds(const SurvivorTask& task, int32_t device, cudaStream_t stream);
void launch_survivor_selection(const SurvivorTask& task, int32_t device, cudaStream_t stream);

}  // namespace sparse_cp_ops
