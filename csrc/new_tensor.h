// Results and workspaces of the ops.
#pragma once

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_aten.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <initializer_list>
#include <optional>

namespace sparse_cp_ops {

// A contiguous tensor on the device of `like`, uninitialised; with its dtype unless another one is given.
// torch::stable::new_empty boxes every argument and looks the op up by its name, which takes the host 0.5 us longer.
inline torch::stable::Tensor new_tensor(const torch::stable::Tensor& like, std::initializer_list<int64_t> shape,
                                        std::optional<torch::headeronly::ScalarType> dtype = std::nullopt) {
  int32_t type = 0;
  if (dtype) type = torch::stable::detail::to<int32_t>(torch::stable::detail::from(*dtype));
  AtenTensorHandle made = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_aten_new_empty(like.get(), shape.begin(), static_cast<int64_t>(shape.size()),
                                                   dtype ? &type : nullptr, nullptr, nullptr, 0, nullptr, &made));
  return torch::stable::Tensor(made);
}

}  // namespace sparse_cp_ops
