// A threshold a row, from the scores of a sample of its keys.
#include "../indexer_scores_ragged_cp/pieces.cuh"
#include "../launch.h"
#include "register_search.cuh"
#include "survivors.h"

namespace sparse_cp_ops {
namespace {

constexpr int kElements = 32;  // a thread

// How many keys of a sample of one in `stride` must reach the threshold so that topk of all keys do, three standard
// deviations off: r - 3 sqrt(r) = topk / stride.
__device__ __forceinline__ int sampled_rank(int topk, int stride) {
  if (stride == 1) return topk;
  const float mean = static_cast<float>(topk) / stride;
  return static_cast<int>(mean + 4.5f + 3.0f * sqrtf(mean + 2.25f)) + 1;
}

template <int THREADS>
__global__ __launch_bounds__(THREADS, 1024 / THREADS) void threshold_kernel(const __grid_constant__ SurvivorTask task) {
  __shared__ SearchScratch<THREADS> scratch;
  const int slot = blockIdx.x;
  const ScoreBlock block = task.plan.blocks[task.plan.block_of[slot]];
  const int end =
      wanted_end(task.op.in, row_of(task.rows, slot), task.op.topk, task.op.in.table_width * task.op.in.page_size);
  if (end == 0) return;
  const int columns = sample_columns(block.stride, ceil_div(block.end, kPieceKeys), end);
  const int least = min(sampled_rank(static_cast<int>(task.op.topk), block.stride), columns);
  const float* scores = task.sample + slot * task.sample_stride;
  uint32_t ranks[kElements];
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
    const int column = i * THREADS + threadIdx.x;
    ranks[i] = column < columns ? rank_of_score(scores[column]) : kNoRank;
  }
  // One in sixteen more survivors spares half of the search.
  const Found found = search<THREADS>(ranks, columns, least, least + least / 16, scratch);
  if (threadIdx.x == 0) task.thresholds[slot] = columns > 0 ? score_of_rank(found.from) : -INFINITY;
}

}  // namespace

void launch_thresholds(const SurvivorTask& task, cudaStream_t stream) {
  const auto rows = static_cast<unsigned>(task.rows.count);
  if (task.sample_stride <= 128 * kElements) threshold_kernel<128><<<rows, 128, 0, stream>>>(task);
  else threshold_kernel<256><<<rows, 256, 0, stream>>>(task);
  check_launch("indexer thresholds");
}

}  // namespace sparse_cp_ops
