// Selection among ranks that a thread block holds in registers: the cut is searched by counting, without histograms.
#pragma once

#include <cstdint>

#include "ranks.cuh"

namespace sparse_cp_ops {

inline constexpr int kFewUndecided = 64;  // so many are compared with each other instead of counted again

template <int THREADS>
struct SearchScratch {
  static constexpr int kWarps = THREADS / 32;
  int counts[2][kWarps];
  uint32_t lowest[kWarps], highest[kWarps];
  uint32_t undecided[kFewUndecided];
  int undecided_count;
  uint32_t from;
  int count, above;
};

// What a search found: `count` elements have at least rank `from`, `above` of them more, if `count` is above the most
// that was asked for.
struct Found {
  uint32_t from;
  int count;
  int above;
};

// A rank in (low, high) that about `wanted` elements reach, by linear interpolation between the scores of the bounds,
// which from_low and from_high elements reach. Halfway in rank space if a score is not finite.
__device__ __forceinline__ uint32_t interpolate(uint32_t low, uint32_t high, int from_low, int from_high,
                                                float wanted) {
  const float low_score = score_of_rank(low), high_score = score_of_rank(high - 1);
  const float share = (from_low - wanted) / (from_low - from_high);
  const float score = low_score + (high_score - low_score) * fminf(fmaxf(share, 0.0f), 1.0f);
  if (!(fabsf(score) < INFINITY)) return low + (high - low) / 2;
  return min(max(rank_of_score(score), low + 1), high - 1);
}

// Largest cut with at least `least` and, ties aside, at most `most` elements on or above it. `size` elements are there
// (at least `least`), the other registers hold kNoRank. A step is one count over the block. An exact search (least ==
// most) aims a little above and a little below its place in turn, so that both bounds close in; every fourth step
// bisects ranks, so that no distribution needs more than 4 * 32 steps.
template <int THREADS, int N>
__device__ Found search(const uint32_t (&ranks)[N], int size, int least, int most, SearchScratch<THREADS>& scratch) {
  static_assert(THREADS >= kFewUndecided);
  constexpr int kWarps = SearchScratch<THREADS>::kWarps;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint32_t lowest = ~0u, highest = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    lowest = min(lowest, ranks[i] - 1);  // kNoRank wraps to the largest
    highest = max(highest, ranks[i]);
  }
  lowest = __reduce_min_sync(~0u, lowest);
  highest = __reduce_max_sync(~0u, highest);
  if (lane == 0) scratch.lowest[warp] = lowest, scratch.highest[warp] = highest;
  if (threadIdx.x == 0) scratch.undecided_count = 0;
  __syncthreads();
  uint32_t low = __reduce_min_sync(~0u, lane < kWarps ? scratch.lowest[lane] : ~0u) + 1;
  uint32_t high = __reduce_max_sync(~0u, lane < kWarps ? scratch.highest[lane] : 0u) + 1;
  int from_low = size, from_high = 0;  // elements of at least that rank

  for (int step = 0; from_low > most && high - low > 1 && from_low - from_high > kFewUndecided; ++step) {
    uint32_t middle = low + (high - low) / 2;
    if (step % 4 != 3) {
      const int undecided = from_low - from_high;
      float wanted = 0.5f * (least + most);
      if (least == most) {
        const float aside = 0.5f * sqrtf(undecided) + 0.02f * undecided;
        wanted += step % 2 == 0 ? aside : -aside;
      }
      middle = interpolate(low, high, from_low, from_high, wanted);
    }
    int count = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) count += ranks[i] >= middle;
    count = __reduce_add_sync(~0u, count);
    if (lane == 0) scratch.counts[step & 1][warp] = count;
    __syncthreads();
    count = __reduce_add_sync(~0u, lane < kWarps ? scratch.counts[step & 1][lane] : 0);
    if (count >= least) low = middle, from_low = count;
    else high = middle, from_high = count;
  }
  if (from_low <= most || high - low <= 1) return {low, from_low, from_high};

#pragma unroll
  for (int i = 0; i < N; ++i)
    if (ranks[i] - low < high - low) scratch.undecided[atomicAdd(&scratch.undecided_count, 1)] = ranks[i];
  __syncthreads();
  const int undecided = from_low - from_high;
  if (static_cast<int>(threadIdx.x) < undecided) {
    const uint32_t mine = scratch.undecided[threadIdx.x];
    int from_mine = from_high, above_mine = from_high;
    for (int i = 0; i < undecided; ++i) {
      from_mine += scratch.undecided[i] >= mine;
      above_mine += scratch.undecided[i] > mine;
    }
    // Only the rank of the cut passes; equal ones write the same.
    if (from_mine >= least && above_mine < least)
      scratch.from = mine, scratch.count = from_mine, scratch.above = above_mine;
  }
  __syncthreads();
  return {scratch.from, scratch.count, scratch.above};
}

}  // namespace sparse_cp_ops
