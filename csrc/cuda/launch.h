// Host side of a kernel launch: current stream, error check, device facts.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>

#include <cstdint>
#include <stdexcept>
#include <string>

namespace sparse_cp_ops {

inline cudaStream_t current_stream(int32_t device_index) {
  void* stream = nullptr;
  if (aoti_torch_get_current_cuda_stream(device_index, &stream) != 0)
    throw std::runtime_error("no current CUDA stream");
  return static_cast<cudaStream_t>(stream);
}

// torch 2.13's STD_CUDA_KERNEL_LAUNCH_CHECK needs a symbol that torch 2.11 lacks.
inline void check_cuda(cudaError_t status, const char* what) {
  if (status != cudaSuccess)
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorName(status) + ", " + cudaGetErrorString(status));
}

inline void check_launch(const char* kernel) { check_cuda(cudaGetLastError(), kernel); }

}  // namespace sparse_cp_ops
