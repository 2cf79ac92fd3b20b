// Thin wrappers of Hopper's asynchronous warpgroup matrix instructions (sm_90a), operands in 128-byte swizzled tiles.
//
// A tile is a stack of rows of 128 bytes (64 values of 16 bits, 128 of 8) whose 16-byte pieces are exchanged by piece ^
// (row % 8). Operands "K major" have the summed dimension along the row, "transposed" ones across the rows. An
// accumulator of N columns is float[N / 2] in each thread: element 4 * j + i is row 16 * warp + lane / 4 + 8 * (i / 2),
// column 8 * j + 2 * (lane % 4) + i % 2.
#pragma once

#include <cstdint>

namespace sparse_cp_ops {

// Descriptor of a tile at a shared address: 8 rows are 1024 bytes. `pitch` is the distance of tiles side by side, which
// a transposed operand wider than 64 needs.
__device__ __forceinline__ uint64_t swizzled_tile(uint32_t address, uint32_t pitch = 16) {
  return (address & 0x3ffff) >> 4 | static_cast<uint64_t>(pitch >> 4) << 16 | uint64_t{1024 >> 4} << 32 |
         uint64_t{1} << 62;
}

// Advances a descriptor; `bytes` stays within the tile's swizzle pattern (K major: along the row; else whole 1024s).
__device__ __forceinline__ uint64_t advance(uint64_t descriptor, uint32_t bytes) {
  return (descriptor & 0xffffffff00000000u) |
         (static_cast<uint32_t>(descriptor) + (bytes >> 4));  // the upper half is constant
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most N committed groups are in flight.
template <int N>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// Keeps the compiler from moving uses of an accumulator across a wait.
template <int N>
__device__ __forceinline__ void pin(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
template <int N>
__device__ __forceinline__ void pin(uint32_t (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+r"(d[i])::"memory");
}

// clang-format off
#define SCO_D8(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define SCO_D32(d, i) SCO_D8(d, i), SCO_D8(d, i + 8), SCO_D8(d, i + 16), SCO_D8(d, i + 24)
#define SCO_D64(d) SCO_D32(d, 0), SCO_D32(d, 32)
#define SCO_R32 \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}"
#define SCO_R64 \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}"
#define SCO_R128 \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}"
// clang-format on

// d (+)= a . b^T: a 64 x 16 and b 64 x 16, both K major.
__device__ __forceinline__ void wgmma_n64_f16(float (&d)[32], uint64_t a, uint64_t b, bool add) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 " SCO_R32
               ", %32, %33, p, 1, 1, 0, 0;\n}"
               : SCO_D32(d, 0)
               : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}

// The same in bf16.
__device__ __forceinline__ void wgmma_n64_bf16(float (&d)[32], uint64_t a, uint64_t b, bool add) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " SCO_R32
               ", %32, %33, p, 1, 1, 0, 0;\n}"
               : SCO_D32(d, 0)
               : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}

// The same in e4m3, 32 values of the summed dimension at a time.
__device__ __forceinline__ void wgmma_n64_e4m3(float (&d)[32], uint64_t a, uint64_t b, bool add) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\nwgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 " SCO_R32
               ", %32, %33, p, 1, 1;\n}"
               : SCO_D32(d, 0)
               : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}

// The same with f16 sums: pairs of neighbouring columns.
__device__ __forceinline__ void wgmma_n64_e4m3_f16(uint32_t (&d)[16], uint64_t a, uint64_t b, bool add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\nwgmma.mma_async.sync.aligned.m64n64k32.f16.e4m3.e4m3 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, %16, %17, p, 1, 1;\n}"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]), "+r"(d[4]), "+r"(d[5]), "+r"(d[6]), "+r"(d[7]), "+r"(d[8]),
        "+r"(d[9]), "+r"(d[10]), "+r"(d[11]), "+r"(d[12]), "+r"(d[13]), "+r"(d[14]), "+r"(d[15])
      : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}

// a in registers: four values that follow one another in the summed dimension each, of rows lane / 4 and + 8 at
// 4 * (lane % 4), then of the same rows 16 further.
__device__ __forceinline__ void wgmma_n64_e4m3(float (&d)[32], const uint32_t (&a)[4], uint64_t b, bool add) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\nwgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 " SCO_R32
               ", {%32, %33, %34, %35}, %36, p, 1, 1;\n}"
               : SCO_D32(d, 0)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));
}

// d (+)= a . b: a 64 x 16 K major, b 16 x 256 transposed; the columns lie in two arrays of 128.
__device__ __forceinline__ void wgmma_n256_f16_transposed(float (&d)[2][64], uint64_t a, uint64_t b, bool add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\nwgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 " SCO_R128
      ", %128, %129, p, 1, 1, 0, 1;\n}"
      : SCO_D64(d[0]), SCO_D64(d[1])
      : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}

// The same with a in registers.
__device__ __forceinline__ void wgmma_n256_f16_transposed(float (&d)[2][64], const uint32_t (&a)[4], uint64_t b,
                                                          bool add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %133, 0;\nwgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 " SCO_R128
      ", {%128, %129, %130, %131}, %132, p, 1, 1, 1;\n}"
      : SCO_D64(d[0]), SCO_D64(d[1])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));
}

// b 16 x 128, a in registers.
__device__ __forceinline__ void wgmma_n128_f16_transposed(float (&d)[64], const uint32_t (&a)[4], uint64_t b,
                                                          bool add) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\nwgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 " SCO_R64
               ", {%64, %65, %66, %67}, %68, p, 1, 1, 1;\n}"
               : SCO_D64(d)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));
}

// The same with a K major.
__device__ __forceinline__ void wgmma_n128_f16_transposed(float (&d)[64], uint64_t a, uint64_t b, bool add) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\nwgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 " SCO_R64
               ", %64, %65, p, 1, 1, 0, 1;\n}"
               : SCO_D64(d)
               : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}

#undef SCO_D8
#undef SCO_D32
#undef SCO_D64
#undef SCO_R32
#undef SCO_R64
#undef SCO_R128

}  // namespace sparse_cp_ops
