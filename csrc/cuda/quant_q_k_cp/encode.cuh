// What both kernels of quant_q_k_cp share: grid, butterflies in registers, and the way from transformed values to
// bytes.
#pragma once

#include "../../ops/quant_q_k_cp.h"
#include "../device/bf16.cuh"
#include "../device/fp8.cuh"
#include "../device/rope.cuh"

namespace sparse_cp_ops {

// One stage of the Hadamard transform on values that a thread holds.
template <int kCount>
__device__ __forceinline__ void butterfly(float (&v)[kCount], int stride) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (i & stride) continue;
    const float a = v[i], b = v[i + stride];
    v[i] = __fadd_rn(a, b);
    v[i + stride] = __fsub_rn(a, b);
  }
}

template <int kCount>
__device__ __forceinline__ float largest_magnitude(const float (&v)[kCount]) {
  float amax = fabsf(v[0]);
#pragma unroll
  for (int i = 1; i < kCount; ++i) amax = max_or_nan(amax, fabsf(v[i]));
  return amax;
}

// FP8 bytes of values of one vector, four a word, and the vector's scale. `v` lacks the factor 128^-0.5 of the Hadamard
// transform; amax is the largest magnitude of the whole vector without it.
template <bool kHardwareFp8, int kCount>
__device__ __forceinline__ float encode(float (&v)[kCount], float amax, const QuantQKParams& p, const Absmax& absmax,
                                        uint32_t (&bytes)[kCount / 4]) {
  float factor = p.hadamard ? kHadamardScale : 1.0f;
  const Fp8Tile tile = fp8_tile(__fmul_rn(amax, factor), absmax, p.ue8m0);  // rounding keeps the order of magnitudes
  if (kHardwareFp8 && tile.bad) factor = NAN;                               // converts to 0x7F
  shrink_if_large(v, tile);
  if (p.ue8m0) {
    // A power of two moves into the factor: the product is rounded once, like v * factor, and scaled exactly.
    const float scaled_factor = __fmul_rn(factor, tile.reciprocal);
#pragma unroll
    for (int i = 0; i < kCount; ++i) v[i] = __fmul_rn(v[i], scaled_factor);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) v[i] = fp8_quotient(__fmul_rn(v[i], factor), tile);
  }
#pragma unroll
  for (int i = 0; i < kCount / 4; ++i)
    bytes[i] = floats_to_e4m3x4<kHardwareFp8>(v[4 * i], v[4 * i + 1], v[4 * i + 2], v[4 * i + 3]);
  if (!kHardwareFp8 && tile.bad) {
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i) bytes[i] = kFp8NanX4;
  }
  return tile.scale;
}

// A weight as it lies in memory: converting it here would wait for it.
__device__ __forceinline__ uint32_t load_weight_bits(const QuantQKParams& p, int64_t row, int64_t head) {
  const int64_t i = row * p.weights_stride + head;
  return p.weights_bf16 ? __ldg(static_cast<const uint16_t*>(p.weights) + i)
                        : __ldg(static_cast<const uint32_t*>(p.weights) + i);
}

__device__ __forceinline__ void store_weight(const QuantQKParams& p, int64_t row, int64_t head, uint32_t weight_bits,
                                             float scale) {
  const float weight = __uint_as_float(p.weights_bf16 ? weight_bits << 16 : weight_bits);
  p.q_weights[row * p.heads + head] = __fmul_rn(__fmul_rn(weight, scale), p.weight_scale);
}

}  // namespace sparse_cp_ops
