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

// Ranks of four scores from number `first` on, a multiple of 4; what is at `end` or behind it may be unwritten memory.
__device__ __forceinline__ void load_ranks(const float* scores, int first, int end, uint32_t* ranks) {
  float4 four = make_float4(0, 0, 0, 0);
  if (first + 4 <= end) {
    four = *reinterpret_cast<const float4*>(scores + first);
  } else if (first < end) {
    four.x = scores[first];
    if (first + 1 < end) four.y = scores[first + 1];
    if (first + 2 < end) four.z = scores[first + 2];
  }
  ranks[0] = first < end ? rank_of_score(four.x) : kNoRank;
  ranks[1] = first + 1 < end ? rank_of_score(four.y) : kNoRank;
  ranks[2] = first + 2 < end ? rank_of_score(four.z) : kNoRank;
  ranks[3] = first + 3 < end ? rank_of_score(four.w) : kNoRank;
}

// The score of a rank; -inf for NaN, so that everything but NaN reaches it.
__device__ __forceinline__ float score_of_rank(uint32_t rank) {
  if (rank <= kNanRank) return -INFINITY;
  return __uint_as_float(rank & 0x80000000u ? rank ^ 0x80000000u : ~rank);
}

}  // namespace sparse_cp_ops
