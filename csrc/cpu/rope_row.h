// What the row loops of the CPU kernels share.
#pragma once

#include <algorithm>

#include "../ops/rope_table.h"

namespace sparse_cp_ops {

// Cosines and sines of a row; nullptr when its position is outside the table.
inline const float* cos_sin_row(const RopeTable& table, int64_t row) {
  const int64_t position = table.positions[row];
  return position >= 0 && position < table.max_positions ? table.cos_sin + position * table.dim : nullptr;
}

// Rows of a parallel_for task: about 16K values, some 10 us, so that a task is worth waking a thread.
inline int64_t grain_rows(int64_t values_per_row) {
  return std::max<int64_t>(1, 16384 / std::max<int64_t>(1, values_per_row));
}

}  // namespace sparse_cp_ops
