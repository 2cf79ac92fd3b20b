// Hopper scoring pass: the rows of a plan against the keys of a sweep.
#pragma once

#include "score_plan.h"

namespace sparse_cp_ops {

struct alignas(8) Survivor {
  float score;
  int32_t key;
};

// Keys of a row that reach its threshold. A segment, one CTA's share of a block, has kLanes lists a row: one a lane, so
// that appending needs no vote and no atomics. A list that is full counts on without storing. Lists of slot s in the
// segment of CTA c are at region s + kBlockRows * c: two segments never share one, since either the slot grows by the
// block's rows or the CTA by one.
struct SurvivorLists {
  static constexpr int kLanes = 32;
  const float* thresholds;  // [slots]
  Survivor* entries;        // [regions, kLanes, capacity]
  int32_t* counts;          // [regions, kLanes]
  int32_t capacity;

  static constexpr int64_t regions(int64_t slots, int64_t ctas) { return slots + kBlockRows * ctas; }
};

inline constexpr int kOwnPlanRows = 128;  // what fits beside the kernel's ring, a thread a row

struct Sm90ScoreTask {
  IndexerInputs in;
  RowSet rows;
  ScorePlan plan;  // without blocks: kOwnPlanRows rows at most, over all keys; each CTA makes its plan
  Sweep sweep;
  int64_t first_key, key_count, skip_keys;  // as in the plan's task
  float* scores;  // [slots, score_stride], column i: the i-th key of the sweep; nullptr: survivors are listed
  int64_t score_stride;
  SurvivorLists lists;
};

void launch_sm90_scores(const Sm90ScoreTask& task, int ctas, int32_t device, cudaStream_t stream);

}  // namespace sparse_cp_ops
