// The k best among a row's sample and its survivor lists.
#include "../device/chained_launch.cuh"
#include "../indexer_scores_ragged_cp/pieces.cuh"
#include "best_survivors.cuh"

namespace sparse_cp_ops {
namespace {

constexpr int kThreads = 256;
constexpr int kListLanes = kThreads / SurvivorLists::kLanes;  // threads a list
constexpr int kListBatch = 6;                                 // 96 survivors of a list at once

using Scratch = SurvivorScratch<kThreads>;

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
  write_best(scratch, gathered.places, gathered.survivors, topk, words, indices);
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
