// Selection among ranks that thread blocks hold in registers: the cut is searched by counting, without histograms.
//
// A group is one block, or the BLOCKS blocks of a cluster (compute capability 9.0).
#pragma once

#include <cstdint>

#include "../device/cluster.cuh"
#include "lane_scan.cuh"
#include "ranks.cuh"

namespace sparse_cp_ops {

inline constexpr int kFewUndecided = 64;  // so many are compared with each other instead of counted again

// Of the elements that are there: smallest and largest rank, and the moments of the scores of every fourth register.
struct Statistics {
  uint32_t lowest, highest;
  int sampled;
  float sum, squares;
};

template <int THREADS, int BLOCKS = 1>
struct SearchScratch {
  static constexpr int kWarps = THREADS / 32;
  int counts[2][kWarps];
  int block_counts[4][BLOCKS];  // two turns of the search, two of whoever uses its result
  uint32_t aims[2];
  Statistics warps[kWarps], blocks[BLOCKS];
  uint32_t undecided[kFewUndecided];  // of the first block
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

template <int BLOCKS>
__device__ __forceinline__ void group_barrier() {
  if constexpr (BLOCKS == 1) __syncthreads();
  else cluster_barrier();
}

// Sum over the group of what each block has; `before`: over the blocks before this one. `turn` alternates, so that one
// barrier a sum is enough.
template <int THREADS, int BLOCKS>
__device__ __forceinline__ int sum_of_blocks(int mine, SearchScratch<THREADS, BLOCKS>& scratch, int turn, int& before) {
  before = 0;
  if constexpr (BLOCKS == 1) return mine;
  const int rank = cluster_rank(), lane = threadIdx.x % 32;
  if (threadIdx.x < BLOCKS) *shared_of_rank(&scratch.block_counts[turn][rank], threadIdx.x) = mine;
  cluster_barrier();
  const int other = lane < BLOCKS ? scratch.block_counts[turn][lane] : 0;
  before = __reduce_add_sync(~0u, lane < rank ? other : 0);
  return __reduce_add_sync(~0u, other);
}

template <int THREADS, int BLOCKS>
__device__ __forceinline__ int sum_of_threads(int mine, SearchScratch<THREADS, BLOCKS>& scratch, int turn) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  mine = __reduce_add_sync(~0u, mine);
  if (lane == 0) scratch.counts[turn][warp] = mine;
  __syncthreads();
  int before;
  return sum_of_blocks(__reduce_add_sync(~0u, lane < THREADS / 32 ? scratch.counts[turn][lane] : 0), scratch, turn,
                       before);
}

// The same for two counts of at most 32 each, the second one times 2^16.
template <int THREADS, int BLOCKS>
__device__ __forceinline__ int2 sums_of_threads(uint32_t mine, SearchScratch<THREADS, BLOCKS>& scratch, int turn) {
  static_assert(THREADS * 32 < 1 << 16);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  mine = __reduce_add_sync(~0u, mine);
  if (lane == 0) scratch.counts[turn][warp] = mine;
  __syncthreads();
  mine = __reduce_add_sync(~0u, lane < THREADS / 32 ? scratch.counts[turn][lane] : 0);
  if constexpr (BLOCKS > 1) {
    if (threadIdx.x < BLOCKS) *shared_of_rank(&scratch.block_counts[turn][cluster_rank()], threadIdx.x) = mine;
    cluster_barrier();
    mine = lane < BLOCKS ? scratch.block_counts[turn][lane] : 0;
    return make_int2(__reduce_add_sync(~0u, mine & 0xFFFF), __reduce_add_sync(~0u, mine >> 16));
  }
  return make_int2(mine & 0xFFFF, mine >> 16);
}

__device__ __forceinline__ Statistics reduce_warp(Statistics s) {
  s.lowest = __reduce_min_sync(~0u, s.lowest);
  s.highest = __reduce_max_sync(~0u, s.highest);
  s.sampled = __reduce_add_sync(~0u, s.sampled);
#pragma unroll
  for (int d = 16; d > 0; d /= 2) {
    s.sum += __shfl_xor_sync(~0u, s.sum, d);
    s.squares += __shfl_xor_sync(~0u, s.squares, d);
  }
  return s;
}

template <int THREADS, int BLOCKS, int N>
__device__ __forceinline__ Statistics statistics_of(const uint32_t (&ranks)[N],
                                                    SearchScratch<THREADS, BLOCKS>& scratch) {
  constexpr Statistics kNone{~0u, 0, 0, 0.0f, 0.0f};
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  Statistics mine = kNone;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    mine.lowest = min(mine.lowest, ranks[i] - 1);  // kNoRank wraps to the largest
    mine.highest = max(mine.highest, ranks[i]);
    if (i % 4 != 0 || ranks[i] == kNoRank) continue;
    const float score = score_of_rank(ranks[i]);
    ++mine.sampled;
    mine.sum += score;
    mine.squares = fmaf(score, score, mine.squares);
  }
  mine = reduce_warp(mine);
  if (lane == 0) scratch.warps[warp] = mine;
  __syncthreads();
  mine = reduce_warp(lane < THREADS / 32 ? scratch.warps[lane] : kNone);
  if constexpr (BLOCKS > 1) {
    if (threadIdx.x < BLOCKS) *shared_of_rank(&scratch.blocks[cluster_rank()], threadIdx.x) = mine;
    cluster_barrier();
    mine = reduce_warp(lane < BLOCKS ? scratch.blocks[lane] : kNone);
  }
  ++mine.lowest;
  return mine;
}

// How far a count lies in the tail: straight lines between scores then fit most distributions, the normal one's middle
// and an exponential tail among them.
__device__ __forceinline__ float log_odds(float count, int size) {
  const float inside = fminf(fmaxf(count, 0.5f), size - 0.5f);
  return __logf(size - inside) - __logf(inside);
}

// The rank strictly between low and high that is closest to a score's; halfway in rank space if it is not finite.
__device__ __forceinline__ uint32_t rank_between(uint32_t low, uint32_t high, float score) {
  if (!(fabsf(score) < INFINITY)) return low + (high - low) / 2;
  return min(max(rank_of_score(score), low + 1), high - 1);
}

// The score that a normal distribution reaches with probability p, in deviations; an error of less than 0.001
// (Abramowitz and Stegun, 26.2.23), which costs no step of the search.
__device__ __forceinline__ float normal_quantile(float p) {
  const float tail = fminf(p, 1.0f - p), t = sqrtf(-2.0f * __logf(tail));
  const float over = fmaf(fmaf(0.010328f, t, 0.802853f), t, 2.515517f);
  const float under = fmaf(fmaf(fmaf(0.001308f, t, 0.189269f), t, 1.432788f), t, 1.0f);
  const float distance = t - __fdividef(over, under);
  return p < 0.5f ? distance : -distance;
}

// Largest cut with at least `least` and, ties aside, at most `most` elements of the group on or above it. `size`
// elements are there (at least `least`), the other registers hold kNoRank. A step counts over the group at two ranks,
// one aimed at somewhat more elements than wanted, one at fewer: if both hit, what lies between is settled or compared.
//
// The first step aims where a normal distribution of the same mean and deviation has its quantiles, the next ones where
// interpolated log odds put them: in simulations 2 steps for normal scores and sums of weighted relus, 3 for survivors
// (with one rank a step 2.6 and 6). Every fourth step bisects ranks, so that no distribution needs more than 4 * 32.
template <int THREADS, int BLOCKS, int N>
__device__ Found search(const uint32_t (&ranks)[N], int size, int least, int most,
                        SearchScratch<THREADS, BLOCKS>& scratch) {
  static_assert(kFewUndecided == 64, "two a lane");
  if (threadIdx.x == 0) scratch.undecided_count = 0;
  const Statistics statistics = statistics_of(ranks, scratch);
  uint32_t low = statistics.lowest, high = statistics.highest + 1;
  int from_low = size, from_high = 0;  // elements of at least that rank

  for (int step = 0; from_low > most && high - low > 1 && from_low - from_high > kFewUndecided; ++step) {
    // By two lanes: to aim is as much work as to count.
    if (threadIdx.x < 32) {
      const float middle = 0.5f * (least + most);
      float off = fmaxf(0.375f * kFewUndecided, 0.75f * (most - least));
      if (step == 0) off = fmaxf(off, 0.1f * middle);  // how far the quantile may be off
      const float wanted =
          fminf(fmaxf(threadIdx.x == 0 ? middle + off : middle - off, from_high + 0.5f), from_low - 0.5f);
      float aim = NAN;
      if (step == 0) {
        const float mean = statistics.sum / statistics.sampled;
        const float variance = fmaxf(statistics.squares / statistics.sampled - mean * mean, 0.0f);
        aim = mean + sqrtf(variance) * normal_quantile(wanted / size);
      } else if (step % 4 != 3) {
        const float low_score = score_of_rank(low), high_score = score_of_rank(high - 1);
        const float low_odds = log_odds(from_low, size), high_odds = log_odds(from_high, size);
        aim =
            low_score + (high_score - low_score) * __fdividef(log_odds(wanted, size) - low_odds, high_odds - low_odds);
      }
      if (threadIdx.x < 2) scratch.aims[threadIdx.x] = rank_between(low, high, aim);
    }
    __syncthreads();
    const uint32_t below = scratch.aims[0], above = max(below, scratch.aims[1]);
    uint32_t mine = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) mine += (ranks[i] >= below ? 1u : 0u) + (ranks[i] >= above ? 1u << 16 : 0u);
    const int2 counts = sums_of_threads(mine, scratch, step & 1);
    if (counts.y >= least) low = above, from_low = counts.y;
    else high = above, from_high = counts.y;
    if (counts.y < least && counts.x >= least) low = below, from_low = counts.x;
    else if (counts.y < least) high = below, from_high = counts.x;
  }
  if (from_low <= most || high - low <= 1) return {low, from_low, from_high};

  // The undecided meet in the first block's list, and each block reads it.
  SearchScratch<THREADS, BLOCKS>* first = &scratch;
  if constexpr (BLOCKS > 1) first = shared_of_rank(&scratch, 0);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  static_assert(N <= 32);
  uint32_t mine = 0;
  int in_warp, base = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) mine |= (ranks[i] - low < high - low ? 1u : 0u) << i;
  asm volatile("" : "+r"(mine));  // or the compiler keeps every comparison in a register of its own
  int at = lanes_before(__popc(mine), in_warp);
  if (lane == 0 && in_warp > 0) base = atomicAdd(&first->undecided_count, in_warp);
  at += __shfl_sync(~0u, base, 0);
#pragma unroll
  for (int i = 0; i < N; ++i)
    if (mine >> i & 1) first->undecided[at++] = ranks[i];
  group_barrier<BLOCKS>();

  // Each warp holds them all, two a lane, and takes its share of them as candidates.
  const int undecided = from_low - from_high;
  const uint32_t one = lane < undecided ? first->undecided[lane] : kNoRank;
  const uint32_t other = lane + 32 < undecided ? first->undecided[lane + 32] : kNoRank;
  for (int i = warp; i < undecided; i += THREADS / 32) {
    const uint32_t candidate = __shfl_sync(~0u, i < 32 ? one : other, i % 32);
    const auto count = [](bool holds) { return __popc(__ballot_sync(~0u, holds)); };
    const int from_here = from_high + count(one >= candidate) + count(other >= candidate);
    const int above_here = from_high + count(one > candidate) + count(other > candidate);
    // Only the rank of the cut passes; equal ones write the same.
    if (lane == 0 && from_here >= least && above_here < least)
      scratch.from = candidate, scratch.count = from_here, scratch.above = above_here;
  }
  __syncthreads();
  return {scratch.from, scratch.count, scratch.above};
}

}  // namespace sparse_cp_ops
