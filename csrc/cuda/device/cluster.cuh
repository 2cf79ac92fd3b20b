// Thread block clusters (sm_90 and newer): rank, barrier, stores to another block's shared memory.
#pragma once

#include <cstdint>

namespace sparse_cp_ops {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
inline constexpr bool kHasClusters = false;
#else
inline constexpr bool kHasClusters = true;
#endif

__device__ __forceinline__ int cluster_rank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
}

// All threads of all blocks; what any of them wrote before is visible to all behind it.
__device__ __forceinline__ void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

// The same in two halves, for what lives when: without any promise about what was written, which costs a fence of the
// whole device.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }

// Where `variable` of this block's shared memory lies in that of block `rank`.
template <class T>
__device__ __forceinline__ T* shared_of_rank(T* variable, int rank) {
  uint64_t address;
  asm("mapa.u64 %0, %1, %2;" : "=l"(address) : "l"(variable), "r"(rank));
  return reinterpret_cast<T*>(address);
}

}  // namespace sparse_cp_ops
