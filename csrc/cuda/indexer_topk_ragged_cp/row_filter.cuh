// The k best of a row of scores in memory by a filter: a sample of the scores gives a threshold, one look at all of
// them gathers what reaches it, and the choice is among those.
#pragma once

#include "../device/cp_async.cuh"
#include "../device/mma_sync.cuh"
#include "best_survivors.cuh"
#include "sampled_cut.cuh"

namespace sparse_cp_ops {

inline constexpr int kFilteredKeys = 128 * 1024;  // of a row: bitmaps of its positions fit shared memory
inline constexpr int kFilterSample = 4096;

template <int THREADS>
inline constexpr int kFilterBytes = sizeof(SurvivorScratch<THREADS>) + 2 * kFilteredKeys / 8;

// A row's scores in order, a step at a time: each thread has kVectors times four of a step. AHEAD steps are on their
// way to shared memory while the row's sample is searched and while steps before them are looked at; a thread reads
// what it copied itself. Without room for that (AHEAD = 0) scores come when they are asked for.
template <int THREADS, int AHEAD>
struct ScoreSteps {
  static constexpr int kVectors = 4, kStep = THREADS * kVectors * 4;
  static constexpr int kBytes = AHEAD * kStep * 4;

  const float* scores;
  int keys;
  float4* ring;  // kBytes

  static __device__ __forceinline__ int position(int first, int v) {
    return first + (v * THREADS + static_cast<int>(threadIdx.x)) * 4;
  }
  __device__ __forceinline__ void start() const {
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) refill((i - AHEAD) * kStep);
  }
  // Of the step at `first`; NaN behind the row's keys.
  __device__ __forceinline__ void load(int first, float4 (&four)[kVectors]) const {
    if constexpr (AHEAD > 0) cp_async_wait<AHEAD - 1>();
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int at = position(first, v);
      if (at + 4 <= keys) {
        if constexpr (AHEAD > 0) four[v] = *place(first, v);
        else four[v] = *reinterpret_cast<const float4*>(scores + at);
      } else {
        four[v].x = at < keys ? scores[at] : NAN;
        four[v].y = at + 1 < keys ? scores[at + 1] : NAN;
        four[v].z = at + 2 < keys ? scores[at + 2] : NAN;
        four[v].w = NAN;
      }
    }
  }
  // Behind the last use of what load() brought: the step AHEAD of it.
  __device__ __forceinline__ void refill(int first) const {
    if constexpr (AHEAD > 0) {
      first += AHEAD * kStep;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const int at = position(first, v);
        if (at + 4 <= keys) cp_async_16(shared_address(place(first, v)), scores + at, true);
      }
      cp_async_commit();
    }
  }

 private:
  __device__ __forceinline__ float4* place(int first, int v) const {
    return ring + (first / kStep % AHEAD * kVectors + v) * THREADS + threadIdx.x;
  }
};

// False if not: too few or too many scores reach the threshold, which depends on their distribution alone. A row has
// topk < keys <= kFilteredKeys, the scratch kFilterBytes<THREADS> bytes, the ring ScoreSteps<THREADS, AHEAD>::kBytes.
template <int THREADS, int AHEAD>
__device__ bool select_by_filter(const float* scores, int keys, int topk, int32_t* indices,
                                 SurvivorScratch<THREADS>& scratch, float4* ring) {
  using Steps = ScoreSteps<THREADS, AHEAD>;
  __shared__ int stored;
  const int words = ceil_div(keys, 32), pieces = ceil_div(keys, kPieceKeys);
  for (int w = threadIdx.x; w < words; w += THREADS) scratch.bitmap[w] = 0;
  if (threadIdx.x == 0) stored = 0;

  int stride = 1;
  while (ceil_div(pieces, stride) * kPieceKeys > kFilterSample) stride *= 2;
  const int columns = sample_columns(stride, pieces, keys);
  uint32_t ranks[kFilterSample / THREADS];
  load_ranks<kFilterSample / THREADS / 4>(scores, keys, ranks, [&](int v) {
    const int column = (v * THREADS + threadIdx.x) * 4;  // four in a piece
    return column < columns ? sample_position(stride, pieces, column) : keys;
  });
  const Steps steps{scores, keys, ring};
  steps.start();
  // -inf for a cut at NaN: then too many reach it.
  const float threshold = score_of_rank(sampled_cut(ranks, columns, stride, topk, scratch.search).from);

  static_assert(Steps::kVectors == 4, "two steps a word");
  constexpr int kWords = 4, kRound = kWords * 32 / (4 * Steps::kVectors);  // steps whose survivors take one scan
  for (int start = 0; start < keys; start += kRound * Steps::kStep) {
    uint32_t mine[kWords] = {};
    for (int s = 0; s < kRound && start + s * Steps::kStep < keys; ++s) {
      const int first = start + s * Steps::kStep;
      float4 four[Steps::kVectors];
      steps.load(first, four);
      uint32_t bits = 0;
#pragma unroll
      for (int v = 0; v < Steps::kVectors; ++v) {
        bits |= (four[v].x >= threshold ? 1u : 0u) << 4 * v | (four[v].y >= threshold ? 2u : 0u) << 4 * v |
                (four[v].z >= threshold ? 4u : 0u) << 4 * v | (four[v].w >= threshold ? 8u : 0u) << 4 * v;
      }
      asm volatile("" : "+r"(bits));  // or the compiler keeps every comparison in a register of its own
      steps.refill(first);
      bits <<= s % 2 * 16;
#pragma unroll
      for (int w = 0; w < kWords; ++w) mine[w] |= s / 2 == w ? bits : 0;
    }
    int found = 0, in_warp, base = 0;
#pragma unroll
    for (int w = 0; w < kWords; ++w) found += __popc(mine[w]);
    int at = lanes_before(found, in_warp);
    if (threadIdx.x % 32 == 0 && in_warp > 0) base = atomicAdd(&stored, in_warp);
    at += __shfl_sync(~0u, base, 0);
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      for (uint32_t bits = mine[w]; bits != 0 && at < kMaxSurvivors; bits &= bits - 1, ++at) {
        const int bit = __ffs(bits) - 1, first = start + (2 * w + bit / 16) * Steps::kStep;
        scratch.positions[at] = Steps::position(first, bit / 4 % 4) + bit % 4;
      }
    }
  }
  __syncthreads();
  const int survivors = stored;
  if (survivors < topk || survivors > kMaxSurvivors) return false;
#pragma unroll
  for (int i = 0; i < kMaxSurvivors; i += THREADS) {
    const int at = i + threadIdx.x;
    if (at < survivors) scratch.ranks[at] = rank_of_score(scores[scratch.positions[at]]);
  }
  __syncthreads();
  write_best(scratch, survivors, survivors, topk, words, indices);
  return true;
}

}  // namespace sparse_cp_ops
