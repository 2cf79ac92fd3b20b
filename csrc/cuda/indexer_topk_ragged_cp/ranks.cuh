// Scores as integers that compare in the order of the contract.
#pragma once

#include <cstdint>

namespace sparse_cp_ops {

inline constexpr uint32_t kNoRank = 0;   // no element at all
inline constexpr uint32_t kNanRank = 1;  // below -inf (0x007FFFFF)

// Larger is better; -0.0 equals +0.0.
__device__ __forceinline__ uint32_t rank_of_score(float score) {
  const uint32_t bits = __float_as_uint(__fadd_rn(score, 0.0f));
  if (score != score) return kNanRank;
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The score of a rank; -inf for NaN, so that everything but NaN reaches it.
__device__ __forceinline__ float score_of_rank(uint32_t rank) {
  if (rank <= kNanRank) return -INFINITY;
  return __uint_as_float(rank & 0x80000000u ? rank ^ 0x80000000u : ~rank);
}

}  // namespace sparse_cp_ops
