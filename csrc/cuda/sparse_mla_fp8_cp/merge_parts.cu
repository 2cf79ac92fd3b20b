// Joins the partial states of a split list: one warp a (row, head), always in the order of the parts.
#include "kernels.h"
#include "mla_record.cuh"

namespace sparse_cp_ops {
namespace {

constexpr int kWarpsPerBlock = 4;

__global__ void merge_parts_kernel(SparseMlaParams p, KeySplit split) {
  const int64_t states = p.rows * p.heads;
  const int64_t state = static_cast<int64_t>(blockIdx.x) * kWarpsPerBlock + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (state >= states) return;
  float peak = -INFINITY;
  for (int64_t part = 0; part < split.parts; ++part) peak = fmaxf(peak, split.partial_lse[part * states + state]);

  // A lane's 16 dimensions: 4 times 4, 128 apart, so that a warp reads whole lines.
  float sum[4][4] = {};
  float total = 0.0f;
  for (int64_t part = 0; part < split.parts; ++part) {
    const float lse = split.partial_lse[part * states + state];
    if (lse == -INFINITY) continue;
    const float weight = expf(lse - peak);
    total += weight;
    const auto* source =
        reinterpret_cast<const float4*>(split.partial_out + (part * states + state) * kLatentDim) + lane;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float4 x = source[i * 32];
      sum[i][0] += weight * x.x, sum[i][1] += weight * x.y, sum[i][2] += weight * x.z, sum[i][3] += weight * x.w;
    }
  }
  const float factor = total == 0.0f ? 0.0f : 1.0f / total;
  auto* target = reinterpret_cast<uint2*>(static_cast<__nv_bfloat16*>(p.out) + state * kLatentDim) + lane;
#pragma unroll
  for (int i = 0; i < 4; ++i)
    target[i * 32] = make_uint2(float_to_bf16x2(sum[i][0] * factor, sum[i][1] * factor),
                                float_to_bf16x2(sum[i][2] * factor, sum[i][3] * factor));
  if (lane == 0) p.lse[state] = total == 0.0f ? -INFINITY : peak + logf(total);
}

}  // namespace

void merge_parts(const SparseMlaParams& p, const KeySplit& split, cudaStream_t stream) {
  const int64_t blocks = (p.rows * p.heads + kWarpsPerBlock - 1) / kWarpsPerBlock;
  merge_parts_kernel<<<static_cast<unsigned>(blocks), kWarpsPerBlock * 32, 0, stream>>>(p, split);
  check_launch("sparse_mla_fp8_cp: merge of the parts");
}

}  // namespace sparse_cp_ops
