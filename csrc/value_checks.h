// SPARSE_CP_OPS_CHECK=1: checks of tensor values on the host. They copy device data and so synchronise.
#pragma once

#include <torch/csrc/stable/device.h>
#include <torch/csrc/stable/ops.h>

#include "tensor_checks.h"

namespace sparse_cp_ops {

// The same values in contiguous host memory; the tensor itself where it is that already. Waits for a device.
inline Tensor host_copy(const Tensor& t) {
  const Tensor dense = torch::stable::contiguous(t);
  return t.is_cpu() ? dense : torch::stable::to(dense, torch::stable::Device(torch::headeronly::DeviceType::CPU));
}

}  // namespace sparse_cp_ops
