// Running exact top-k of one row: keys arrive in ascending position, the list keeps those that can still be among the
// best, in that order. Once the list holds k keys, a later key has to beat the k-th best strictly: ties go to the
// smaller position.
#pragma once

#include <cstdint>
#include <limits>

namespace sparse_cp_ops {

struct TopkCandidates {
  // Scores as signed integers of the same order: NaN below every number, -0.0 equal to +0.0.
  static constexpr int32_t kBelowAll = std::numeric_limits<int32_t>::min(), kNan = kBelowAll + 1;

  int32_t* orders;     // [capacity]
  int32_t* positions;  // [capacity], ascending
  int64_t count = 0;
  int32_t threshold = kBelowAll;  // a new key needs a larger order
};

}  // namespace sparse_cp_ops
