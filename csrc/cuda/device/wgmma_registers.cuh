// Thin wrappers of warpgroup matrix instructions with the first operand in registers and few columns (sm_90a).
//
// A thread's first operand is that of mma_sync.cuh's 16 x 16 fragment for its warp's 16 rows; the second operand is a
// swizzled tile, K major (wgmma.cuh), of 8, 16 or 32 rows.
#pragma once

#include <cstdint>

namespace sparse_cp_ops {

// clang-format off
#define SCO_D4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SCO_R4 "{%0, %1, %2, %3}"
#define SCO_R8 "{%0, %1, %2, %3, %4, %5, %6, %7}"
#define SCO_R16 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}"
// d (+)= a . b^T: a 64 x 16 in registers, b N x 16.
#define SCO_WGMMA(shape, type, d_registers, a_registers, b_register, add_register, ...)                     \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " add_register ", 0;\n"                                    \
               "wgmma.mma_async.sync.aligned." shape ".f32." type "." type " " d_registers ", " a_registers \
               ", " b_register ", p, 1, 1, 0;\n}"                                                           \
               : __VA_ARGS__                                                                                \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)))
// clang-format on

#define SCO_WGMMA_OF_TYPE(name, type)                                                                       \
  __device__ __forceinline__ void name(float (&d)[4], const uint32_t (&a)[4], uint64_t b, bool add) {       \
    SCO_WGMMA("m64n8k16", type, SCO_R4, "{%4, %5, %6, %7}", "%8", "%9", SCO_D4(d, 0));                      \
  }                                                                                                         \
  __device__ __forceinline__ void name(float (&d)[8], const uint32_t (&a)[4], uint64_t b, bool add) {       \
    SCO_WGMMA("m64n16k16", type, SCO_R8, "{%8, %9, %10, %11}", "%12", "%13", SCO_D4(d, 0), SCO_D4(d, 4));   \
  }                                                                                                         \
  __device__ __forceinline__ void name(float (&d)[16], const uint32_t (&a)[4], uint64_t b, bool add) {      \
    SCO_WGMMA("m64n32k16", type, SCO_R16, "{%16, %17, %18, %19}", "%20", "%21", SCO_D4(d, 0), SCO_D4(d, 4), \
              SCO_D4(d, 8), SCO_D4(d, 12));                                                                 \
  }

SCO_WGMMA_OF_TYPE(wgmma_registers_f16, "f16")
SCO_WGMMA_OF_TYPE(wgmma_registers_bf16, "bf16")

#undef SCO_WGMMA_OF_TYPE
#undef SCO_WGMMA
#undef SCO_D4
#undef SCO_R4
#undef SCO_R8
#undef SCO_R16

}  // namespace sparse_cp_ops
