// The k best of a row's survivors, which lie in shared memory in any order: the cut is searched in registers, and a
// bitmap over positions brings the chosen into position order.
#pragma once

#include "../indexer_scores_ragged_cp/pieces.cuh"
#include "lane_scan.cuh"
#include "register_search.cuh"
#include "survivors.h"

namespace sparse_cp_ops {

template <int THREADS>
struct SurvivorScratch {
  SearchScratch<THREADS> search;
  alignas(16) uint32_t ranks[kMaxSurvivors];  // once they are in registers: the chosen positions in order
  alignas(16) int32_t positions[kMaxSurvivors];
  int warp_sums[2][THREADS / 32];
  uint32_t bitmap[];  // chosen positions, then, `words` behind, positions on the cut
};

// Among `places` places of the scratch, `survivors` of them real, the others kNoRank; survivors >= topk. The bitmap's
// `words` words, enough for all positions, are zeros, and other threads' writes are visible.
template <int THREADS>
__device__ __forceinline__ void write_best(SurvivorScratch<THREADS>& scratch, int places, int survivors, int topk,
                                           int words, int32_t* indices) {
  constexpr int kWarps = THREADS / 32, kElements = kMaxSurvivors / THREADS;
  uint32_t ranks[kElements];
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
    const int at = i * THREADS + threadIdx.x;
    ranks[i] = at < places ? scratch.ranks[at] : kNoRank;
  }
  const Found found = search(ranks, survivors, topk, topk, scratch.search);

  const auto mark = [&](const auto& wanted, int map) {
    constexpr int kBatch = 8;  // positions on their way at once
#pragma unroll
    for (int first = 0; first < kElements; first += kBatch) {
      int positions[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) positions[i] = scratch.positions[(first + i) * THREADS + threadIdx.x];
#pragma unroll
      for (int i = 0; i < kBatch; ++i)
        if (wanted(ranks[first + i])) atomicOr(&scratch.bitmap[map + positions[i] / 32], 1u << positions[i] % 32);
    }
  };
  const bool ties = found.count > topk;
  const uint32_t from = found.from + (ties ? 1 : 0);
  mark([&](uint32_t rank) { return rank >= from; }, 0);

  // Every warp has a run of words, and every lane one of 32 that follow each other.
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, run = ceil_div(words, THREADS) * 32;
  const int first = min(warp * run, words), last = min(first + run, words);
  const auto bits_before = [&](const uint32_t* map, int (&sums)[kWarps]) {  // in the runs of the warps before
    int mine = 0;
    for (int w = first + lane; w < last; w += 32) mine += __popc(map[w]);
    mine = __reduce_add_sync(~0u, mine);
    if (lane == 0) sums[warp] = mine;
    __syncthreads();
    return __reduce_add_sync(~0u, lane < warp ? sums[lane] : 0);
  };
  const auto for_each_word = [&](const uint32_t* map, int before, const auto& body) {  // body(word, bits, bits before)
    for (int start = first; start < last; start += 32) {
      const int w = start + lane;
      const uint32_t bits = w < last ? map[w] : 0;
      int total;
      const int in_lanes = lanes_before(__popc(bits), total);
      body(w, bits, before + in_lanes);
      before += total;
    }
  };
  if (ties) {  // of the positions on the cut, the smallest
    uint32_t* on_cut = scratch.bitmap + words;
    for (int w = threadIdx.x; w < words; w += THREADS) on_cut[w] = 0;
    __syncthreads();
    mark([&](uint32_t rank) { return rank == found.from; }, words);
    __syncthreads();
    for_each_word(on_cut, bits_before(on_cut, scratch.warp_sums[0]), [&](int w, uint32_t bits, int before) {
      for (int places = topk - found.above - before; bits != 0 && places > 0; bits &= bits - 1, --places)
        scratch.bitmap[w] |= bits & -bits;
    });
  }
  __syncthreads();
  for_each_word(scratch.bitmap, bits_before(scratch.bitmap, scratch.warp_sums[1]), [&](int w, uint32_t bits, int at) {
    for (; bits != 0; bits &= bits - 1) scratch.ranks[at++] = w * 32 + __ffs(bits) - 1;
  });
  __syncthreads();
  for (int i = threadIdx.x * 4; i < topk; i += THREADS * 4)
    *reinterpret_cast<uint4*>(indices + i) = *reinterpret_cast<const uint4*>(scratch.ranks + i);
}

}  // namespace sparse_cp_ops
