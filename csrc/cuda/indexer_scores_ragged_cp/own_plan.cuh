// The plan of a pass of few rows over all keys, which each CTA of the scoring kernel makes for itself: that takes less
// time than a kernel before it, whose result each of them would fetch.
#pragma once

#include "pieces.cuh"
#include "sm90_scores.h"

namespace sparse_cp_ops {

struct OwnPlan {
  static constexpr int kWarps = kOwnPlanRows / 32;
  ScoreBlock blocks[kOwnPlanRows];
  int first_steps[kOwnPlanRows + 1];  // as in StepTable
  int count;
  uint32_t starts[2][kWarps];  // a bit a row: first of a request's rows, first of a block
  int sums[kWarps];

  // The last block that begins at or before the step.
  __device__ __forceinline__ int block_of(int step) const {
    int b = 0;
    for (int size = kOwnPlanRows / 2; size > 0; size /= 2)
      if (b + size < count && first_steps[b + size] <= step) b += size;
    return b;
  }
};

__device__ __forceinline__ bool plans_itself(const Sm90ScoreTask& task) { return task.plan.blocks == nullptr; }

// By kOwnPlanRows threads or more. The scratch has 2 * kOwnPlanRows ints.
__device__ __forceinline__ void make_own_plan(const Sm90ScoreTask& task, OwnPlan& plan, int* scratch) {
  const IndexerInputs& in = task.in;
  int *requests = scratch, *ends = scratch + kOwnPlanRows;
  const int slot = threadIdx.x, lane = slot % 32, warp = slot / 32, slots = row_count_of(task.rows);
  const bool planner = slot < kOwnPlanRows, mine = slot < slots;
  const int first_key = static_cast<int>(task.first_key);
  if (mine) {
    const int64_t row = row_of(task.rows, slot);
    requests[slot] = in.req_ids[row];
    ends[slot] = wanted_end(in, row, task.skip_keys, task.first_key + task.key_count);
  }
  __syncthreads();
  const auto collect = [&](bool starts, int what) {
    const uint32_t bits = __ballot_sync(~0u, starts);
    if (planner && lane == 0) plan.starts[what][warp] = bits;
    __syncthreads();
  };
  collect(mine && (slot == 0 || requests[slot] != requests[slot - 1]), 0);
  int run = 0;  // first row of this one's run of equal requests
  for (int w = 0; mine && w <= warp; ++w) {
    const uint32_t bits = plan.starts[0][w] & (w < warp ? ~0u : ~0u >> (31 - lane));
    if (bits != 0) run = w * 32 + 31 - __clz(bits);
  }
  const bool starts = mine && (slot - run) % kBlockRows == 0;
  collect(starts, 1);

  ScoreBlock block{slot, 1, first_key, 1};
  int index = 0, steps = 0;
  if (starts) {
    for (int w = 0; w < warp; ++w) index += __popc(plan.starts[1][w]);
    index += __popc(plan.starts[1][warp] & ((1u << lane) - 1));
    const auto starts_at = [&](int s) { return plan.starts[1][s / 32] >> s % 32 & 1; };
    block.end = max(block.end, ends[slot]);
    for (; slot + block.rows < slots && !starts_at(slot + block.rows); ++block.rows)
      block.end = max(block.end, ends[slot + block.rows]);
    steps = steps_of(Sweep::kAll, block, ceil_div(block.end - first_key, kPieceKeys));
  }
  int through = steps;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int other = __shfl_up_sync(~0u, through, d);
    if (lane >= d) through += other;
  }
  if (planner && lane == 31) plan.sums[warp] = through;
  __syncthreads();
  int before = through - steps;
  for (int w = 0; planner && w < warp; ++w) before += plan.sums[w];
  if (starts) {
    plan.blocks[index] = block;
    plan.first_steps[index] = before;
  }
  if (slot == 0) {
    plan.count = 0;
    int total = 0;
#pragma unroll
    for (int w = 0; w < OwnPlan::kWarps; ++w) plan.count += __popc(plan.starts[1][w]), total += plan.sums[w];
    plan.first_steps[plan.count] = total;
  }
  __syncthreads();
}

}  // namespace sparse_cp_ops
