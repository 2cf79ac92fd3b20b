// What planner and expand_cp_plan agree on.
#pragma once

#include <cstdint>

namespace sparse_cp_ops {

// More ranks than any machine has, and few enough that new_len + 2 * cp_size stays below 2^32 for every int32 length:
// the arithmetic inside a request is 32-bit.
inline constexpr int64_t kMaxCpSize = int64_t{1} << 20;

}  // namespace sparse_cp_ops
