// The kernel for any shape: four lanes a vector, loads and stores without a stop in shared memory.
#pragma once

#include "lanes.cuh"

namespace sparse_cp_ops::direct {

using Lanes = Layout<4>;

// RoPE of any dimensions: each value's partner is read again.
__device__ __forceinline__ void rope_with_partners(float (&v)[Lanes::kValues], const uint16_t* x, const float* cos_sin,
                                                   const RopeTable& table) {
  const int rope_dim = static_cast<int>(table.dim), half = rope_dim / 2;
#pragma unroll
  for (int i = 0; i < Lanes::kValues; ++i) {
    const int d = Lanes::dim(i / 8) + i % 8;
    if (d >= rope_dim) continue;
    const bool is_first = table.interleaved ? d % 2 == 0 : d < half;
    const int partner = table.interleaved ? d ^ 1 : (is_first ? d + half : d - half);
    const int pair = table.interleaved ? d / 2 : (is_first ? d : partner);
    float other = bf16_to_float(__ldg(x + partner));
    const float cosine = load_cos_sin(cos_sin, pair), sine = load_cos_sin(cos_sin, half + pair);
    if (is_first) rotate(v[i], other, cosine, sine);
    else rotate(other, v[i], cosine, sine);
  }
}

// The vector at x: FP8 bytes in the value order of the lane, and its scale. kFast: 64 RoPE dimensions, aligned rows.
template <bool kHardwareFp8, bool kFast>
__device__ __forceinline__ float quantise(const QuantQKParams& p, const uint16_t* x, int64_t row, const Absmax& absmax,
                                          uint32_t (&bytes)[Lanes::kValues / 4]) {
  float v[Lanes::kValues];
  uint4 packed[Lanes::kPieces];
#pragma unroll
  for (int m = 0; m < Lanes::kPieces; ++m) packed[m] = load_bf16x8(x + Lanes::dim(m), kFast);
  const float* cos_sin = cos_sin_row(p.table, row);
#pragma unroll
  for (int m = 0; m < Lanes::kPieces; ++m) unpack_bf16x8(packed[m], v + 8 * m);
  if constexpr (kFast)
    rope_in_lane<4>(v, p.table.interleaved, [&](int i, float* out) { load_cos_sin4(cos_sin, i, out); });
  else rope_with_partners(v, x, cos_sin, p.table);
  const float amax = vector_amax<4>(p.hadamard ? hadamard_transform<4>(v) : largest_magnitude(v));
  return encode<kHardwareFp8>(v, amax, p, absmax, bytes);
}

// Eight heads of a row, from first_head on.
template <bool kHardwareFp8, bool kFast>
__device__ __forceinline__ void quantise_q(const QuantQKParams& p, const Absmax& q_absmax, int64_t row,
                                           int64_t first_head) {
  const bool exists = first_head + Lanes::vector() < p.heads;
  const int64_t head = exists ? first_head + Lanes::vector() : 0;  // all lanes take part in the shuffles
  const auto* x = static_cast<const uint16_t*>(p.q) + row * p.q_row_stride + head * p.q_head_stride;
  const uint32_t weight = Lanes::lane() == 0 ? load_weight_bits(p, row, head) : 0;
  uint32_t bytes[Lanes::kValues / 4];
  const float scale = quantise<kHardwareFp8, kFast>(p, x, row, q_absmax, bytes);
  if (!exists) return;
  uint8_t* out = p.q_fp8 + (row * p.heads + head) * kIndexDim;
#pragma unroll
  for (int m = 0; m < Lanes::kPieces; ++m)
    *reinterpret_cast<uint2*>(out + Lanes::dim(m)) = make_uint2(bytes[2 * m], bytes[2 * m + 1]);
  if (Lanes::lane() == 0) store_weight(p, row, head, weight, scale);
}

// k of eight rows, from first_row on.
template <bool kHardwareFp8, bool kFast>
__device__ __forceinline__ void quantise_k(const QuantQKParams& p, int64_t first_row) {
  const bool exists = first_row + Lanes::vector() < p.rows;
  const int64_t row = exists ? first_row + Lanes::vector() : 0;
  uint32_t bytes[Lanes::kValues / 4];
  const auto* x = static_cast<const uint16_t*>(p.k) + row * p.k_stride;
  const float scale = quantise<kHardwareFp8, kFast>(p, x, row, make_absmax(kFp8Max), bytes);
  if (!exists) return;
  auto* words = reinterpret_cast<uint32_t*>(p.k_records + row * p.record_stride);  // rows are 4-byte aligned
#pragma unroll
  for (int m = 0; m < Lanes::kPieces; ++m) {
    words[Lanes::dim(m) / 4] = bytes[2 * m];
    words[Lanes::dim(m) / 4 + 1] = bytes[2 * m + 1];
  }
  if (Lanes::lane() == 0) words[kIndexDim / 4] = __float_as_uint(scale);
}

inline constexpr int kWarpsPerBlock = 4;

// Warps of q first, those of k behind them.
template <bool kHardwareFp8, bool kFast>
__global__ void __launch_bounds__(kWarpsPerBlock * 32, 6)
    quant_kernel(QuantQKParams p, Absmax q_absmax, uint32_t head_groups, uint32_t q_warps) {
  const uint32_t warp = blockIdx.x * kWarpsPerBlock + threadIdx.x / 32;
  if (warp < q_warps) {
    const uint32_t row = warp / head_groups;
    quantise_q<kHardwareFp8, kFast>(p, q_absmax, row, int64_t{warp - row * head_groups} * Lanes::kVectors);
  } else {
    quantise_k<kHardwareFp8, kFast>(p, int64_t{warp - q_warps} * Lanes::kVectors);
  }
}

}  // namespace sparse_cp_ops::direct
