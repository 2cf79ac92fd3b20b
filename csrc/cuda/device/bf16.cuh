// bf16 rows: wide loads, and conversions that make every NaN the same.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace sparse_cp_ops {

__device__ __forceinline__ float bf16_low(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float bf16_high(uint32_t pair) { return __uint_as_float(pair & 0xFFFF0000u); }
__device__ __forceinline__ float2 unpack_bf16x2(uint32_t pair) { return make_float2(bf16_low(pair), bf16_high(pair)); }
__device__ __forceinline__ float bf16_to_float(uint16_t bits) { return __uint_as_float(uint32_t{bits} << 16); }

// Round to nearest even; NaN becomes 0x7FFF.
__device__ __forceinline__ uint32_t float_to_bf16x2(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}
__device__ __forceinline__ uint16_t float_to_bf16(float x) { return __bfloat16_as_ushort(__float2bfloat16_rn(x)); }

// Eight bf16 values of memory that the kernel does not write; `vector` if the address is 16-byte aligned.
__device__ __forceinline__ uint4 load_bf16x8(const uint16_t* x, bool vector) {
  if (vector) return __ldg(reinterpret_cast<const uint4*>(x));
  uint32_t v[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) v[i] = __ldg(x + 2 * i) | uint32_t{__ldg(x + 2 * i + 1)} << 16;
  return make_uint4(v[0], v[1], v[2], v[3]);
}

__device__ __forceinline__ void unpack_bf16x8(const uint4& packed, float* x) {
  const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[2 * i] = bf16_low(words[i]);
    x[2 * i + 1] = bf16_high(words[i]);
  }
}

__device__ __forceinline__ uint4 pack_bf16x8(const float* x) {
  return make_uint4(float_to_bf16x2(x[0], x[1]), float_to_bf16x2(x[2], x[3]), float_to_bf16x2(x[4], x[5]),
                    float_to_bf16x2(x[6], x[7]));
}

}  // namespace sparse_cp_ops
