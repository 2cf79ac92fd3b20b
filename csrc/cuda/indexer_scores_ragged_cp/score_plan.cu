// One thread block makes the plan: runs of rows with the same request become blocks, blocks are given steps.
#include "score_plan.h"

#include "../device/chained_launch.cuh"
#include "pieces.cuh"

namespace sparse_cp_ops {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;
constexpr int kVector = 8;
constexpr int kNearBlocks = 2048;  // their steps are in shared memory too, where a search does not wait for memory

// `op` over the values of the threads before this one (0 for the first), and over all of them. Two barriers.
template <class Op>
__device__ int exclusive_scan(int value, int (&warps)[kWarps], int& total, const Op& op) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int other = __shfl_up_sync(~0u, value, d);
    if (lane >= d) value = op(value, other);
  }
  __syncthreads();  // the previous scan's totals were read
  if (lane == 31) warps[warp] = value;
  __syncthreads();
  int sums = warps[lane];
#pragma unroll
  for (int d = 1; d < kWarps; d *= 2) {
    const int other = __shfl_up_sync(~0u, sums, d);
    if (lane >= d) sums = op(sums, other);
  }
  total = __shfl_sync(~0u, sums, kWarps - 1);
  const int warps_before = __shfl_sync(~0u, sums, (warp + 31) % 32), lanes_before = __shfl_up_sync(~0u, value, 1);
  const int before = warp > 0 ? warps_before : 0;
  return lane > 0 ? op(before, lanes_before) : before;
}

__global__ __launch_bounds__(kThreads) void plan_kernel(const __grid_constant__ PlanTask task) {
  __shared__ int warps[kWarps];
  __shared__ int near_steps[2][kNearBlocks];
  wait_for_earlier_kernels();
  const auto sum = [](int a, int b) { return a + b; };
  const auto largest = [](int a, int b) { return a > b ? a : b; };
  const IndexerInputs& in = task.in;
  const ScorePlan& plan = task.plan;
  const int slots = row_count_of(task.rows);
  if (slots == 0) {
    if (threadIdx.x == 0) *plan.block_count = 0;
    return;
  }
  const int first_key = static_cast<int>(task.first_key);

  // Blocks: a run of equal requests, cut every kBlockRows rows. A thread looks at kVector consecutive rows.
  int blocks = 0, run_start = 0;
  for (int base = 0; base < slots; base += kThreads * kVector) {
    const int slot = base + threadIdx.x * kVector;
    int requests[kVector + 1];  // of the row before and of mine
#pragma unroll
    for (int v = 0; v <= kVector; ++v) {
      const int at = slot + v - 1;
      requests[v] = at >= 0 && at < slots ? in.req_ids[row_of(task.rows, at)] : -1;
    }
    int my_last_run = 0, last_run, found, starts = 0;
#pragma unroll
    for (int v = 0; v < kVector; ++v)
      if (slot + v < slots && requests[v + 1] != requests[v]) my_last_run = slot + v;
    run_start = largest(run_start, exclusive_scan(my_last_run, warps, last_run, largest));
    int run = run_start;
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      if (slot + v > 0 && requests[v + 1] != requests[v]) run = slot + v;
      starts |= slot + v < slots && (slot + v - run) % kBlockRows == 0 ? 1 << v : 0;
    }
    int index = blocks + exclusive_scan(__popc(starts), warps, found, sum);
#pragma unroll
    for (int v = 0; v < kVector; ++v)
      if (starts >> v & 1) plan.blocks[index++].slot = slot + v;
    blocks += found;
    run_start = largest(run_start, last_run);
  }
  __syncthreads();

  const bool sampled = task.sample_keys > 0;
  int steps[2] = {};
  for (int base = 0; base < blocks; base += kThreads) {
    const int b = base + threadIdx.x;
    int mine[2] = {};
    if (b < blocks) {
      ScoreBlock block{plan.blocks[b].slot, 0, first_key, 1};
      const int next = b + 1 < blocks ? plan.blocks[b + 1].slot : slots;
      block.rows = next - block.slot;
#pragma unroll
      for (int r = 0; r < kBlockRows; ++r)
        if (r < block.rows)
          block.end = largest(block.end, wanted_end(in, row_of(task.rows, block.slot + r), task.skip_keys,
                                                    task.first_key + task.key_count));
      const int pieces = ceil_div(block.end - first_key, kPieceKeys);
      if (sampled)
        while (ceil_div(pieces, block.stride) * kPieceKeys > task.sample_keys) block.stride *= 2;
      mine[0] = steps_of(sampled ? Sweep::kSample : Sweep::kAll, block, pieces);
      mine[1] = sampled ? steps_of(Sweep::kRest, block, pieces) : 0;
      plan.blocks[b].rows = block.rows;  // not .slot: another thread may read it still
      plan.blocks[b].end = block.end;
      plan.blocks[b].stride = block.stride;
      for (int r = 0; r < block.rows; ++r) plan.block_of[block.slot + r] = b;
    }
#pragma unroll
    for (int pass = 0; pass < 2; ++pass) {
      if (pass == 1 && !sampled) break;
      int total;
      const int before = exclusive_scan(mine[pass], warps, total, sum);
      if (b < blocks) (pass == 0 ? plan.first : plan.rest).first_steps[b] = steps[pass] + before;
      if (b < min(blocks, kNearBlocks)) near_steps[pass][b] = steps[pass] + before;
      steps[pass] += total;
    }
  }
  if (threadIdx.x == 0) {
    plan.first.first_steps[blocks] = steps[0];
    if (sampled) plan.rest.first_steps[blocks] = steps[1];
    *plan.block_count = blocks;
  }
  __syncthreads();

  // Where each CTA begins: the last block whose steps begin at or before its own.
  for (int i = threadIdx.x; i < task.ctas * (sampled ? 2 : 1); i += kThreads) {
    const int cta = i % task.ctas, pass = i / task.ctas;
    const StepTable& table = pass == 0 ? plan.first : plan.rest;
    const int* first_steps = blocks <= kNearBlocks ? near_steps[pass] : table.first_steps;
    const int begin = static_cast<int>(static_cast<int64_t>(pass == 0 ? steps[0] : steps[1]) * cta / task.ctas);
    int low = 0, high = blocks;  // first_steps[low] <= begin; high is behind the answer
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (first_steps[middle] <= begin ? low : high) = middle;
    }
    table.cta_blocks[cta] = low;
  }

  // Which CTAs hold a row's part of the second pass. CTA c begins at or before a step iff total * c < (step + 1) *
  // ctas.
  if (!sampled) return;
  const auto behind = [&](int step) {  // the CTA behind the one that has the step before this one
    return static_cast<int>((static_cast<int64_t>(step) * task.ctas + steps[1] - 1) / steps[1]);
  };
  for (int b = threadIdx.x; b < blocks; b += kThreads) {
    const int first = plan.rest.first_steps[b], last = plan.rest.first_steps[b + 1];
    const CtaRange range = last == first ? CtaRange{0, 0} : CtaRange{behind(first + 1) - 1, behind(last)};
    for (int r = 0; r < plan.blocks[b].rows; ++r) plan.ctas_of[plan.blocks[b].slot + r] = range;
  }
}

}  // namespace

void launch_score_plan(const PlanTask& task, int32_t device, cudaStream_t stream) {
  launch_chained("indexer score plan", plan_kernel, {1, kThreads}, device, stream, task);
}

}  // namespace sparse_cp_ops
