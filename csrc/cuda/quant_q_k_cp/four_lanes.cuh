// Four lanes a vector: any head count, RoPE dimensions and strides, and the shortest way for few rows.
//
// A warp transforms eight vectors of 128 values, eight heads of one row or k of eight rows. Lane j of a vector holds
// the values 32 * m + 8 * j + e (m < 4, e < 8) as v[8 * m + e]. So loads are 16 bytes wide, every RoPE pair of 64
// dimensions stays inside a lane in both layouts, and of the seven butterfly strides only 8 and 16 cross lanes.
#pragma once

#include "encode.cuh"

namespace sparse_cp_ops::four_lanes {

inline constexpr int kLanesPerVector = 4;
inline constexpr int kVectorsPerWarp = 32 / kLanesPerVector;
inline constexpr int kValuesPerLane = kIndexDim / kLanesPerVector;

// RoPE of the usual 64 dimensions: the pairs of a lane are (v[i], v[8 + i]) or (v[2i], v[2i + 1]).
__device__ __forceinline__ void rope_in_lane(float* v, const float* cos_sin, bool interleaved, int j) {
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
__device__ __forceinline__ void rope_with_partners(float* v, const uint16_t* x, const float* cos_sin,
                                                   const RopeTable& table, int j) {
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

// A stage between lanes: the lane with the bit holds the second value of each pair.
__device__ __forceinline__ void butterfly_lanes(float (&v)[kValuesPerLane], int lane_bit) {
  const float sign = threadIdx.x & lane_bit ? -1.0f : 1.0f;
#pragma unroll
  for (int i = 0; i < kValuesPerLane; ++i)  // the product with +-1 is exact: one rounding, as in a + b and a - b
    v[i] = __fmaf_rn(v[i], sign, __shfl_xor_sync(0xFFFFFFFFu, v[i], lane_bit));
}

// The vector at x: FP8 bytes in the value order of the lane, and its scale. kFast: 64 RoPE dimensions, aligned rows.
template <bool kHardwareFp8, bool kFast>
__device__ __forceinline__ float quantise(const QuantQKParams& p, const uint16_t* x, int64_t row, const Absmax& absmax,
                                          uint32_t (&bytes)[kValuesPerLane / 4]) {
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
  if (p.hadamard) {
    butterfly(v, 1);
    butterfly(v, 2);
    butterfly(v, 4);
    butterfly_lanes(v, 1);  // stride 8
    butterfly_lanes(v, 2);  // stride 16
    butterfly(v, 8);        // stride 32
    butterfly(v, 16);       // stride 64
  }
  float amax = largest_magnitude(v);
#pragma unroll
  for (int lanes = 1; lanes < kLanesPerVector; lanes *= 2)
    amax = max_or_nan(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, lanes));
  return encode<kHardwareFp8>(v, amax, p, absmax, bytes);
}

// Eight heads of a row, from first_head on.
template <bool kHardwareFp8, bool kFast>
__device__ __forceinline__ void quantise_q(const QuantQKParams& p, const Absmax& q_absmax, int64_t row,
                                           int64_t first_head) {
  const int vector = threadIdx.x % 32 / kLanesPerVector, j = threadIdx.x % kLanesPerVector;
  const bool exists = first_head + vector < p.heads;
  const int64_t head = exists ? first_head + vector : 0;  // all lanes take part in the shuffles
  const auto* x = static_cast<const uint16_t*>(p.q) + row * p.q_row_stride + head * p.q_head_stride;
  const float weight = j == 0 ? load_weight(p, row, head) : 0.0f;
  uint32_t bytes[kValuesPerLane / 4];
  const float scale = quantise<kHardwareFp8, kFast>(p, x, row, q_absmax, bytes);
  if (!exists) return;
  uint8_t* out = p.q_fp8 + (row * p.heads + head) * kIndexDim + 8 * j;
#pragma unroll
  for (int m = 0; m < 4; ++m) *reinterpret_cast<uint2*>(out + 32 * m) = make_uint2(bytes[2 * m], bytes[2 * m + 1]);
  if (j == 0) store_weight(p, row, head, weight, scale);
}

// k of eight rows, from first_row on.
template <bool kHardwareFp8, bool kFast>
__device__ __forceinline__ void quantise_k(const QuantQKParams& p, int64_t first_row) {
  const int vector = threadIdx.x % 32 / kLanesPerVector, j = threadIdx.x % kLanesPerVector;
  const bool exists = first_row + vector < p.rows;
  const int64_t row = exists ? first_row + vector : 0;
  uint32_t bytes[kValuesPerLane / 4];
  const auto* x = static_cast<const uint16_t*>(p.k) + row * p.k_stride;
  const float scale = quantise<kHardwareFp8, kFast>(p, x, row, make_absmax(kFp8Max), bytes);
  if (!exists) return;
  auto* words = reinterpret_cast<uint32_t*>(p.k_records + row * p.record_stride);  // rows are 4-byte aligned
#pragma unroll
  for (int m = 0; m < 4; ++m) {
    words[8 * m + 2 * j] = bytes[2 * m];
    words[8 * m + 2 * j + 1] = bytes[2 * m + 1];
  }
  if (j == 0) words[kIndexDim / 4] = __float_as_uint(scale);
}

inline constexpr int kWarpsPerBlock = 4;

// Warps of q first, those of k behind them.
template <bool kHardwareFp8, bool kFast>
__global__ void __launch_bounds__(kWarpsPerBlock * 32, 6)
    quant_kernel(QuantQKParams p, Absmax q_absmax, uint32_t head_groups, uint32_t q_warps) {
  const uint32_t warp = blockIdx.x * kWarpsPerBlock + threadIdx.x / 32;
  if (warp < q_warps) {
    const uint32_t row = warp / head_groups;
    quantise_q<kHardwareFp8, kFast>(p, q_absmax, row, int64_t{warp - row * head_groups} * kVectorsPerWarp);
  } else {
    quantise_k<kHardwareFp8, kFast>(p, int64_t{warp - q_warps} * kVectorsPerWarp);
  }
}

}  // namespace sparse_cp_ops::four_lanes
