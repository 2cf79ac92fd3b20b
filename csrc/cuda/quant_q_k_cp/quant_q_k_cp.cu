// quant_q_k_cp on CUDA: RoPE, Hadamard and FP8 of q and k in registers, one read and one write of every byte.
//
// A warp transforms eight vectors of 128 values, eight heads of one row or k of eight rows. Four lanes share a vector:
// lane j holds the values 32 * m + 8 * j + e (m < 4, e < 8) as v[8 * m + e]. So loads are 16 bytes wide, every RoPE
// pair of 64 dimensions stays inside a lane in both layouts, and of the seven butterfly strides only 8 and 16 cross
// lanes: 8 shuffles a vector and warp instead of 20 with a lane for every four values.
#include "../../ops/quant_q_k_cp.h"

#include <torch/csrc/stable/library.h>

#include <tuple>

#include "../arch.h"
#include "../device/bf16.cuh"
#include "../device/fp8.cuh"
#include "../device/rope.cuh"
#include "../launch.h"
#include "../rows.h"
#include "../value_checks.h"

namespace sparse_cp_ops {
namespace {

constexpr int kWarpsPerBlock = 4;
constexpr int kBlocksPerMultiprocessor = 7;  // 72 registers a thread: no spills, 28 warps
constexpr int kLanesPerVector = 4;
constexpr int kVectorsPerWarp = 32 / kLanesPerVector;
constexpr int kValuesPerLane = kIndexDim / kLanesPerVector;

struct QuantGrid {
  uint32_t head_groups;  // of a row
  uint32_t q_warps;      // the warps behind them quantise k
};

// RoPE of the usual 64 dimensions: the pairs of a lane are (v[i], v[8 + i]) or (v[2i], v[2i + 1]).
__device__ void rope_in_lane(float* v, const float* cos_sin, bool interleaved, int j) {
  const int first = interleaved ? 4 * j : 8 * j, second = interleaved ? 16 + first : 4 + first;
  float cosines[8], sines[8];
  load_cos_sin4(cos_sin, first, cosines);
  load_cos_sin4(cos_sin, second, cosines + 4);
  load_cos_sin4(cos_sin, 32 + first, sines);
  load_cos_sin4(cos_sin, 32 + second, sines + 4);
  if (interleaved) {
#pragma unroll
    for (int i = 0; i < 8; ++i) rotate(v[2 * i], v[2 * i + 1], cosines[i], sines[i]);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) rotate(v[i], v[8 + i], cosines[i], sines[i]);
  }
}

// RoPE of any dimensions: each value's partner is read again.
__device__ void rope_with_partners(float* v, const uint16_t* x, const float* cos_sin, const RopeTable& table, int j) {
  const int dim = static_cast<int>(table.dim), half = dim / 2;
#pragma unroll
  for (int i = 0; i < kValuesPerLane; ++i) {
    const int d = i / 8 * 32 + j * 8 + i % 8;
    if (d >= dim) continue;
    const bool is_first = table.interleaved ? d % 2 == 0 : d < half;
    const int partner = table.interleaved ? d ^ 1 : (is_first ? d + half : d - half);
    const int pair = table.interleaved ? d / 2 : (is_first ? d : partner);
    float other = bf16_to_float(__ldg(x + partner));
    const float cosine = load_cos_sin(cos_sin, pair), sine = load_cos_sin(cos_sin, half + pair);
    if (is_first) rotate(v[i], other, cosine, sine);
    else rotate(other, v[i], cosine, sine);
  }
}

// One butterfly between lanes: the lane with the bit holds the second value of each pair.
__device__ void butterfly_lanes(float* v, int lane_bit) {
  const float sign = threadIdx.x & lane_bit ? -1.0f : 1.0f;
#pragma unroll
  for (int i = 0; i < kValuesPerLane; ++i)  // the product with +-1 is exact: one rounding, as in a + b and a - b
    v[i] = __fmaf_rn(v[i], sign, __shfl_xor_sync(0xFFFFFFFFu, v[i], lane_bit));
}

__device__ void butterfly_registers(float* v, int stride) {
#pragma unroll
  for (int i = 0; i < kValuesPerLane; ++i) {
    if (i & stride) continue;
    const float a = v[i], b = v[i + stride];
    v[i] = __fadd_rn(a, b);
    v[i + stride] = __fsub_rn(a, b);
  }
}

__device__ void hadamard_without_factor(float* v) {
  butterfly_registers(v, 1);
  butterfly_registers(v, 2);
  butterfly_registers(v, 4);
  butterfly_lanes(v, 1);       // stride 8
  butterfly_lanes(v, 2);       // stride 16
  butterfly_registers(v, 8);   // stride 32
  butterfly_registers(v, 16);  // stride 64
}

// The vector at x as FP8 bytes (8 words: value order of the lane) and its scale. kFast: 64 RoPE dimensions and aligned
// rows; otherwise any dimensions and strides.
template <bool kHardwareFp8, bool kFast>
__device__ float quantise(const QuantQKParams& p, const uint16_t* x, int64_t row, float absmax, uint32_t* bytes) {
  const int j = threadIdx.x % kLanesPerVector;
  float v[kValuesPerLane];
  uint4 packed[4];
#pragma unroll
  for (int m = 0; m < 4; ++m) packed[m] = load_bf16x8(x + 32 * m + 8 * j, kFast);
  const float* cos_sin = cos_sin_row(p.table, row);
#pragma unroll
  for (int m = 0; m < 4; ++m) unpack_bf16x8(packed[m], v + 8 * m);
  if constexpr (kFast) rope_in_lane(v, cos_sin, p.table.interleaved, j);
  else rope_with_partners(v, x, cos_sin, p.table, j);
  if (p.hadamard) hadamard_without_factor(v);

  float amax = fabsf(v[0]);
#pragma unroll
  for (int i = 1; i < kValuesPerLane; ++i) amax = max_or_nan(amax, fabsf(v[i]));
#pragma unroll
  for (int lanes = 1; lanes < kLanesPerVector; lanes *= 2)
    amax = max_or_nan(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, lanes));
  const float factor = p.hadamard ? kHadamardScale : 1.0f;
  const Fp8Tile tile = fp8_tile(__fmul_rn(amax, factor), absmax, p.ue8m0);  // rounding keeps the order of magnitudes
  shrink_if_large(v, tile);
  if (p.ue8m0) {
    // A power of two moves into the factor: the product is rounded once, like v * factor, and scaled exactly.
    const float scaled_factor = __fmul_rn(factor, tile.reciprocal);
#pragma unroll
    for (int i = 0; i < kValuesPerLane; ++i) v[i] = __fmul_rn(v[i], scaled_factor);
  } else {
#pragma unroll
    for (int i = 0; i < kValuesPerLane; ++i) v[i] = fp8_quotient(__fmul_rn(v[i], factor), tile);
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint32_t word = floats_to_e4m3x4<kHardwareFp8>(v[4 * i], v[4 * i + 1], v[4 * i + 2], v[4 * i + 3]);
    bytes[i] = tile.bad ? kFp8NanX4 : word;
  }
  return tile.scale;
}

__device__ float load_weight(const QuantQKParams& p, int64_t row, int64_t head) {
  const int64_t i = row * p.weights_stride + head;
  return p.weights_bf16 ? bf16_to_float(__ldg(static_cast<const uint16_t*>(p.weights) + i))
                        : __ldg(static_cast<const float*>(p.weights) + i);
}

__device__ void store_q(const QuantQKParams& p, int64_t row, int64_t head, const uint32_t* bytes, float weight,
                        float scale) {
  const int j = threadIdx.x % kLanesPerVector;
  const int64_t i = row * p.heads + head;
#pragma unroll
  for (int m = 0; m < 4; ++m)
    *reinterpret_cast<uint2*>(p.q_fp8 + i * kIndexDim + 32 * m + 8 * j) = make_uint2(bytes[2 * m], bytes[2 * m + 1]);
  if (j == 0) p.q_weights[i] = __fmul_rn(__fmul_rn(weight, scale), p.weight_scale);
}

__device__ void store_k(const QuantQKParams& p, int64_t row, const uint32_t* bytes, float scale) {
  const int j = threadIdx.x % kLanesPerVector;
  auto* record = reinterpret_cast<uint32_t*>(p.k_records + row * p.record_stride);
#pragma unroll
  for (int m = 0; m < 4; ++m) {
    record[8 * m + 2 * j] = bytes[2 * m];
    record[8 * m + 2 * j + 1] = bytes[2 * m + 1];
  }
  if (j == 0) record[kIndexDim / 4] = __float_as_uint(scale);
}

template <bool kHardwareFp8, bool kFast>
__global__ void __launch_bounds__(kWarpsPerBlock * 32, kBlocksPerMultiprocessor)
    quant_kernel(QuantQKParams p, QuantGrid grid) {
  const uint32_t warp = blockIdx.x * kWarpsPerBlock + threadIdx.x / 32;
  const int vector = threadIdx.x % 32 / kLanesPerVector;
  const bool is_q = warp < grid.q_warps;
  int64_t row = is_q ? warp / grid.head_groups : int64_t{warp - grid.q_warps} * kVectorsPerWarp + vector;
  int64_t head = is_q ? int64_t{warp % grid.head_groups} * kVectorsPerWarp + vector : 0;
  const bool exists = is_q ? head < p.heads : row < p.rows;
  if (!exists) row = head = 0;  // all lanes take part in the shuffles
  const auto* x = is_q ? static_cast<const uint16_t*>(p.q) + row * p.q_row_stride + head * p.q_head_stride
                       : static_cast<const uint16_t*>(p.k) + row * p.k_stride;
  const float weight = is_q ? load_weight(p, row, head) : 0.0f;
  uint32_t bytes[8];
  const float scale = quantise<kHardwareFp8, kFast>(p, x, row, is_q ? p.q_absmax : kFp8Max, bytes);
  if (!exists) return;
  if (is_q) store_q(p, row, head, bytes, weight, scale);
  else store_k(p, row, bytes, scale);
}

std::tuple<Tensor, Tensor> quant_q_k_cp(const Tensor& q, const Tensor& k, const Tensor& weights,
                                        const Tensor& positions, const Tensor& cos_sin_cache, Tensor k_records,
                                        bool interleaved, bool hadamard, double weight_scale, std::string scale_format,
                                        double q_absmax) {
  const int32_t device = q.get_device_index();
  torch::stable::accelerator::DeviceGuard guard(device);
  const QuantQKCall call = prepare_quant_q_k_cp(q, k, weights, positions, cos_sin_cache, k_records, interleaved,
                                                hadamard, weight_scale, scale_format, q_absmax);
  const QuantQKParams& p = call.params;
  cudaStream_t stream = current_stream(device);
  if (value_checks_possible(stream)) check_rope_positions(positions, cos_sin_cache);
  if (p.rows == 0) return {call.q_fp8, call.q_weights};

  const int64_t head_groups = (p.heads + kVectorsPerWarp - 1) / kVectorsPerWarp;
  const int64_t q_warps = p.rows * head_groups, k_warps = (p.rows + kVectorsPerWarp - 1) / kVectorsPerWarp;
  SCO_CHECK(q_warps + k_warps <= std::numeric_limits<int32_t>::max(), "q: expected at most 2^34 vectors, got shape ",
            shape_string(q));
  const QuantGrid grid{static_cast<uint32_t>(head_groups), static_cast<uint32_t>(q_warps)};
  const unsigned blocks = grid_size(q_warps + k_warps, kWarpsPerBlock);
  const bool fast =
      p.table.dim == 64 && has_vector_rows(q, 2) && has_vector_rows(k, 2) && has_vector_rows(cos_sin_cache, 4);
  const bool hardware = device_arch(device).kernels == KernelSet::kSm90;
  const auto kernel = hardware ? (fast ? quant_kernel<true, true> : quant_kernel<true, false>)
                               : (fast ? quant_kernel<false, true> : quant_kernel<false, false>);
  kernel<<<blocks, kWarpsPerBlock * 32, 0, stream>>>(p, grid);
  check_launch("quant_q_k_cp");
  return {call.q_fp8, call.q_weights};
}

}  // namespace
}  // namespace sparse_cp_ops

STABLE_TORCH_LIBRARY_IMPL(sparse_cp_ops, CUDA, m) { m.impl("quant_q_k_cp", TORCH_BOX(&sparse_cp_ops::quant_q_k_cp)); }
