// Thin wrappers of shared memory accesses by 32-bit address, and of the memory of other blocks of a cluster (sm_90).
#pragma once

#include <cstdint>

namespace sparse_cp_ops {

__device__ __forceinline__ uint32_t shared_u32(uint32_t address) {
  uint32_t x;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
  return x;
}

// A word that another warp may be writing.
__device__ __forceinline__ uint32_t polled_u32(uint32_t address) {
  uint32_t x;
  asm volatile("ld.volatile.shared.u32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
  return x;
}

__device__ __forceinline__ float shared_f32(uint32_t address) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
  return x;
}

__device__ __forceinline__ float2 shared_f32x2(uint32_t address) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(address) : "memory");
  return x;
}

__device__ __forceinline__ float4 shared_f32x4(uint32_t address) {
  float4 x;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(address)
               : "memory");
  return x;
}

__device__ __forceinline__ uint2 shared_u32x2(uint32_t address) {
  uint2 x;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(address) : "memory");
  return x;
}

__device__ __forceinline__ uint4 shared_u32x4(uint32_t address) {
  uint4 x;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(address)
               : "memory");
  return x;
}

__device__ __forceinline__ ulonglong2 shared_u64x2(uint32_t address) {
  ulonglong2 x;
  asm volatile("ld.shared.v2.u64 {%0, %1}, [%2];" : "=l"(x.x), "=l"(x.y) : "r"(address) : "memory");
  return x;
}

__device__ __forceinline__ void set_shared(uint32_t address, uint64_t x) {
  asm volatile("st.shared.u64 [%0], %1;" ::"r"(address), "l"(x) : "memory");
}

__device__ __forceinline__ void set_shared(uint32_t address, uint32_t x) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}

__device__ __forceinline__ void set_shared(uint32_t address, float x) { set_shared(address, __float_as_uint(x)); }

__device__ __forceinline__ void set_shared(uint32_t address, uint2 x) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(x.x), "r"(x.y) : "memory");
}

__device__ __forceinline__ void set_shared(uint32_t address, uint4 x) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
               : "memory");
}

__device__ __forceinline__ void set_shared(uint32_t address, float4 x) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w)
               : "memory");
}

__device__ __forceinline__ void set_shared(uint32_t address, float2 x) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(x.x), "f"(x.y) : "memory");
}

// The address of the same place in the memory of block `rank` of the cluster.
__device__ __forceinline__ uint32_t cluster_address(uint32_t address, uint32_t rank) {
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}

// A word to another block's memory, whose barrier counts its bytes.
__device__ __forceinline__ void send_to_cluster(uint32_t address, uint32_t x, uint32_t barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(address), "r"(x),
               "r"(barrier)
               : "memory");
}

}  // namespace sparse_cp_ops
