// merge_attention_states on CUDA: a block of neighbouring (row, head) states, 16-byte accesses where rows are aligned,
// fp32 sums.
#include <cuda_bf16.h>
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <tuple>

#include "../../ops/merge_attention_states.h"
#include "../arch.h"
#include "../launch.h"
#include "../rows.h"

namespace sparse_cp_ops {
namespace {

constexpr int kThreads = 128;
constexpr int kBlocksPerMultiprocessor = 8;       // 1024 threads of 64 registers
constexpr int kMostStates = 16;                   // of a block: they share one trip to the lses
constexpr int kMostWeights = 2048;                // of a block, in shared memory
constexpr int kPacks = 2;                         // memory accesses of a thread and part at a time
constexpr int kPartBatch = 2;                     // parts loaded together
constexpr float kUnused = -1.0f;                  // weight of a part with lse -inf: whatever its out holds is not read
constexpr int64_t kMostItems = int64_t{1} << 30;  // values or vectors of a block: indices have 32 bits

__device__ float to_float(float x) { return x; }
__device__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ void from_float(float x, float& out) { out = x; }
__device__ void from_float(float x, __nv_bfloat16& out) { out = __float2bfloat16_rn(x); }

template <class T, int kSize>
struct alignas(sizeof(T) * kSize) Pack {
  T values[kSize];
};

__device__ float state_weight(float lse, float peak) { return lse == peak ? 1.0f : expf(lse - peak); }

// A block takes neighbouring states: first a thread each finds the weights of its parts, then all threads go through
// the values, which are contiguous in each part. A NaN among the lses makes the sum of weights NaN, and with it lse and
// out. Without any lse but -inf, weights of 1 meet no values.
template <class T, int kSize>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    merge_kernel(const __grid_constant__ MergeAttentionStatesParams p, int states_per_block) {
  using Values = Pack<T, kSize>;
  __shared__ float weights[kMostWeights], inverses[kMostStates];  // part by part, states_per_block each
  const int64_t states = p.rows * p.heads, first_state = static_cast<int64_t>(blockIdx.x) * states_per_block;
  const auto count = static_cast<uint32_t>(min(int64_t{states_per_block}, states - first_state));
  const int parts = static_cast<int>(p.parts);
  if (threadIdx.x < count) {
    const float* lses = p.lses + first_state + threadIdx.x;
    float* own = weights + threadIdx.x;
    float peak = -INFINITY, total = 0.0f;
#pragma unroll 4
    for (int part = 0; part < parts; ++part) {
      const float lse = lses[part * states];
      own[part * states_per_block] = lse;
      peak = fmaxf(peak, lse);
    }
#pragma unroll 4
    for (int part = 0; part < parts; ++part) {
      const float lse = own[part * states_per_block], weight = state_weight(lse, peak);
      own[part * states_per_block] = lse == -INFINITY ? kUnused : weight;
      total += weight;
    }
    p.lse[first_state + threadIdx.x] = peak + logf(total);
    inverses[threadIdx.x] = total == 0.0f ? 0.0f : 1.0f / total;  // 0 without parts
  }
  __syncthreads();

  const auto packs = static_cast<uint32_t>(p.dim / kSize), items = count * packs;
  const int64_t part_packs = states * packs;
  const Values* block_source = static_cast<const Values*>(p.outs) + first_state * packs;
  Values* block_out = static_cast<Values*>(p.out) + first_state * packs;
  for (uint32_t first = threadIdx.x; first < items; first += kThreads * kPacks) {
    float sums[kPacks][kSize] = {};
    uint32_t state[kPacks];
#pragma unroll
    for (int i = 0; i < kPacks; ++i) state[i] = min(first + kThreads * i, items - 1) / packs;
    const Values* source = block_source + first;
    for (int part = 0; part < parts; part += kPartBatch) {
      float weight[kPartBatch][kPacks];
      Values values[kPartBatch][kPacks];
#pragma unroll
      for (int j = 0; j < kPartBatch; ++j, source += part_packs)
#pragma unroll
        for (int i = 0; i < kPacks; ++i) {
          weight[j][i] = part + j < parts ? weights[(part + j) * states_per_block + state[i]] : kUnused;
          values[j][i] = {};
          if (weight[j][i] != kUnused && first + kThreads * i < items) values[j][i] = source[kThreads * i];
        }
#pragma unroll
      for (int j = 0; j < kPartBatch; ++j)
#pragma unroll
        for (int i = 0; i < kPacks; ++i)
#pragma unroll
          for (int k = 0; k < kSize; ++k) sums[i][k] += weight[j][i] * to_float(values[j][i].values[k]);
    }
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      if (first + kThreads * i >= items) continue;
      Values values;
#pragma unroll
      for (int k = 0; k < kSize; ++k) from_float(sums[i][k] * inverses[state[i]], values.values[k]);
      block_out[first + kThreads * i] = values;
    }
  }
}

template <class T, int kSize>
void launch_kernel(const MergeAttentionStatesParams& p, int multiprocessors, cudaStream_t stream) {
  // As few states a block as fill the device once, so that one row takes a short way.
  const int64_t states = p.rows * p.heads, resident = int64_t{multiprocessors} * kBlocksPerMultiprocessor;
  const int64_t most = std::min<int64_t>(
      {kMostStates, kMostWeights / std::max<int64_t>(1, p.parts), kMostItems / std::max<int64_t>(1, p.dim)});
  const int64_t states_per_block = std::clamp<int64_t>((states + resident - 1) / resident, 1, most);
  merge_kernel<T, kSize>
      <<<grid_size(states, states_per_block), kThreads, 0, stream>>>(p, static_cast<int>(states_per_block));
}

template <class T>
void launch_merge(const MergeAttentionStatesParams& p, int multiprocessors, cudaStream_t stream) {
  constexpr int kSize = 16 / sizeof(T);
  const auto aligned = [](const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; };
  if (p.dim % kSize == 0 && aligned(p.outs) && aligned(p.out)) launch_kernel<T, kSize>(p, multiprocessors, stream);
  else launch_kernel<T, 1>(p, multiprocessors, stream);
  check_launch("merge_attention_states");
}

std::tuple<Tensor, Tensor> merge_attention_states(const Tensor& outs, const Tensor& lses) {
  MergeAttentionStatesCall call = prepare_merge_attention_states(outs, lses);
  const auto& p = call.params;
  const int32_t device = outs.get_device_index();
  torch::stable::accelerator::DeviceGuard guard(device);
  SCO_CHECK(p.parts <= kMostWeights, "outs: expected at most ", kMostWeights, " parts, got shape ", shape_string(outs));
  SCO_CHECK(p.dim <= kMostItems, "outs: expected at most 2^30 values a state, got shape ", shape_string(outs));
  if (p.rows * p.heads > 0) {
    const int multiprocessors = device_arch(device).multiprocessors;
    cudaStream_t stream = current_stream(device);
    if (p.is_bf16) launch_merge<__nv_bfloat16>(p, multiprocessors, stream);
    else launch_merge<float>(p, multiprocessors, stream);
  }
  return {call.out, call.lse};
}

}  // namespace
}  // namespace sparse_cp_ops

STABLE_TORCH_LIBRARY_IMPL(sparse_cp_ops, CUDA, m) {
  m.impl("merge_attention_states", TORCH_BOX(&sparse_cp_ops::merge_attention_states));
}
