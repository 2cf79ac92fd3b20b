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

// Ranks of VECTORS times four scores, from number first_of(v) on, multiples of 4; what is at `end` or behind it may be
// unwritten memory. All loads are on their way before the first one is waited for.
template <int VECTORS, class FirstOf>
__device__ __forceinline__ void load_ranks(const float* scores, int end, uint32_t (&ranks)[4 * VECTORS],
                                           const FirstOf& first_of) {
  float4 four[VECTORS];
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) {
    four[v] = make_float4(0, 0, 0, 0);
    if (first_of(v) + 4 <= end) four[v] = *reinterpret_cast<const float4*>(scores + first_of(v));
  }
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) {
    const int first = first_of(v);
    if (first + 4 > end && first < end) {
      four[v].x = scores[first];
      if (first + 1 < end) four[v].y = scores[first + 1];
      if (first + 2 < end) four[v].z = scores[first + 2];
    }
    ranks[4 * v] = first < end ? rank_of_score(four[v].x) : kNoRank;
    ranks[4 * v + 1] = first + 1 < end ? rank_of_score(four[v].y) : kNoRank;
    ranks[4 * v + 2] = first + 2 < end ? rank_of_score(four[v].z) : kNoRank;
    ranks[4 * v + 3] = first + 3 < end ? rank_of_score(four[v].w) : kNoRank;
  }
}

// The score of a rank; -inf for NaN, so that everything but NaN reaches it.
__device__ __forceinline__ float score_of_rank(uint32_t rank) {
  if (rank <= kNanRank) return -INFINITY;
  return __uint_as_float(rank & 0x80000000u ? rank ^ 0x80000000u : ~rank);
}

}  // namespace sparse_cp_ops
