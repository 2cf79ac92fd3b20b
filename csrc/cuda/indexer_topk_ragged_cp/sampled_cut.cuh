// The score that somewhat more than topk keys of a row should reach, judged by a sample of them.
#pragma once

#include "../indexer_scores_ragged_cp/pieces.cuh"
#include "register_search.cuh"
#include "survivors.h"

namespace sparse_cp_ops {

// How many keys of a sample of one in `stride` must reach the threshold so that topk of all keys do, 3.5 standard
// deviations off, if their number varies `scatter` times as much as a Poisson one: r - 3.5 sqrt(scatter * r) = topk /
// stride. In 8192 rows x 64K keys, one in 16 sampled, 0.06 rows then have too few (3 deviations: one row).
__device__ __forceinline__ int sampled_rank(int topk, int stride, float scatter) {
  if (stride == 1) return topk;
  const float mean = static_cast<float>(topk) / stride, off = 3.5f * 3.5f * scatter;
  return static_cast<int>(mean + 0.5f * off + sqrtf(off * (mean + 0.25f * off))) + 1;
}

// How much more the number of sampled keys from `cut` up varies than that of keys that were sampled one by one: keys
// beside each other may score alike, and pieces of kPieceKeys are sampled. Estimated from the numbers in the pieces.
template <int THREADS, int N>
__device__ __forceinline__ float scatter_of(const uint32_t (&ranks)[N], uint32_t cut, int columns,
                                            SearchScratch<THREADS>& scratch) {
  static_assert(kPieceKeys == 16, "four neighbouring threads hold a piece in each vector");
  __syncthreads();  // the search's scratch is used again
  int count = 0, squares = 0;
#pragma unroll
  for (int v = 0; v < N / 4; ++v) {
    int in_piece = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) in_piece += ranks[4 * v + i] >= cut;
    in_piece += __shfl_xor_sync(~0u, in_piece, 1);
    in_piece += __shfl_xor_sync(~0u, in_piece, 2);
    count += in_piece, squares += in_piece * in_piece;  // each piece four times
  }
  const float total = sum_of_threads(count, scratch, 0) / 4.0f;
  const float total_squares = sum_of_threads(squares, scratch, 1) / 4.0f;
  return total > 0.0f ? (total_squares - total * total * kPieceKeys / columns) / total : 1.0f;
}

// A cut of the sample: what reaches it in the whole row should be topk keys and up to kMaxSurvivors. Thread t holds
// columns 4 (t + v THREADS) and the three behind it in ranks[4 v], ...
template <int THREADS, int N>
__device__ __forceinline__ Found sampled_cut(const uint32_t (&ranks)[N], int columns, int stride, int topk,
                                             SearchScratch<THREADS>& scratch) {
  // One in sixteen more survivors spares half of the search; a sample of everything needs no spare ones.
  constexpr int kMostSurvivors = kMaxSurvivors * 7 / 8;
  const auto find = [&](float scatter) {
    int least = sampled_rank(topk, stride, scatter);
    if (stride > 1) least = min(least, max(kMostSurvivors, topk + topk / 4) / stride);
    least = min(least, columns);
    return search(ranks, columns, least, stride == 1 ? least : least + least / 16, scratch);
  };
  Found found = find(1.0f);
  if (stride > 1 && columns > 0) {
    const float scatter = scatter_of(ranks, found.from, columns, scratch);
    constexpr float kOrdinary = 1.5f;  // an estimate from 256 pieces of independent keys stays below
    if (scatter > kOrdinary) found = find(scatter);
  }
  return found;
}

}  // namespace sparse_cp_ops
