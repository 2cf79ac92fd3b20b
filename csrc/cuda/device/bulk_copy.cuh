// Thin wrappers of Hopper's bulk copies from global to shared memory; a barrier counts their bytes (sm_90).
#pragma once

#include <cuda.h>

#include <cstdint>

namespace sparse_cp_ops {

// Makes fresh barriers visible to the copy engine.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Arrives, and holds the barrier's phase until that many more bytes have landed.
__device__ __forceinline__ void mbarrier_expect_bytes(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Brings a tensor map, a kernel parameter, to where copies look for it.
__device__ __forceinline__ void prefetch_tensor_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// How long copied lines stay in the L2 cache: as usual, or until others need their place, for what is read once.
__device__ __forceinline__ uint64_t usual_cache_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ uint64_t read_once_cache_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Addresses and bytes are multiples of 16. One lane of a converged warp in which all arguments are equal copies: the
// copy takes them from uniform registers, and without this form the compiler loops over lanes, at several times the
// cost.
__device__ __forceinline__ void bulk_copy_by_warp(uint32_t shared, const void* global, uint32_t bytes,
                                                  uint32_t barrier) {
  asm volatile(
      "{\n.reg .pred chosen;\n"
      "elect.sync _|chosen, 0xffffffff;\n"
      "@chosen cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n}" ::"r"(
          shared),
      "l"(global), "r"(bytes), "r"(barrier)
      : "memory");
}

// The same for the box of the tensor map at (x, y, z).
__device__ __forceinline__ void bulk_copy_box_by_warp(uint32_t shared, const CUtensorMap* map, int x, int y, int z,
                                                      uint32_t barrier) {
  asm volatile(
      "{\n.reg .pred chosen;\n"
      "elect.sync _|chosen, 0xffffffff;\n"
      "@chosen cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], "
      "[%5];\n}" ::"r"(shared),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier)
      : "memory");
}

// Both under a cache policy.
__device__ __forceinline__ void bulk_copy_by_warp(uint32_t shared, const void* global, uint32_t bytes, uint32_t barrier,
                                                  uint64_t policy) {
  asm volatile(
      "{\n.reg .pred chosen;\n"
      "elect.sync _|chosen, 0xffffffff;\n"
      "@chosen cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], "
      "%4;\n}" ::"r"(shared),
      "l"(global), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}
__device__ __forceinline__ void bulk_copy_box_by_warp(uint32_t shared, const CUtensorMap* map, int x, int y, int z,
                                                      uint32_t barrier, uint64_t policy) {
  asm volatile(
      "{\n.reg .pred chosen;\n"
      "elect.sync _|chosen, 0xffffffff;\n"
      "@chosen cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, "
      "{%2, %3, %4}], [%5], %6;\n}" ::"r"(shared),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier), "l"(policy)
      : "memory");
}

// From this block's shared memory to that of a block of the cluster, whose barrier counts the bytes; by one lane of a
// converged warp in which all arguments are equal.
__device__ __forceinline__ void cluster_copy_by_warp(uint32_t there, uint32_t here, uint32_t bytes,
                                                     uint32_t barrier_there) {
  asm volatile(
      "{\n.reg .pred chosen;\n"
      "elect.sync _|chosen, 0xffffffff;\n"
      "@chosen cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n}" ::"r"(
          there),
      "r"(here), "r"(bytes), "r"(barrier_there)
      : "memory");
}

}  // namespace sparse_cp_ops
