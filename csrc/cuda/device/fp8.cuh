// e4m3 and the scales of FP8 tiles on the device: the same bytes as cpu/numeric.h.
// kHardware: cvt instructions (sm_89 and newer); otherwise bit arithmetic, which every device has.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "../../kv_record.h"

namespace sparse_cp_ops {

inline constexpr uint32_t kFp8NanX4 = 0x7F7F7F7Fu;

// Round to nearest even, saturate to +-448; x must not be NaN.
__device__ __forceinline__ uint32_t float_to_e4m3_bits(float x) {
  const uint32_t bits = __float_as_uint(fminf(fabsf(x), kFp8Max));
  // Adding a power of two whose unit is that of the result rounds x to it: 2^-9 below 2^-6, else 3 bits below the
  // first.
  const uint32_t exponent = max(bits & 0x7F800000u, 121u << 23);
  const uint32_t magic = exponent + (20u << 23);
  const uint32_t units = __float_as_uint(__fadd_rn(__uint_as_float(bits), __uint_as_float(magic))) - magic;
  return (units + ((exponent - (121u << 23)) >> 20)) | ((__float_as_uint(x) >> 24) & 0x80u);
}

template <bool kHardware>
__device__ __forceinline__ uint32_t floats_to_e4m3x4(float a, float b, float c, float d) {
#if __CUDA_ARCH__ >= 890
  if constexpr (kHardware) {
    uint16_t low, high;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(b), "f"(a));
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(d), "f"(c));
    return uint32_t{low} | uint32_t{high} << 16;
  } else
#endif
    return float_to_e4m3_bits(a) | float_to_e4m3_bits(b) << 8 | float_to_e4m3_bits(c) << 16 |
           float_to_e4m3_bits(d) << 24;
}

// Two pairs of f16, the first one into the lower bytes.
__device__ __forceinline__ uint32_t f16x4_to_e4m3x4(uint32_t low, uint32_t high) {
  uint32_t bytes = 0;
#if __CUDA_ARCH__ >= 890
  asm("{\n.reg .b16 low, high;\ncvt.rn.satfinite.e4m3x2.f16x2 low, %1;\ncvt.rn.satfinite.e4m3x2.f16x2 high, %2;\n"
      "mov.b32 %0, {low, high};\n}"
      : "=r"(bytes)
      : "r"(low), "r"(high));
#endif
  return bytes;
}

// Four e4m3 bytes to fp32, exact; NaN bytes give NaN.
template <bool kHardware>
__device__ __forceinline__ void e4m3x4_to_floats(uint32_t bytes, float* out) {
#if __CUDA_ARCH__ >= 890
  if constexpr (kHardware) {
    uint32_t low, high;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(low) : "h"(static_cast<uint16_t>(bytes)));
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(high) : "h"(static_cast<uint16_t>(bytes >> 16)));
    const float2 first = __half22float2(reinterpret_cast<const __half2&>(low));
    const float2 second = __half22float2(reinterpret_cast<const __half2&>(high));
    out[0] = first.x, out[1] = first.y, out[2] = second.x, out[3] = second.y;
  } else
#endif
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t byte = bytes >> (8 * i) & 0xFFu, magnitude = byte & 0x7Fu;
      // The exponent field moved into place is 2^120 too small; the product restores denormals as well.
      const float value = __fmul_rn(__uint_as_float((byte & 0x80u) << 24 | magnitude << 20), 0x1p120f);
      out[i] = magnitude == 0x7Fu ? __uint_as_float(0x7FFFFFFFu) : value;
    }
}

// max that keeps NaN.
__device__ __forceinline__ float max_or_nan(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

// The FP8 value that the largest magnitude of a tile becomes.
struct Absmax {
  float value, reciprocal;
  bool shortcut;  // 448, 0.875 and other values with the significand 1.75
};

SCO_HOST_DEVICE constexpr Absmax make_absmax(float value) {
  float significand = value > 0x1p-20f ? value : 1.0f;
  while (significand >= 2.0f) significand *= 0.5f;
  while (significand < 1.0f) significand *= 2.0f;
  return {value, 1.0f / value, significand == 1.75f};
}

// x / absmax, rounded once. The shortcut was compared with division for all 2^23 significands of x.
__device__ __forceinline__ float divide(float x, const Absmax& absmax) {
  if (!absmax.shortcut || !(x < 0x1p120f)) return __fdiv_rn(x, absmax.value);
  const float quotient = __fmul_rn(x, absmax.reciprocal);
  return __fmaf_rn(__fmaf_rn(-quotient, absmax.value, x), absmax.reciprocal, quotient);
}

// How a tile is encoded: value = e4m3(x / scale); scale 1 and bytes 0x7F for a tile with NaN or inf.
struct Fp8Tile {
  float scale;  // as stored
  bool bad;     // bytes 0x7F
  bool large;   // divisor is 2^-64 * scale, and every x has to be multiplied by 2^-64 as well
  float divisor, reciprocal;
};

inline constexpr float kLargeScale = 0x1p64f;  // below, reciprocals and their products are normal numbers

// amax: the largest magnitude of the tile, NaN if it holds one.
__device__ __forceinline__ Fp8Tile fp8_tile(float amax, const Absmax& absmax, bool ue8m0) {
  float scale = divide(fmaxf(amax, kAmaxFloor), absmax);
  if (ue8m0) scale = __uint_as_float((__float_as_uint(scale) + 0x7FFFFFu) & 0x7F800000u);
  const bool bad = !(amax < INFINITY) || !(scale < INFINITY), large = scale >= kLargeScale;
  const float divisor = large ? __fmul_rn(scale, 1.0f / kLargeScale) : scale;
  // 1 / 2^k by its exponent field
  const float reciprocal = ue8m0 ? __uint_as_float((254u << 23) - __float_as_uint(divisor)) : __frcp_rn(divisor);
  return {bad ? 1.0f : scale, bad, large, divisor, reciprocal};
}

// Exact but for values so small that they become +-0 in FP8 anyway.
template <int kCount>
__device__ __forceinline__ void shrink_if_large(float (&x)[kCount], const Fp8Tile& tile) {
  if (!tile.large) return;
#pragma unroll
  for (int i = 0; i < kCount; ++i) x[i] = __fmul_rn(x[i], 1.0f / kLargeScale);
}

// x / divisor up to the byte that it becomes. The correctly rounded reciprocal and one correction give the rounded
// quotient (Markstein); near the ties of e4m3 this was checked against division for all 2^23 significands of a scale.
__device__ __forceinline__ float fp8_quotient(float x, const Fp8Tile& tile) {
  const float quotient = __fmul_rn(x, tile.reciprocal);
  const float corrected = __fmaf_rn(__fmaf_rn(-quotient, tile.divisor, x), tile.reciprocal, quotient);
  return copysignf(corrected, x);  // the correction turns -0 into +0
}

}  // namespace sparse_cp_ops
