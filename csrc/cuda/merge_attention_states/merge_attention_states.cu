// merge_attention_states on CUDA: one warp a (row, head), 16-byte loads, weights in registers.
#include <cuda_bf16.h>
#include <torch/csrc/stable/library.h>

#include <tuple>

#include "../../ops/merge_attention_states.h"
#include "../launch.h"

namespace sparse_cp_ops {
namespace {

constexpr int kWarpsPerBlock = 4;

__device__ float to_float(float x) { return x; }
__device__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
template <class T>
__device__ T from_float(float x);
template <>
__device__ float from_float<float>(float x) {
  return x;
}
template <>
__device__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

template <class T>
__global__ void merge_kernel(MergeAttentionStatesParams p) {
  const int64_t states = p.rows * p.heads;
  const int64_t state = static_cast<int64_t>(blockIdx.x) * kWarpsPerBlock + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (state >= states) return;

  float peak = -INFINITY;
  bool has_nan = false;
  for (int64_t part = 0; part < p.parts; ++part) {
    const float lse = p.lses[part * states + state];
    has_nan |= isnan(lse);
    peak = fmaxf(peak, lse);
  }
  T* out = static_cast<T*>(p.out) + state * p.dim;
  if (has_nan || peak == -INFINITY) {
    for (int64_t d = lane; d < p.dim; d += 32) out[d] = from_float<T>(has_nan ? NAN : 0.0f);
    if (lane == 0) p.lse[state] = has_nan ? NAN : -INFINITY;
    return;
  }
  float total = 0.0f;
  for (int64_t part = 0; part < p.parts; ++part) {
    const float lse = p.lses[part * states + state];
    total += lse == peak ? 1.0f : expf(lse - peak);
  }
  for (int64_t d = lane; d < p.dim; d += 32) {
    float sum = 0.0f;
    for (int64_t part = 0; part < p.parts; ++part) {
      const float lse = p.lses[part * states + state];
      if (lse == -INFINITY) continue;
      const float weight = lse == peak ? 1.0f : expf(lse - peak);
      sum += weight * to_float(static_cast<const T*>(p.outs)[(part * states + state) * p.dim + d]);
    }
    out[d] = from_float<T>(sum / total);
  }
  if (lane == 0) p.lse[state] = peak + logf(total);
}

std::tuple<Tensor, Tensor> merge_attention_states(const Tensor& outs, const Tensor& lses) {
  torch::stable::accelerator::DeviceGuard guard(outs.get_device_index());
  MergeAttentionStatesCall call = prepare_merge_attention_states(outs, lses);
  const auto& p = call.params;
  const int64_t blocks = (p.rows * p.heads + kWarpsPerBlock - 1) / kWarpsPerBlock;
  if (blocks > 0) {
    cudaStream_t stream = current_stream(outs.get_device_index());
    const dim3 grid(static_cast<unsigned>(blocks)), block(kWarpsPerBlock * 32);
    if (p.is_bf16) merge_kernel<__nv_bfloat16><<<grid, block, 0, stream>>>(p);
    else merge_kernel<float><<<grid, block, 0, stream>>>(p);
    check_launch("merge_attention_states");
  }
  return {call.out, call.lse};
}

}  // namespace
}  // namespace sparse_cp_ops

STABLE_TORCH_LIBRARY_IMPL(sparse_cp_ops, CUDA, m) {
  m.impl("merge_attention_states", TORCH_BOX(&sparse_cp_ops::merge_attention_states));
}
