// From a 656-byte record to 16-bit operands, exact for every positive finite fp32 scale.
//
// A scale is split into a power of two and a rest, scale = 2^e * m with 1 <= m < 2, and a record gets one exponent E,
// the largest of its four e minus 6. The latent part becomes f16: e4m3 * 2^(e - E) has four significant bits and at
// most 448 * 2^6 = 28672, and is exact down to e - E = -15; below, the loss is under 2^-25 * 2^E. m is applied in fp32
// to the finished sums of q.k of its 128 dimensions, and to the weights in front of the values; with power-of-two
// scales it is 1. The sums get 2^E back before the RoPE part (bf16) joins them, or the RoPE part is taken times 2^-E.
// The weights of the values keep 2^E: weight' = exp2(logit + E - M'), where M' is the running maximum of logit + E, so
// that they fit f16.
//
// Queries: the latent part becomes f16 times 2^-k with one k a head that moves its largest value just below 2^5.
#pragma once

#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "../device/bf16.cuh"

namespace sparse_cp_ops {

// Exponents below this count as this: 2^-E times the length of a list then stays finite.
inline constexpr int kMinRecordExponent = -110;
inline constexpr int kLatentHeadroom = 6;

// E of a record whose largest scale has the exponent `largest`.
__device__ __forceinline__ int record_exponent(int largest) {
  return max(largest - kLatentHeadroom, kMinRecordExponent);
}

__device__ __forceinline__ float fast_exp2(float x) {  // relative error 2^-22; -inf gives 0
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

struct SplitScale {
  int exponent;  // e
  float rest;    // m
};

__device__ __forceinline__ float power_of_two(int exponent) {  // -126 .. 127
  return __uint_as_float(static_cast<uint32_t>(exponent + 127) << 23);
}

__device__ __forceinline__ SplitScale split_scale(float scale) {
  const int field = max(static_cast<int>(__float_as_uint(scale) >> 23 & 0xff), 1);  // a subnormal scale keeps m < 1
  if (field == 255) return {0, NAN};
  const float rest = scale * __uint_as_float(static_cast<uint32_t>(254 - field) << 23);
  return {field - 127, rest == 0.0f ? 1.0f : rest};  // a zero scale (an unwritten record): ratios of m stay finite
}

// From sm_89 on one instruction turns two e4m3 into f16. Before, a byte shifted into an f16 reads as its value * 2^-8,
// and a NaN (0x7F, 0xFF) as 480 * 2^-8: callers look for it.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
inline constexpr bool kHardwareE4m3 = true;
#else
inline constexpr bool kHardwareE4m3 = false;
#endif
inline constexpr int kE4m3Bias = kHardwareE4m3 ? 0 : 8;

// Two f16 for e4m3x2_to_f16x2 that stand for 2^shift, shift <= 6.
__device__ __forceinline__ uint32_t latent_multiplier(int shift) {
  const int exponent = shift + kE4m3Bias;
  const uint32_t bits = exponent >= -14 ? (exponent + 15) << 10 : exponent >= -24 ? 1u << (exponent + 24) : 0;
  return bits * 0x10001u;
}

__device__ __forceinline__ uint32_t multiply_f16x2(uint32_t a, uint32_t b) {
  const __half2 product = __hmul2(reinterpret_cast<const __half2&>(a), reinterpret_cast<const __half2&>(b));
  return reinterpret_cast<const uint32_t&>(product);
}

// The larger of each half; a number rather than NaN.
__device__ __forceinline__ uint32_t max_f16x2(uint32_t a, uint32_t b) {
  const __half2 larger = __hmax2(reinterpret_cast<const __half2&>(a), reinterpret_cast<const __half2&>(b));
  return reinterpret_cast<const uint32_t&>(larger);
}

__device__ __forceinline__ float2 unpack_f16x2(uint32_t pair) {
  return __half22float2(reinterpret_cast<const __half2&>(pair));
}

__device__ __forceinline__ uint32_t multiply_bf16x2(uint32_t a, uint32_t b) {
  const __nv_bfloat162 product =
      __hmul2(reinterpret_cast<const __nv_bfloat162&>(a), reinterpret_cast<const __nv_bfloat162&>(b));
  return reinterpret_cast<const uint32_t&>(product);
}

__device__ __forceinline__ uint32_t pack_f16x2(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}

// Bytes 0, 1 (high = false) or 2, 3 of `bytes` as a pair of f16, times the power of two behind `multiplier`.
__device__ __forceinline__ uint32_t e4m3x2_to_f16x2(uint32_t bytes, bool high, uint32_t multiplier) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint32_t pair;  // the instruction takes either half of a register
  if (high) {
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.rn.f16x2.e4m3x2 %0, high;\n}"
        : "=r"(pair)
        : "r"(bytes));
  } else {
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.rn.f16x2.e4m3x2 %0, low;\n}" : "=r"(pair) : "r"(bytes));
  }
  return multiply_f16x2(pair, multiplier);
#else
  const uint32_t spread = __byte_perm(bytes, 0, high ? 0x3424 : 0x1404);  // s eeee mmm 00000000, twice
  const uint32_t placed = ((spread >> 1) & 0x3f803f80u) | (spread & 0x80008000u);
  return multiply_f16x2(placed, multiplier);
#endif
}

// Nonzero in some top bit (kNanBits) if one of the four bytes is an e4m3 NaN.
__device__ __forceinline__ uint32_t e4m3_nan_bits(uint32_t bytes) { return (bytes & 0x7f7f7f7fu) + 0x01010101u; }
inline constexpr uint32_t kNanBits = 0x80808080u;

// k of a head whose largest latent magnitude is `peak`. 2^4 leaves room for sums with a RoPE part in units of 2^-110
// (see kMinRecordExponent) and keeps what is 2^-18 of the largest value or more exact.
__device__ __forceinline__ int query_exponent(float peak) {
  return min(max(static_cast<int>(__float_as_uint(peak) >> 23 & 0xff) - 127 - 4, -40), 122);
}

// The largest of `peak` and the magnitudes of eight bf16.
__device__ __forceinline__ float query_peak(const uint4& piece, float peak) {
  for (uint32_t pair : {piece.x, piece.y, piece.z, piece.w}) {
    const float2 v = unpack_bf16x2(pair);
    peak = fmaxf(peak, fmaxf(fabsf(v.x), fabsf(v.y)));
  }
  return peak;
}

// A pair of bf16 times 2^-k: f16 for the latent part, bf16 for the RoPE part.
__device__ __forceinline__ uint32_t scaled_query(uint32_t pair, bool latent, float factor) {
  const float2 v = unpack_bf16x2(pair);
  return latent ? pack_f16x2(v.x * factor, v.y * factor) : float_to_bf16x2(v.x * factor, v.y * factor);
}

}  // namespace sparse_cp_ops
