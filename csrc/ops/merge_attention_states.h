// merge_attention_states: checks and parameters, shared by the CPU and CUDA kernels.
#pragma once

#include "../new_tensor.h"
#include "../tensor_checks.h"

namespace sparse_cp_ops {

struct MergeAttentionStatesParams {
  const void* outs;   // [P, L, H, D], bf16 or f32
  const float* lses;  // [P, L, H]
  void* out;          // [L, H, D], dtype of outs
  float* lse;         // [L, H]
  int64_t parts, rows, heads, dim;
  bool is_bf16;
};

struct MergeAttentionStatesCall {
  MergeAttentionStatesParams params;
  Tensor out, lse;
};

inline MergeAttentionStatesCall prepare_merge_attention_states(const Tensor& outs, const Tensor& lses) {
  check_dim(outs, "outs", 4);
  const ScalarType dtype = outs.scalar_type();
  SCO_CHECK(dtype == ScalarType::BFloat16 || dtype == ScalarType::Float,
            "outs: expected dtype bfloat16 or float32, got ", dtype_name(dtype));
  check_tensor(lses, "lses", outs, "outs", ScalarType::Float, {outs.size(0), outs.size(1), outs.size(2)});
  check_contiguous(outs, "outs");
  check_contiguous(lses, "lses");
  Tensor out = new_tensor(outs, {outs.size(1), outs.size(2), outs.size(3)});
  Tensor lse = new_tensor(lses, {outs.size(1), outs.size(2)});
  MergeAttentionStatesParams params{outs.data_ptr(),
                                    static_cast<const float*>(lses.data_ptr()),
                                    out.data_ptr(),
                                    static_cast<float*>(lse.data_ptr()),
                                    outs.size(0),
                                    outs.size(1),
                                    outs.size(2),
                                    outs.size(3),
                                    dtype == ScalarType::BFloat16};
  return {params, out, lse};
}

}  // namespace sparse_cp_ops
