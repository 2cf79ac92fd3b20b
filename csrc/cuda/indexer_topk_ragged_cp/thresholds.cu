// A threshold a row, from the scores of a sample of its keys.
#include "../device/chained_launch.cuh"
#include "../indexer_scores_ragged_cp/pieces.cuh"
#include "lane_scan.cuh"
#include "sampled_cut.cuh"

namespace sparse_cp_ops {
namespace {

template <int THREADS>
struct Scratch {
  SearchScratch<THREADS> search;
  int stored;
};

// A thread holds VECTORS times four columns.
template <int THREADS, int VECTORS>
__global__ __launch_bounds__(THREADS, 1024 / THREADS) void threshold_kernel(const __grid_constant__ SurvivorTask task) {
  __shared__ Scratch<THREADS> scratch;
  wait_for_earlier_kernels();
  const int slot = blockIdx.x;
  const ScoreBlock block = task.plan.blocks[task.plan.block_of[slot]];
  const int end =
      wanted_end(task.op.in, row_of(task.rows, slot), task.op.topk, task.op.in.table_width * task.op.in.page_size);
  if (end == 0) return;
  const int pieces = ceil_div(block.end, kPieceKeys), columns = sample_columns(block.stride, pieces, end);
  const float* scores = task.sample + slot * task.sample_stride;
  constexpr int kElements = VECTORS * 4;
  uint32_t ranks[kElements];
  load_ranks<VECTORS>(scores, columns, ranks, [](int v) { return (v * THREADS + threadIdx.x) * 4; });
  if (threadIdx.x == 0) scratch.stored = 0;

  const Found found = sampled_cut(ranks, columns, block.stride, static_cast<int>(task.op.topk), scratch.search);
  const float threshold = columns > 0 ? score_of_rank(found.from) : -INFINITY;
  if (threadIdx.x == 0) task.thresholds[slot] = threshold;

  // All scores are in registers: what reaches the threshold takes their place. NaN does not.
  const uint32_t from = max(found.from, rank_of_score(threshold));
  uint32_t mine = 0;
  int in_warp;
#pragma unroll
  for (int i = 0; i < kElements; ++i) mine |= (ranks[i] >= from ? 1u : 0u) << i;
  asm volatile("" : "+r"(mine));  // or the compiler keeps every comparison in a register of its own
  int at = lanes_before(__popc(mine), in_warp), base = 0;
  if (threadIdx.x % 32 == 0 && in_warp > 0) base = atomicAdd(&scratch.stored, in_warp);
  at += __shfl_sync(~0u, base, 0);
  Survivor* survivors = task.sample_survivors(slot);
  const int capacity = task.sample_capacity();
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) {
    const int position = sample_position(block.stride, pieces, (v * THREADS + threadIdx.x) * 4);  // four in a piece
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (mine >> (4 * v + i) & 1) {
        if (at < capacity) survivors[at] = {score_of_rank(ranks[4 * v + i]), position + i};
        ++at;
      }
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) task.sample_counts[slot] = scratch.stored;
}

}  // namespace

void launch_thresholds(const SurvivorTask& task, int32_t device, cudaStream_t stream) {
  const auto launch = [&](int threads, auto kernel) {
    launch_chained("indexer thresholds", kernel, {task.rows.count, threads}, device, stream, task);
  };
  if (task.sample_stride <= 2048) launch(128, threshold_kernel<128, 4>);
  else if (task.sample_stride <= 4096) launch(128, threshold_kernel<128, 8>);
  else launch(256, threshold_kernel<256, 8>);
}

}  // namespace sparse_cp_ops
