// Kernels that work row by row: their grid, and whether rows can be read in vectors.
#pragma once

#include <cstdint>
#include <limits>

#include "../tensor_checks.h"

namespace sparse_cp_ops {

inline unsigned grid_size(int64_t items, int64_t items_per_block) {
  const int64_t blocks = (items + items_per_block - 1) / items_per_block;
  SCO_CHECK(blocks <= std::numeric_limits<int32_t>::max(), "expected at most 2^31 - 1 blocks, got ", blocks);
  return static_cast<unsigned>(blocks);
}

// Whether the first element of every row (every index but the last) is 16-byte aligned.
inline bool has_vector_rows(const Tensor& t, int64_t element_bytes) {
  bool aligned = reinterpret_cast<uintptr_t>(t.data_ptr()) % 16 == 0;
  for (int64_t i = 0; i + 1 < t.dim(); ++i) aligned &= t.size(i) <= 1 || t.stride(i) * element_bytes % 16 == 0;
  return aligned;
}

}  // namespace sparse_cp_ops
