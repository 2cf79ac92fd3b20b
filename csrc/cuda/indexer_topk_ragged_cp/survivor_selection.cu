// The k best among a row's sample and its survivor lists.
//
// Survivors are gathered in shared memory in any order, the cut is searched in registers, and a bitmap over positions
// brings the chosen into position order.
#include "../device/chained_launch.cuh"
#include "../indexer_scores_ragged_cp/pieces.cuh"
#include "lane_scan.cuh"
#include "register_search.cuh"
#include "survivors.h"

namespace sparse_cp_ops {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kElements = kMaxSurvivors / kThreads;
constexpr int kListLanes = kThreads / SurvivorLists::kLanes;  // threads a list
constexpr int kListBatch = 6;                                 // 96 survivors of a list at once

struct Scratch {
  SearchScratch<kThreads> search;
  alignas(16) uint32_t ranks[kMaxSurvivors];  // once they are in registers: the chosen positions in order
  alignas(16) int32_t positions[kMaxSurvivors];
  int warp_sums[2][kWarps];
  uint32_t bitmap[];  // chosen positions, then, `words` behind, positions on the cut
};

// What was gathered; the same in all threads. Each list begins at an even place, so there are gaps of kNoRank.
struct Gathered {
  int places = 0, survivors = 0;
  bool failed = false;
};

// Two survivors to an even place; `count` says how many of them are real.
__device__ __forceinline__ void put_pair(Scratch& scratch, int at, const uint4& pair, int count) {
  const uint32_t second = count > 1 ? rank_of_score(__uint_as_float(pair.z)) : kNoRank;
  *reinterpret_cast<uint2*>(scratch.ranks + at) = make_uint2(rank_of_score(__uint_as_float(pair.x)), second);
  *reinterpret_cast<uint2*>(scratch.positions + at) = make_uint2(pair.y, pair.w);
}

// `count` survivors to place `at`, by `lanes` threads of which this is number `lane`; BATCH loads of two in flight.
template <int BATCH>
__device__ __forceinline__ void copy_survivors(const Survivor* from, int count, int at, int lane, int lanes,
                                               Scratch& scratch) {
  const uint4* pairs = reinterpret_cast<const uint4*>(from);
  for (int first = lane; 2 * first < count; first += BATCH * lanes) {
    uint4 batch[BATCH];
#pragma unroll
    for (int v = 0; v < BATCH; ++v) {
      const int i = first + v * lanes;
      if (2 * i + 1 < count) {
        batch[v] = pairs[i];
      } else if (2 * i < count) {  // the last one alone
        const uint2 last = *reinterpret_cast<const uint2*>(pairs + i);
        batch[v] = make_uint4(last.x, last.y, 0, 0);
      }
    }
#pragma unroll
    for (int v = 0; v < BATCH; ++v) {
      const int i = 2 * (first + v * lanes);
      if (i < count) put_pair(scratch, at + i, batch[v], count - i);
    }
  }
}

// Every warp adds up all counts by itself, so that no thread waits for another.
__device__ Gathered gather(const SurvivorTask& task, int slot, Scratch& scratch) {
  const int lane = threadIdx.x % 32, my_list = threadIdx.x / kListLanes;
  const CtaRange ctas = task.plan.ctas_of[slot];
  const auto lists_of = [&](int cta) {
    return (slot + static_cast<int64_t>(kBlockRows) * cta) * SurvivorLists::kLanes;
  };
  const auto counts_of = [&](int cta) { return cta < ctas.end ? task.lists.counts[lists_of(cta) + lane] : 0; };
  const int capacity = task.lists.capacity, sampled = task.sample_counts[slot];
  int count = counts_of(ctas.first);
  Gathered gathered{(sampled + 1) / 2 * 2, sampled, sampled > task.sample_capacity()};
  if (gathered.failed) return gathered;
  copy_survivors<1>(task.sample_survivors(slot), sampled, 0, threadIdx.x, kThreads, scratch);
  for (int cta = ctas.first; cta < ctas.end; ++cta) {
    const int next_count = counts_of(cta + 1);
    int places, survivors;
    const int before = lanes_before((count + 1) / 2 * 2, places);
    survivors = __reduce_add_sync(~0u, count);
    gathered.failed = __any_sync(~0u, count > capacity) || gathered.places + places > kMaxSurvivors;
    if (gathered.failed) return gathered;
    copy_survivors<kListBatch>(task.lists.entries + (lists_of(cta) + my_list) * capacity,
                               __shfl_sync(~0u, count, my_list), gathered.places + __shfl_sync(~0u, before, my_list),
                               threadIdx.x % kListLanes, kListLanes, scratch);
    gathered.places += places;
    gathered.survivors += survivors;
    count = next_count;
  }
  return gathered;
}

__global__ __launch_bounds__(kThreads, 5) void survivor_kernel(const __grid_constant__ SurvivorTask task, int words) {
  extern __shared__ __align__(16) char smem[];
  Scratch& scratch = *reinterpret_cast<Scratch*>(smem);
  wait_for_earlier_kernels();
  const int slot = blockIdx.x;
  const int64_t row = row_of(task.rows, slot);
  const int topk = static_cast<int>(task.op.topk), keys = static_cast<int>(visible_keys(task.op.in, row));
  int32_t* indices = task.op.indices + row * topk;
  if (keys <= topk) {
    for (int i = threadIdx.x; i < topk; i += kThreads) indices[i] = i < keys ? i : -1;
    return;
  }
  for (int w = threadIdx.x; w < words; w += kThreads) scratch.bitmap[w] = 0;
  const Gathered gathered = gather(task, slot, scratch);
  if (gathered.failed || gathered.survivors < topk) {
    if (threadIdx.x == 0) task.failed[atomicAdd(task.failed_count, 1)] = static_cast<int32_t>(row);
    return;
  }
  __syncthreads();
  uint32_t ranks[kElements];
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
    const int at = i * kThreads + threadIdx.x;
    ranks[i] = at < gathered.places ? scratch.ranks[at] : kNoRank;
  }
  const Found found = search(ranks, gathered.survivors, topk, topk, scratch.search);

  const auto mark = [&](const auto& wanted, int map) {
    constexpr int kBatch = 8;  // positions on their way at once
#pragma unroll
    for (int first = 0; first < kElements; first += kBatch) {
      int positions[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) positions[i] = scratch.positions[(first + i) * kThreads + threadIdx.x];
#pragma unroll
      for (int i = 0; i < kBatch; ++i)
        if (wanted(ranks[first + i])) atomicOr(&scratch.bitmap[map + positions[i] / 32], 1u << positions[i] % 32);
    }
  };
  const bool ties = found.count > topk;
  const uint32_t from = found.from + (ties ? 1 : 0);
  mark([&](uint32_t rank) { return rank >= from; }, 0);

  // Every warp has a run of words, and every lane one of 32 that follow each other.
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, run = ceil_div(words, kThreads) * 32;
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
    for (int w = threadIdx.x; w < words; w += kThreads) on_cut[w] = 0;
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
  for (int i = threadIdx.x * 4; i < topk; i += kThreads * 4)
    *reinterpret_cast<uint4*>(indices + i) = *reinterpret_cast<const uint4*>(scratch.ranks + i);
}

}  // namespace

void launch_survivor_selection(const SurvivorTask& task, int32_t device, cudaStream_t stream) {
  const int words = static_cast<int>((task.op.in.capacity() + 31) / 32);
  const int bytes = static_cast<int>(sizeof(Scratch)) + 2 * words * 4;
  constexpr int kMostBytes = sizeof(Scratch) + 2 * kMaxSurvivorKeys / 8;
  allow_shared_bytes<survivor_kernel>(device, kMostBytes);
  launch_chained("indexer selection among survivors", survivor_kernel, {task.rows.count, kThreads, bytes}, device,
                 stream, task, words);
}

}  // namespace sparse_cp_ops
