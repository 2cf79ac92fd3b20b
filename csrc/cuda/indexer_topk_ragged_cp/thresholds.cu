// A threshold a row, from the scores of a sample of its keys.
#include "../device/chained_launch.cuh"
#include "../indexer_scores_ragged_cp/pieces.cuh"
#include "lane_scan.cuh"
#include "register_search.cuh"
#include "survivors.h"

namespace sparse_cp_ops {
namespace {

template <int THREADS>
struct Scratch {
  SearchScratch<THREADS> search;
  int stored;
};

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
                                            Scratch<THREADS>& scratch) {
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
  const float total = sum_of_threads(count, scratch.search, 0) / 4.0f;
  const float total_squares = sum_of_threads(squares, scratch.search, 1) / 4.0f;
  return total > 0.0f ? (total_squares - total * total * kPieceKeys / columns) / total : 1.0f;
}

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
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) load_ranks(scores, (v * THREADS + threadIdx.x) * 4, columns, ranks + 4 * v);
  if (threadIdx.x == 0) scratch.stored = 0;

  // One in sixteen more survivors spares half of the search; a sample of everything needs no spare ones.
  const int topk = static_cast<int>(task.op.topk), most_survivors = kMaxSurvivors * 7 / 8;
  const auto find = [&](float scatter) {
    int least = sampled_rank(topk, block.stride, scatter);
    if (block.stride > 1) least = min(least, max(most_survivors, topk + topk / 4) / block.stride);
    least = min(least, columns);
    return search(ranks, columns, least, block.stride == 1 ? least : least + least / 16, scratch.search);
  };
  Found found = find(1.0f);
  if (block.stride > 1 && columns > 0) {
    const float scatter = scatter_of(ranks, found.from, columns, scratch);
    constexpr float kOrdinary = 1.5f;  // an estimate from 256 pieces of independent keys stays below
    if (scatter > kOrdinary) found = find(scatter);
  }
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
