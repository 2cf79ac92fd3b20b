// Joins the partial states of a split list: one warp a (row, head), always in the order of the parts.
#include "../device/chained_launch.cuh"
#include "kernels.h"
#include "mla_record.cuh"

namespace sparse_cp_ops {
namespace {

constexpr int kWarpsPerBlock = 4;

constexpr int kLanes = 32, kTogether = 4;  // parts whose values are on their way at the same time

__global__ void merge_parts_kernel(SparseMlaParams p, KeySplit split) {
  wait_for_earlier_kernels();
  const int64_t states = p.rows * p.heads;
  const int64_t state = static_cast<int64_t>(blockIdx.x) * kWarpsPerBlock + threadIdx.x / kLanes;
  const int lane = threadIdx.x % kLanes, parts = static_cast<int>(split.parts);
  if (state >= states) return;
  auto lse_of = [&](int part) { return part < parts ? split.partial_lse[part * states + state] : -INFINITY; };
  float peak = -INFINITY;
  for (int part = lane; part < parts; part += kLanes) peak = fmaxf(peak, lse_of(part));
#pragma unroll
  for (int lanes = 1; lanes < kLanes; lanes *= 2) peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, lanes));

  // A lane's 16 dimensions: 4 times 4, 128 apart, so that a warp reads whole lines.
  float sum[4][4] = {};
  float total = 0.0f;
  for (int first = 0; first < parts; first += kLanes) {
    const float lse = lse_of(first + lane);  // a lane a part
    const float own_weight = lse == -INFINITY ? 0.0f : expf(lse - peak);
    for (int next = first; next < min(parts, first + kLanes); next += kTogether) {
      float4 x[kTogether][4];
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        const int64_t part = min(next + j, parts - 1);
        const auto* source =
            reinterpret_cast<const float4*>(split.partial_out + (part * states + state) * kLatentDim) + lane;
#pragma unroll
        for (int i = 0; i < 4; ++i) x[j][i] = source[i * kLanes];
      }
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        const float weight = __shfl_sync(~0u, own_weight, next + j - first);  // 0 behind the last part
        if (weight == 0.0f) continue;
        total += weight;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          sum[i][0] += weight * x[j][i].x, sum[i][1] += weight * x[j][i].y;
          sum[i][2] += weight * x[j][i].z, sum[i][3] += weight * x[j][i].w;
        }
      }
    }
  }
  const float factor = total == 0.0f ? 0.0f : 1.0f / total;
  auto* target = reinterpret_cast<uint2*>(static_cast<__nv_bfloat16*>(p.out) + state * kLatentDim) + lane;
#pragma unroll
  for (int i = 0; i < 4; ++i)
    target[i * kLanes] = make_uint2(float_to_bf16x2(sum[i][0] * factor, sum[i][1] * factor),
                                    float_to_bf16x2(sum[i][2] * factor, sum[i][3] * factor));
  if (lane == 0) p.lse[state] = total == 0.0f ? -INFINITY : peak + logf(total);
}

}  // namespace

void merge_parts(const SparseMlaParams& p, const KeySplit& split, int32_t device_index, cudaStream_t stream) {
  const int64_t blocks = (p.rows * p.heads + kWarpsPerBlock - 1) / kWarpsPerBlock;
  launch_chained("sparse_mla_fp8_cp: merge of the parts", merge_parts_kernel, {blocks, kWarpsPerBlock * kLanes},
                 device_index, stream, p, split);
}

}  // namespace sparse_cp_ops
