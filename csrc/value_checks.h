// SPARSE_CP_OPS_CHECK=1: checks of tensor values on the host. They copy device data and so synchronise.
#pragma once

#include <torch/csrc/stable/ops.h>

#include "tensor_checks.h"

namespace sparse_cp_ops {

// The same values in contiguous host memory; the tensor itself where it is that already.
inline Tensor host_copy(const Tensor& t) {
  if (t.is_cpu()) return torch::stable::contiguous(t);
  return torch::stable::contiguous(torch::stable::to(t, torch::stable::Device(torch::headeronly::DeviceType::CPU)));
}

}  // namespace sparse_cp_ops
