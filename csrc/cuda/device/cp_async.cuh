// Thin wrappers of cp.async: 16-byte copies from global to shared memory that don't pass through registers (sm_80).
#pragma once

#include <cstdint>

namespace sparse_cp_ops {

// With `used` false nothing is read and 16 zero bytes are written.
__device__ __forceinline__ void cp_async_16(uint32_t shared, const void* global, bool used) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(used ? 16 : 0)
               : "memory");
}

// The same for a word.
__device__ __forceinline__ void cp_async_4(uint32_t shared, const void* global, bool used) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(global), "r"(used ? 4 : 0) : "memory");
}

__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most N groups of this thread are in flight.
template <int N>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

}  // namespace sparse_cp_ops
