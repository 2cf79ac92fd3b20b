// FP8 warpgroup products whose accumulators are named PTX registers.
//
// NOTES: as C++ variables the accumulators made ptxas serialise the products (C7515). Named registers, declared once a
// kernel by SCO_DECLARE_ACCUMULATORS, are read by index instead.
#pragma once

#include <utility>

#include "../device/bulk_copy.cuh"
#include "../device/mma_sync.cuh"
#include "../device/sm90.cuh"
#include "../device/wgmma.cuh"

namespace sparse_cp_ops {

inline constexpr int kOperandRow = 128 >> 4;  // descriptors count 16 bytes: one row of an operand

// Must be expanded exactly once in a kernel.
#define SCO_DECLARE_ACCUMULATORS() asm volatile(".reg .b32 acc<64>;")

#define SCO_TEN(p, t) \
  p #t "0, " p #t "1, " p #t "2, " p #t "3, " p #t "4, " p #t "5, " p #t "6, " p #t "7, " p #t "8, " p #t "9, "
#define SCO_ACC_30 SCO_TEN("acc", ) SCO_TEN("acc", 1) SCO_TEN("acc", 2)
#define SCO_ACC_32 "{" SCO_ACC_30 "acc30, acc31}"
#define SCO_ACC_64 "{" SCO_ACC_30 SCO_TEN("acc", 3) SCO_TEN("acc", 4) SCO_TEN("acc", 5) "acc60, acc61, acc62, acc63}"

// acc = A . B^T over 128 bytes of contraction: A 64 rows, B the rows of the shape, both swizzled_tile().
#define SCO_PRODUCT(shape_and_types, registers)                        \
  asm volatile(                                                        \
      "{\n.reg .pred fresh, add;\n.reg .b64 a1, a2, a3, b1, b2, b3;\n" \
      "setp.ne.b32 fresh, %2, 0;\nsetp.eq.b32 add, %2, 0;\n"           \
      "add.s64 a1, %0, 2;\nadd.s64 a2, %0, 4;\nadd.s64 a3, %0, 6;\n"   \
      "add.s64 b1, %1, 2;\nadd.s64 b2, %1, 4;\nadd.s64 b3, %1, 6;\n"   \
      "wgmma.fence.sync.aligned;\n"                                    \
      "wgmma.mma_async.sync.aligned." shape_and_types " " registers    \
      ", %0, %1, fresh, 1, 1;\n"                                       \
      "wgmma.mma_async.sync.aligned." shape_and_types " " registers    \
      ", a1, b1, add, 1, 1;\n"                                         \
      "wgmma.mma_async.sync.aligned." shape_and_types " " registers    \
      ", a2, b2, add, 1, 1;\n"                                         \
      "wgmma.mma_async.sync.aligned." shape_and_types " " registers    \
      ", a3, b3, add, 1, 1;\n"                                         \
      "wgmma.commit_group.sync.aligned;\n}" ::"l"(a),                  \
      "l"(b), "n"(0)                                                   \
      : "memory")

__device__ __forceinline__ void product_n128_f32(uint64_t a, uint64_t b) {
  SCO_PRODUCT("m64n128k32.f32.e4m3.e4m3", SCO_ACC_64);
}
__device__ __forceinline__ void product_n128_f16(uint64_t a, uint64_t b) {
  SCO_PRODUCT("m64n128k32.f16.e4m3.e4m3", SCO_ACC_32);
}
__device__ __forceinline__ void product_n256_f16(uint64_t a, uint64_t b) {
  SCO_PRODUCT("m64n256k32.f16.e4m3.e4m3", SCO_ACC_64);
}

// max(accumulator, 0) that passes NaN on.
template <int INDEX>
__device__ __forceinline__ float relu_f32() {
  float value;
  asm volatile("max.NaN.f32 %0, acc%1, 0f00000000;" : "=f"(value) : "n"(INDEX));
  return value;
}
template <int INDEX>
__device__ __forceinline__ uint32_t relu_f16x2() {
  uint32_t value;
  asm volatile("{\n.reg .b32 zero;\nmov.b32 zero, 0;\nmax.NaN.f16x2 %0, acc%1, zero;\n}" : "=r"(value) : "n"(INDEX));
  return value;
}

// Calls f(integral_constant<int, 0>), ..., f(integral_constant<int, N - 1>).
template <int N, class F>
__device__ __forceinline__ void unrolled(const F& f) {
  [&]<int... I>(std::integer_sequence<int, I...>) {
    (f(std::integral_constant<int, I>{}), ...);
  }(std::make_integer_sequence<int, N>{});
}

}  // namespace sparse_cp_ops
