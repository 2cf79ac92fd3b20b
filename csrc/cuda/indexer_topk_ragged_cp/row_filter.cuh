// The k best of a row of scores in memory by a filter: a sample of the scores gives a threshold, one look at all of
// them gathers what reaches it, and the choice is among those.
#pragma once

#include "best_survivors.cuh"
#include "sampled_cut.cuh"

namespace sparse_cp_ops {

inline constexpr int kFilteredKeys = 128 * 1024;  // of a row: bitmaps of its positions fit shared memory
inline constexpr int kFilterSample = 4096;

template <int THREADS>
inline constexpr int kFilterBytes = sizeof(SurvivorScratch<THREADS>) + 2 * kFilteredKeys / 8;

// False if not: too few or too many scores reach the threshold, which depends on their distribution alone. A row has
// topk < keys <= kFilteredKeys, the scratch kFilterBytes<THREADS> bytes.
template <int THREADS>
__device__ bool select_by_filter(const float* scores, int keys, int topk, int32_t* indices,
                                 SurvivorScratch<THREADS>& scratch) {
  __shared__ int stored;
  const int words = ceil_div(keys, 32), pieces = ceil_div(keys, kPieceKeys);
  for (int w = threadIdx.x; w < words; w += THREADS) scratch.bitmap[w] = 0;
  if (threadIdx.x == 0) stored = 0;

  int stride = 1;
  while (ceil_div(pieces, stride) * kPieceKeys > kFilterSample) stride *= 2;
  const int columns = sample_columns(stride, pieces, keys);
  uint32_t ranks[kFilterSample / THREADS];
#pragma unroll
  for (int v = 0; v < kFilterSample / THREADS / 4; ++v) {
    const int column = (v * THREADS + threadIdx.x) * 4;  // four in a piece
    load_ranks(scores, column < columns ? sample_position(stride, pieces, column) : keys, keys, ranks + 4 * v);
  }
  // -inf for a cut at NaN: then too many reach it.
  const float threshold = score_of_rank(sampled_cut(ranks, columns, stride, topk, scratch.search).from);

  constexpr int kVectors = 4, kStep = THREADS * kVectors * 4;  // elements of a thread, of all
  const auto position = [](int first, int v) { return first + (v * THREADS + static_cast<int>(threadIdx.x)) * 4; };
  const auto take = [&](int first, const float4(&four)[kVectors]) {
    uint32_t mine = 0;
    int in_warp, base = 0;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      mine |= (four[v].x >= threshold ? 1u : 0u) << 4 * v | (four[v].y >= threshold ? 2u : 0u) << 4 * v |
              (four[v].z >= threshold ? 4u : 0u) << 4 * v | (four[v].w >= threshold ? 8u : 0u) << 4 * v;
    }
    asm volatile("" : "+r"(mine));  // or the compiler keeps every comparison in a register of its own
    int at = lanes_before(__popc(mine), in_warp);
    if (threadIdx.x % 32 == 0 && in_warp > 0) base = atomicAdd(&stored, in_warp);
    at += __shfl_sync(~0u, base, 0);
    for (; mine != 0 && at < kMaxSurvivors; mine &= mine - 1, ++at) {
      const int bit = __ffs(mine) - 1;
      scratch.positions[at] = position(first, bit / 4) + bit % 4;
    }
  };
  int first = 0;
  for (; first + kStep <= keys; first += kStep) {
    float4 four[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) four[v] = *reinterpret_cast<const float4*>(scores + position(first, v));
    take(first, four);
  }
  if (first < keys) {
    float4 four[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int at = position(first, v);
      four[v].x = at < keys ? scores[at] : NAN;
      four[v].y = at + 1 < keys ? scores[at + 1] : NAN;
      four[v].z = at + 2 < keys ? scores[at + 2] : NAN;
      four[v].w = at + 3 < keys ? scores[at + 3] : NAN;
    }
    take(first, four);
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
