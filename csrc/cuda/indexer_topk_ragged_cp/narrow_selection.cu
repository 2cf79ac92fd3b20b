// Selection for rows that fit the registers of a thread block, or of a cluster of blocks that have equal shares.
//
// Element i of a block's share is held by thread i / 4 % THREADS, in strip i / (4 * THREADS): loads are coalesced, and
// a strip's elements follow one another over the threads.
#include <algorithm>

#include "../device/chained_launch.cuh"
#include "../indexer_scores_ragged_cp/pieces.cuh"
#include "register_search.cuh"
#include "selection.h"

namespace sparse_cp_ops {
namespace {

constexpr int kStrips = 8;
constexpr int kElements = kStrips * 4;  // a thread
constexpr int kResidentThreads = 1024;  // of a multiprocessor: what their registers allow

template <int THREADS, int BLOCKS>
struct Scratch {
  SearchScratch<THREADS, BLOCKS> search;
  int strips[kStrips][THREADS / 32];  // elements of a warp in a strip, then elements before them
  int total;
};

// For every strip, how many bits the masks have before this thread's, in the blocks before this one as well. Bits 4s ..
// 4s+3 of a mask belong to strip s.
template <int THREADS, int BLOCKS>
__device__ void count_before(uint32_t mask, int (&before)[kStrips], Scratch<THREADS, BLOCKS>& scratch, int turn) {
  constexpr int kWarps = THREADS / 32;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint32_t packed[2] = {};  // a byte a strip: a warp has at most 128 elements of it
#pragma unroll
  for (int s = 0; s < kStrips; ++s) packed[s / 4] += __popc(mask >> (4 * s) & 15) << (s % 4 * 8);
  const uint32_t mine[2] = {packed[0], packed[1]};
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t other = __shfl_up_sync(~0u, packed[half], d);
      if (lane >= d) packed[half] += other;
    }
  }
  __syncthreads();  // the strips of the count before were read
  if (lane == 31) {
#pragma unroll
    for (int s = 0; s < kStrips; ++s) scratch.strips[s][warp] = packed[s / 4] >> (s % 4 * 8) & 255;
  }
  __syncthreads();
  if (warp == 0) {
    constexpr int kEach = kStrips * kWarps / 32;
    int* counts = &scratch.strips[0][0] + lane * kEach;
    int sum = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) sum += counts[i];
    int through = sum;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const int other = __shfl_up_sync(~0u, through, d);
      if (lane >= d) through += other;
    }
    int running = through - sum;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int count = counts[i];
      counts[i] = running;
      running += count;
    }
    if (lane == 31) scratch.total = running;
  }
  __syncthreads();
  int blocks_before;
  sum_of_blocks(scratch.total, scratch.search, turn, blocks_before);
#pragma unroll
  for (int s = 0; s < kStrips; ++s)
    before[s] = blocks_before + scratch.strips[s][warp] + (((packed[s / 4] - mine[s / 4]) >> (s % 4 * 8)) & 255);
}

template <int THREADS, int BLOCKS>
__device__ void select_row(const SelectTask& task, int slot, Scratch<THREADS, BLOCKS>& scratch) {
  const int first = blockIdx.x % BLOCKS * (THREADS * kElements);
  const int64_t row = row_of(task.rows, slot);
  const int topk = static_cast<int>(task.op.topk), keys = static_cast<int>(visible_keys(task.op.in, row));
  int32_t* indices = task.op.indices + row * topk;
  if (keys <= topk) {
    for (int i = blockIdx.x % BLOCKS * THREADS + threadIdx.x; i < topk; i += THREADS * BLOCKS)
      indices[i] = i < keys ? i : -1;
    return;
  }
  const float* scores = task.scores + slot * task.score_stride;
  uint32_t ranks[kElements];
  load_ranks<kStrips>(scores, keys, ranks, [first](int s) { return first + (s * THREADS + threadIdx.x) * 4; });

  const Found found = search(ranks, keys, topk, topk, scratch.search);
  uint32_t chosen = 0;
  int before[kStrips];
  if (found.count == topk) {
#pragma unroll
    for (int v = 0; v < kElements; ++v) chosen |= (ranks[v] >= found.from ? 1u : 0u) << v;
  } else {  // more ties than places: the first ones
    uint32_t ties = 0;
#pragma unroll
    for (int v = 0; v < kElements; ++v) {
      ties |= (ranks[v] == found.from ? 1u : 0u) << v;
      chosen |= (ranks[v] > found.from ? 1u : 0u) << v;
    }
    count_before(ties, before, scratch, 2);
#pragma unroll
    for (int v = 0; v < kElements; ++v)
      if (ties >> v & 1 && before[v / 4]++ < topk - found.above) chosen |= 1u << v;
  }
  count_before(chosen, before, scratch, 3);
#pragma unroll
  for (int v = 0; v < kElements; ++v)
    if (chosen >> v & 1) indices[before[v / 4]++] = first + (v / 4 * THREADS + threadIdx.x) * 4 + v % 4;
}

template <int THREADS, int BLOCKS>
__global__ __launch_bounds__(THREADS,
                             kResidentThreads / THREADS) void narrow_kernel(const __grid_constant__ SelectTask task) {
  if constexpr (BLOCKS == 1 || kHasClusters) {
    __shared__ Scratch<THREADS, BLOCKS> scratch;
    wait_for_earlier_kernels();
    const int rows = row_count_of(task.rows);
    for (int slot = blockIdx.x / BLOCKS; slot < rows; slot += gridDim.x / BLOCKS) {
      select_row(task, slot, scratch);
      group_barrier<BLOCKS>();  // the next row's writes come after this row's reads
    }
  }
}

template <int THREADS, int BLOCKS>
void launch(const SelectTask& task, int32_t device, cudaStream_t stream) {
  // A list is mostly empty: as many groups as run at once take what there is.
  const int64_t resident = device_arch(device).multiprocessors * kResidentThreads / (THREADS * BLOCKS);
  const int64_t groups = task.rows.list == nullptr ? task.rows.count : std::min(task.rows.count, resident);
  launch_chained("indexer selection of narrow rows", narrow_kernel<THREADS, BLOCKS>,
                 {groups * BLOCKS, THREADS, 0, BLOCKS}, device, stream, task);
}

}  // namespace

void launch_narrow_selection(const SelectTask& task, int32_t device, cudaStream_t stream) {
  const int64_t keys = task.key_count;
  if (keys <= 128 * kElements) launch<128, 1>(task, device, stream);
  else if (keys <= 256 * kElements) launch<256, 1>(task, device, stream);
  else if (keys <= kNarrowKeys) launch<512, 1>(task, device, stream);
  else if (keys <= kNarrowBlocks * 128 * kElements) launch<128, kNarrowBlocks>(task, device, stream);
  else if (keys <= kNarrowBlocks * 256 * kElements) launch<256, kNarrowBlocks>(task, device, stream);
  else launch<512, kNarrowBlocks>(task, device, stream);
}

}  // namespace sparse_cp_ops
