// Scores of a rectangle by the kernel set of the device.
#include <algorithm>

#include "../arch.h"
#include "pieces.cuh"
#include "sm90_scores.h"

namespace sparse_cp_ops {
namespace {

constexpr int kFillThreads = 256;

// Columns behind a row's keys become -inf.
__global__ __launch_bounds__(kFillThreads) void fill_kernel(const __grid_constant__ ScoreTask task) {
  float* out = task.scores + blockIdx.x * task.score_stride - task.first_key;
  const int64_t visible = visible_keys(task.in, row_of(task.rows, blockIdx.x));
  const int64_t begin = visible > task.first_key ? visible : task.first_key;
  for (int64_t key = begin + threadIdx.x; key < task.first_key + task.key_count; key += kFillThreads)
    out[key] = -INFINITY;
}

}  // namespace

int64_t score_plan_bytes(int32_t device, int64_t rows) {
  return device_arch(device).kernels == KernelSet::kSm90 ? (ScorePlan::bytes(rows) + 15) / 16 * 16 : 0;
}

void launch_scores(const ScoreTask& task, void* plan, int32_t device, cudaStream_t stream) {
  const DeviceArch& arch = device_arch(device);
  if (task.rows.count == 0 || task.key_count == 0) return;
  if (arch.kernels == KernelSet::kPortable) return launch_portable_scores(task, device, stream);
  if (task.fill) {
    fill_kernel<<<static_cast<unsigned>(task.rows.count), kFillThreads, 0, stream>>>(task);
    check_launch("indexer scores: columns without keys");
  }
  const int ctas = std::min(arch.multiprocessors, kMaxCtas);
  ScorePlan score_plan{};
  if (task.rows.count > kOwnPlanRows) {
    score_plan = ScorePlan::at(plan, task.rows.count);
    launch_score_plan({task.in, task.rows, task.first_key, task.key_count, task.skip_keys, 0, ctas, score_plan}, device,
                      stream);
  }
  launch_sm90_scores({task.in,
                      task.rows,
                      score_plan,
                      Sweep::kAll,
                      task.first_key,
                      task.key_count,
                      task.skip_keys,
                      task.scores,
                      task.score_stride,
                      {}},
                     ctas, device, stream);
}

}  // namespace sparse_cp_ops
