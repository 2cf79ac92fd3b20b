// Thin wrappers of Hopper's barriers, proxies and register allocation (sm_90a).
#pragma once

#include <cstdint>

namespace sparse_cp_ops {

// Barriers in shared memory -------------------------------------------------------------------------------------------

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier, uint32_t arrivals = 1) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// The same without a branch, which would end what the compiler sees as one sequence of products.
__device__ __forceinline__ void mbarrier_arrive_if(bool arrives, uint32_t barrier) {
  asm volatile(
      "{\n.reg .pred arrives;\n"
      "setp.ne.u32 arrives, %0, 0;\n"
      "@arrives mbarrier.arrive.shared::cta.b64 _, [%1];\n}" ::"r"(static_cast<uint32_t>(arrives)),
      "r"(barrier)
      : "memory");
}

// Arrives once this thread's cp.async copies so far have landed; counts as one of the barrier's arrivals.
__device__ __forceinline__ void mbarrier_arrive_after_cp_async(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Waits until the phase with this parity is over.
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "WAIT_%=:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1, 0x989680;\n"
      "@done bra DONE_%=;\n"
      "bra WAIT_%=;\n"
      "DONE_%=:\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Whether the phase with this parity is over.
__device__ __forceinline__ bool mbarrier_test(uint32_t barrier, uint32_t parity) {
  uint32_t over;
  asm volatile(
      "{\n.reg .pred over;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 over, [%1], %2;\n"
      "selp.u32 %0, 1, 0, over;\n}"
      : "=r"(over)
      : "r"(barrier), "r"(parity)
      : "memory");
  return over != 0;
}

// Barrier of `threads` threads under a number 1 to 15 (0 is __syncthreads).
__device__ __forceinline__ void named_barrier(int number, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// The same; tells every thread whether any of them said so.
__device__ __forceinline__ bool named_barrier_or(int number, int threads, bool said) {
  uint32_t any;
  asm volatile(
      "{\n.reg .pred said, any;\n"
      "setp.ne.u32 said, %1, 0;\n"
      "barrier.cta.red.or.pred any, %2, %3, said;\n"
      "selp.u32 %0, 1, 0, any;\n}"
      : "=r"(any)
      : "r"(static_cast<uint32_t>(said)), "r"(number), "r"(threads)
      : "memory");
  return any;
}

// Orders this thread's ordinary accesses to shared memory before what wgmma or the copy engine does there later.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

template <int kRegisters>
__device__ __forceinline__ void raise_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void lower_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Four 8x8 matrices of 16-bit elements to shared memory; lane l gives the address of row l%8 of matrix l/8.
__device__ __forceinline__ void stmatrix_x4(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}

// Each 8x8 matrix transposed on the way: row r in memory is column r of the fragment.
__device__ __forceinline__ void stmatrix_x4_transposed(uint32_t address, uint32_t a, uint32_t b, uint32_t c,
                                                       uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}

// Two of them, addresses in lanes 0 to 15.
__device__ __forceinline__ void stmatrix_x2_transposed(uint32_t address, uint32_t a, uint32_t b) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(a), "r"(b)
               : "memory");
}

__device__ __forceinline__ void prefetch_l2(const void* global) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(global));
}

}  // namespace sparse_cp_ops
