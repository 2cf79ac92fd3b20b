// merge_attention_states on CUDA: one warp a (row, head), 16-byte accesses where rows are aligned, fp32 sums.
#include <cuda_bf16.h>
#include <torch/csrc/stable/library.h>

#include <tuple>

#include "../../ops/merge_attention_states.h"
#include "../launch.h"

namespace sparse_cp_ops {
namespace {

constexpr int kWarpsPerBlock = 4;
constexpr int kBlocksPerMultiprocessor = 8;  // 32 warps hide the two trips to memory that follow one another
constexpr int kPartBatch = 2;                // parts loaded together
constexpr int kPacks = 2;                    // memory accesses of a lane and part at a time

__device__ float to_float(float x) { return x; }
__device__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ void from_float(float x, float& out) { out = x; }
__device__ void from_float(float x, __nv_bfloat16& out) { out = __float2bfloat16_rn(x); }

template <class T, int kSize>
struct alignas(sizeof(T) * kSize) Pack {
  T values[kSize];
};

__device__ float state_weight(float lse, float peak) { return lse == peak ? 1.0f : expf(lse - peak); }

// One state: [parts] of outs and lses, `states` apart.
template <class T, int kSize>
__global__ void __launch_bounds__(kWarpsPerBlock * 32, kBlocksPerMultiprocessor)
    merge_kernel(const __grid_constant__ MergeAttentionStatesParams p) {
  using Values = Pack<T, kSize>;
  const int64_t states = p.rows * p.heads;
  const int64_t state = static_cast<int64_t>(blockIdx.x) * kWarpsPerBlock + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (state >= states) return;

  float peak = -INFINITY;
  bool has_nan = false;
#pragma unroll 4
  for (int64_t part = 0; part < p.parts; ++part) {
    const float lse = p.lses[part * states + state];
    has_nan |= isnan(lse);
    peak = fmaxf(peak, lse);
  }
  if (has_nan || peak == -INFINITY) {
    T* out = static_cast<T*>(p.out) + state * p.dim;
    for (int64_t d = lane; d < p.dim; d += 32) from_float(has_nan ? NAN : 0.0f, out[d]);
    if (lane == 0) p.lse[state] = has_nan ? NAN : -INFINITY;
    return;
  }

  float total = 0.0f;
#pragma unroll 4
  for (int64_t part = 0; part < p.parts; ++part) total += state_weight(p.lses[part * states + state], peak);
  if (lane == 0) p.lse[state] = peak + logf(total);
  const float inverse = 1.0f / total;

  const int packs = static_cast<int>(p.dim / kSize);
  const int64_t part_packs = states * packs;
  for (int first = lane; first < packs; first += 32 * kPacks) {
    float sums[kPacks][kSize] = {};
    const Values* source = static_cast<const Values*>(p.outs) + state * packs + first;
    for (int64_t part = 0; part < p.parts; part += kPartBatch) {
      float weights[kPartBatch];
      Values values[kPartBatch][kPacks];
#pragma unroll
      for (int j = 0; j < kPartBatch; ++j, source += part_packs) {
        const float lse = part + j < p.parts ? p.lses[(part + j) * states + state] : -INFINITY;
        weights[j] = state_weight(lse, peak);
        const bool used = lse != -INFINITY;  // else it weighs nothing, whatever its out holds
#pragma unroll
        for (int i = 0; i < kPacks; ++i) {
          values[j][i] = {};
          if (used && first + 32 * i < packs) values[j][i] = source[32 * i];
        }
      }
#pragma unroll
      for (int j = 0; j < kPartBatch; ++j)
#pragma unroll
        for (int i = 0; i < kPacks; ++i)
#pragma unroll
          for (int k = 0; k < kSize; ++k) sums[i][k] += weights[j] * to_float(values[j][i].values[k]);
    }
    Values* out = static_cast<Values*>(p.out) + state * packs + first;
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      if (first + 32 * i >= packs) continue;
      Values values;
#pragma unroll
      for (int k = 0; k < kSize; ++k) from_float(sums[i][k] * inverse, values.values[k]);
      out[32 * i] = values;
    }
  }
}

template <class T>
void launch_merge(const MergeAttentionStatesParams& p, cudaStream_t stream) {
  constexpr int kSize = 16 / sizeof(T);
  const auto aligned = [](const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; };
  const dim3 grid(static_cast<unsigned>((p.rows * p.heads + kWarpsPerBlock - 1) / kWarpsPerBlock));
  const dim3 block(kWarpsPerBlock * 32);
  if (p.dim % kSize == 0 && aligned(p.outs) && aligned(p.out)) merge_kernel<T, kSize><<<grid, block, 0, stream>>>(p);
  else merge_kernel<T, 1><<<grid, block, 0, stream>>>(p);
  check_launch("merge_attention_states");
}

std::tuple<Tensor, Tensor> merge_attention_states(const Tensor& outs, const Tensor& lses) {
  MergeAttentionStatesCall call = prepare_merge_attention_states(outs, lses);
  const auto& p = call.params;
  torch::stable::accelerator::DeviceGuard guard(outs.get_device_index());
  if (p.rows * p.heads > 0) {
    cudaStream_t stream = current_stream(outs.get_device_index());
    if (p.is_bf16) launch_merge<__nv_bfloat16>(p, stream);
    else launch_merge<float>(p, stream);
  }
  return {call.out, call.lse};
}

}  // namespace
}  // namespace sparse_cp_ops

STABLE_TORCH_LIBRARY_IMPL(sparse_cp_ops, CUDA, m) {
  m.impl("merge_attention_states", TORCH_BOX(&sparse_cp_ops::merge_attention_states));
}
