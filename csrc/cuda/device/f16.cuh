// Pairs of f16 in a register.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

namespace sparse_cp_ops {

__device__ __forceinline__ __half2 as_half2(uint32_t x) { return reinterpret_cast<const __half2&>(x); }
__device__ __forceinline__ uint32_t as_u32(const __half2& x) { return reinterpret_cast<const uint32_t&>(x); }

__device__ __forceinline__ uint32_t add_f16x2(uint32_t a, uint32_t b) {
  return as_u32(__hadd2(as_half2(a), as_half2(b)));
}
__device__ __forceinline__ uint32_t fma_f16x2(uint32_t a, uint32_t b, uint32_t c) {
  return as_u32(__hfma2(as_half2(a), as_half2(b), as_half2(c)));
}
__device__ __forceinline__ uint32_t fast_exp2_f16x2(uint32_t x) {
  asm("ex2.approx.f16x2 %0, %0;" : "+r"(x));
  return x;
}

// Whether one of the pair is above the f16 with these bits.
__device__ __forceinline__ bool above_f16x2(uint32_t x, uint32_t bits) {
  return __hgt2_mask(as_half2(x), as_half2(bits | bits << 16)) != 0;
}

}  // namespace sparse_cp_ops
