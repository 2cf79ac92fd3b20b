// SPARSE_CP_OPS_CHECK=1 on CUDA: the host reads copies of the arguments whose values are checked.
#pragma once

#include <atomic>
#include <cstdio>

#include "../value_checks.h"
#include "launch.h"

namespace sparse_cp_ops {

// Whether this call checks values. A capture can't wait for the device, so checks are left out there, with one warning.
inline bool value_checks_possible(cudaStream_t stream) {
  if (!value_checks_enabled()) return false;
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check_cuda(cudaStreamIsCapturing(stream, &status), "cudaStreamIsCapturing");
  if (status == cudaStreamCaptureStatusNone) return true;
  static std::atomic<bool> warned{false};
  if (!warned.exchange(true))
    std::fprintf(stderr, "sparse_cp_ops: SPARSE_CP_OPS_CHECK is left out inside a CUDA graph capture\n");
  return false;
}

}  // namespace sparse_cp_ops
