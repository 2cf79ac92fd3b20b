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
// topk < keys <= kFilteredKeys. The scratch has
// kFilterBytes<THREADS> bytes.
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

  constexpr int kVectors = 4, kElements = kVectors * 4;  // a thread and step
  float4 next[kVectors];
  const auto load = [&](int first) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int at = first + (v * THREADS + threadIdx.x) * 4;
      next[v] = make_float4(NAN, NAN, NAN, NAN);
      if (at + 4 <= keys) {
        next[v] = *reinterpret_cast<const float4*>(scores + at);
      } else if (at < keys) {
        next[v].x = scores[at];
        if (at + 1 < keys) next[v].y = scores[at + 1];
        if (at + 2 < keys) next[v].z = scores[at + 2];
      }
    }
  };
  load(0);
  for (int first = 0; first < keys; first += THREADS * kElements) {
    float four[kElements];
#pragma unroll
    for (int v = 0; v < kVectors; ++v)
      four[4 * v] = next[v].x, four[4 * v + 1] = next[v].y, four[4 * v + 2] = next[v].z, four[4 * v + 3] = next[v].w;
    load(first + THREADS * kElements);
    uint32_t mine = 0;
    int in_warp, base = 0;
#pragma unroll
    for (int i = 0; i < kElements; ++i) mine |= (four[i] >= threshold ? 1u : 0u) << i;
    asm volatile("" : "+r"(mine));  // or the compiler keeps every comparison in a register of its own
    int at = lanes_before(__popc(mine), in_warp);
    if (threadIdx.x % 32 == 0 && in_warp > 0) base = atomicAdd(&stored, in_warp);
    at += __shfl_sync(~0u, base, 0);
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      if (!(mine >> i & 1)) continue;
      if (at < kMaxSurvivors) {
        scratch.ranks[at] = rank_of_score(four[i]);
        scratch.positions[at] = first + (i / 4 * THREADS + threadIdx.x) * 4 + i % 4;
      }
      ++at;
    }
  }
  __syncthreads();
  const int survivors = stored;
  if (survivors < topk || survivors > kMaxSurvivors) return false;
  write_best(scratch, survivors, survivors, topk, words, indices);
  return true;
}

}  // namespace sparse_cp_ops
