// Which kernel set a device runs: one table, decided once a device, never by exception.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

#include "launch.h"

namespace sparse_cp_ops {

enum class KernelSet {
  kPortable,  // sm_80 instructions: Ampere, Ada, Hopper, Blackwell
  kSm90,      // wgmma, setmaxnreg, bulk copies: compute capability 9.0
};

struct DeviceArch {
  KernelSet kernels;
  int multiprocessors;
  int shared_bytes;  // shared memory that one block may ask for
};

// Facts of a device and its kernel set. SPARSE_CP_OPS_ARCH=auto|portable|sm90 is read at the device's first use;
// another value, or sm90 on a device that is none, throws std::invalid_argument.
const DeviceArch& device_arch(int32_t device_index);

// Lets a kernel use more than 48 KB of dynamic shared memory on this device; one call a kernel and device does the
// work.
template <auto* kernel>
void allow_shared_bytes(int32_t device_index, int bytes) {
  static std::atomic<uint64_t> done{0};  // one bit a device; the call itself may safely happen twice
  const uint64_t bit = uint64_t{1} << (device_index % 64);
  if (device_index < 64 && (done.load(std::memory_order_acquire) & bit)) return;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
             "shared memory of a kernel");
  done.fetch_or(bit, std::memory_order_release);
}

}  // namespace sparse_cp_ops
