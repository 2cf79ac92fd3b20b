// Launches that overlap the end of the kernel before them in the stream (programmatic dependent launch, sm_90).
//
// A kernel that is launched so calls wait_for_earlier_kernels() before it touches global memory; what comes before that
// overlaps. The wait covers the whole of the kernel before, which waited in its turn: the order of a stream stays as it
// was. Launched otherwise, or compiled for an older architecture, both calls do nothing.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../arch.h"

namespace sparse_cp_ops {

__device__ __forceinline__ void wait_for_earlier_kernels() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;\ngriddepcontrol.wait;" ::: "memory");
#endif
}

struct LaunchShape {
  int64_t blocks;
  int threads;
  int shared_bytes = 0;
  int cluster = 1;  // blocks of a cluster; more than one: compute capability 9.0
};

template <class... Parameters>
void launch_chained(const char* what, void (*kernel)(Parameters...), const LaunchShape& shape, int32_t device,
                    cudaStream_t stream, Parameters... arguments) {
  cudaLaunchAttribute attributes[2]{};
  cudaLaunchConfig_t config{};
  config.gridDim = static_cast<unsigned>(shape.blocks);
  config.blockDim = static_cast<unsigned>(shape.threads);
  config.dynamicSmemBytes = static_cast<size_t>(shape.shared_bytes);
  config.stream = stream;
  config.attrs = attributes;
  if (device_arch(device).kernels == KernelSet::kSm90) {
    attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (shape.cluster > 1) {
    attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config.numAttrs++].val.clusterDim = {static_cast<unsigned>(shape.cluster), 1, 1};
  }
  check_cuda(cudaLaunchKernelEx(&config, kernel, arguments...), what);
}

}  // namespace sparse_cp_ops
