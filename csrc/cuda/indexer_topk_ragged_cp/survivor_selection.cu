// The k best among a row's sample and its survivor lists.
//
// Survivors are gathered in shared memory in any order, the cut is searched in registers, and a bitmap over positions
// brings the chosen into position order.
#include "../arch.h"
#include "../indexer_scores_ragged_cp/pieces.cuh"
#include "register_search.cuh"
#include "survivors.h"

namespace sparse_cp_ops {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kElements = kMaxSurvivors / kThreads;

struct Scratch {
  SearchScratch<kThreads> search;
  uint32_t ranks[kMaxSurvivors];
  int32_t positions[kMaxSurvivors];
  int warp_sums[2][kWarps];
  int gathered, list_base;
  uint32_t bitmap[];  // chosen positions, then, `words` behind, positions on the cut
};

__device__ __forceinline__ int lanes_before(int value, int& total) {
  int through = value;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int other = __shfl_up_sync(~0u, through, d);
    if (threadIdx.x % 32 >= d) through += other;
  }
  total = __shfl_sync(~0u, through, 31);
  return through - value;
}

__device__ __forceinline__ int threads_before(int value, int (&sums)[kWarps]) {
  int total;
  const int in_warp = lanes_before(value, total), lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (lane == 0) sums[warp] = total;
  __syncthreads();
  int unused;
  const int warps = lanes_before(lane < kWarps ? sums[lane] : 0, unused);
  return __shfl_sync(~0u, warps, warp) + in_warp;
}

__device__ __forceinline__ void put(Scratch& scratch, int at, float score, int position) {
  if (at >= kMaxSurvivors) return;
  scratch.ranks[at] = rank_of_score(score);
  scratch.positions[at] = position;
}

// Keys of the sample that reach the threshold go to shared memory.
__device__ void gather_sample(const SurvivorTask& task, int slot, const ScoreBlock& block, int keys, float threshold,
                              Scratch& scratch) {
  constexpr int kBatch = 16;  // loads in flight
  const int pieces = ceil_div(block.end, kPieceKeys), columns = sample_columns(block.stride, pieces, keys);
  const float* sample = task.sample + slot * task.sample_stride;
  for (int first = threadIdx.x; first - static_cast<int>(threadIdx.x) < columns; first += kBatch * kThreads) {
    float scores[kBatch];
    uint32_t reached = 0;
#pragma unroll
    for (int v = 0; v < kBatch; ++v) scores[v] = first + v * kThreads < columns ? sample[first + v * kThreads] : NAN;
#pragma unroll
    for (int v = 0; v < kBatch; ++v) reached |= (scores[v] >= threshold ? 1u : 0u) << v;
    int all, base = 0;
    int at = lanes_before(__popc(reached), all);
    if (threadIdx.x % 32 == 0 && all > 0) base = atomicAdd(&scratch.gathered, all);
    at += __shfl_sync(~0u, base, 0);
#pragma unroll
    for (int v = 0; v < kBatch; ++v)
      if (reached >> v & 1) put(scratch, at++, scores[v], sample_position(block.stride, pieces, first + v * kThreads));
  }
}

// Survivors of the row's lists go to shared memory; whether a list was full.
__device__ bool gather_lists(const SurvivorTask& task, int slot, int first_step, int end_step, Scratch& scratch) {
  if (end_step == first_step) return false;
  constexpr int kBatch = 12, kListThreads = kThreads / SurvivorLists::kLanes;
  const int64_t total = task.plan.first_steps[*task.plan.block_count];
  const auto begins = [&](int cta) { return static_cast<int>(total * cta / task.ctas); };
  int cta = static_cast<int>(static_cast<int64_t>(first_step) * task.ctas / total);
  while (cta + 1 < task.ctas && begins(cta + 1) <= first_step) ++cta;
  while (begins(cta) > first_step) --cta;
  bool full = false;
  for (; cta < task.ctas && begins(cta) < end_step; ++cta) {
    if (begins(cta + 1) == begins(cta)) continue;  // no share at all
    const int64_t lists = (slot + static_cast<int64_t>(kBlockRows) * cta) * SurvivorLists::kLanes;
    const int count = task.lists.counts[lists + threadIdx.x % 32];
    full |= count > task.lists.capacity;
    int all, base = 0;
    const int before = lanes_before(count, all);
    if (threadIdx.x == 0) scratch.list_base = atomicAdd(&scratch.gathered, all);
    __syncthreads();
    base = scratch.list_base;
    const int list = threadIdx.x / kListThreads, at = base + __shfl_sync(~0u, before, list);
    const int mine = min(__shfl_sync(~0u, count, list), task.lists.capacity);
    const Survivor* entries = task.lists.entries + (lists + list) * task.lists.capacity;
    for (int first = threadIdx.x % kListThreads; first < mine; first += kBatch * kListThreads) {
      Survivor survivors[kBatch];
#pragma unroll
      for (int v = 0; v < kBatch; ++v)
        if (first + v * kListThreads < mine) survivors[v] = entries[first + v * kListThreads];
#pragma unroll
      for (int v = 0; v < kBatch; ++v)
        if (first + v * kListThreads < mine)
          put(scratch, at + first + v * kListThreads, survivors[v].score, survivors[v].key);
    }
    __syncthreads();
  }
  return __any_sync(~0u, full);
}

__global__ __launch_bounds__(kThreads, 4) void survivor_kernel(const __grid_constant__ SurvivorTask task, int words) {
  extern __shared__ __align__(16) char smem[];
  Scratch& scratch = *reinterpret_cast<Scratch*>(smem);
  const int slot = blockIdx.x, block_index = task.plan.block_of[slot];
  const int64_t row = row_of(task.rows, slot);
  const int topk = static_cast<int>(task.op.topk), keys = static_cast<int>(visible_keys(task.op.in, row));
  int32_t* indices = task.op.indices + row * topk;
  if (keys <= topk) {
    for (int i = threadIdx.x; i < topk; i += kThreads) indices[i] = i < keys ? i : -1;
    return;
  }
  const ScoreBlock block = task.plan.blocks[block_index];
  const int first_step = task.plan.first_steps[block_index], end_step = task.plan.first_steps[block_index + 1];
  for (int w = threadIdx.x; w < 2 * words; w += kThreads) scratch.bitmap[w] = 0;
  if (threadIdx.x == 0) scratch.gathered = 0;
  __syncthreads();
  gather_sample(task, slot, block, keys, task.thresholds[slot], scratch);
  const bool full = gather_lists(task, slot, first_step, end_step, scratch);
  __syncthreads();
  const int size = scratch.gathered;
  if (full || size < topk || size > kMaxSurvivors) {
    if (threadIdx.x == 0) task.failed[atomicAdd(task.failed_count, 1)] = static_cast<int32_t>(row);
    return;
  }

  uint32_t ranks[kElements];
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
    const int at = i * kThreads + threadIdx.x;
    ranks[i] = at < size ? scratch.ranks[at] : kNoRank;
  }
  const Found found = search<kThreads>(ranks, size, topk, topk, scratch.search);
  const bool ties = found.count > topk;
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
    if (ranks[i] < found.from) continue;
    const int position = scratch.positions[i * kThreads + threadIdx.x];
    const int map = ties && ranks[i] == found.from ? words : 0;
    atomicOr(&scratch.bitmap[map + position / 32], 1u << position % 32);
  }
  __syncthreads();

  // Every thread has a run of words.
  const int run = ceil_div(words, kThreads), first = min(static_cast<int>(threadIdx.x) * run, words);
  const int last = min(first + run, words);
  if (ties) {  // of the positions on the cut, the smallest
    int mine = 0;
    for (int w = first; w < last; ++w) mine += __popc(scratch.bitmap[words + w]);
    int places = topk - found.above - threads_before(mine, scratch.warp_sums[0]);
    for (int w = first; w < last; ++w) {
      uint32_t bits = scratch.bitmap[words + w];
      for (; bits != 0 && places > 0; bits &= bits - 1, --places) scratch.bitmap[w] |= bits & -bits;
    }
  }
  int mine = 0;
  for (int w = first; w < last; ++w) mine += __popc(scratch.bitmap[w]);
  int at = threads_before(mine, scratch.warp_sums[1]);
  for (int w = first; w < last; ++w)
    for (uint32_t bits = scratch.bitmap[w]; bits != 0; bits &= bits - 1) indices[at++] = w * 32 + __ffs(bits) - 1;
}

}  // namespace

void launch_survivor_selection(const SurvivorTask& task, int32_t device, cudaStream_t stream) {
  const int words = static_cast<int>((task.op.in.capacity() + 31) / 32);
  const int bytes = static_cast<int>(sizeof(Scratch)) + 2 * words * 4;
  constexpr int kMostBytes = sizeof(Scratch) + 2 * kMaxSurvivorKeys / 8;
  allow_shared_bytes<survivor_kernel>(device, kMostBytes);
  survivor_kernel<<<static_cast<unsigned>(task.rows.count), kThreads, bytes, stream>>>(task, words);
  check_launch("indexer selection among survivors");
}

}  // namespace sparse_cp_ops
