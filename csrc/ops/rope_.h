// rope_: checks and parameters, shared by the CPU and CUDA kernels.
#pragma once

#include <optional>

#include "rope_table.h"

namespace sparse_cp_ops {

struct RopeParams {
  void* x;             // [rows, heads, table.dim], bf16 or f32
  const void* source;  // what is rotated: x itself, or a tensor of its shape and dtype
  RopeTable table;
  int64_t rows, heads;
  int64_t row_stride, head_stride;                // of x, elements
  int64_t source_row_stride, source_head_stride;  // of source
  bool is_bf16;
};

inline RopeParams prepare_rope_(const Tensor& x, const Tensor& positions, const Tensor& cos_sin_cache, bool interleaved,
                                const std::optional<Tensor>& source) {
  SCO_CHECK(x.dim() == 2 || x.dim() == 3, "x: expected 2 or 3 dimensions, got ", x.dim(), " (shape ", shape_string(x),
            ")");
  const ScalarType dtype = x.scalar_type();
  SCO_CHECK(dtype == ScalarType::BFloat16 || dtype == ScalarType::Float, "x: expected dtype bfloat16 or float32, got ",
            dtype_name(dtype));
  const RopeTable table = check_rope_table(positions, cos_sin_cache, interleaved, x.size(0), x, "x");
  SCO_CHECK(table.dim % 2 == 0, "cos_sin_cache: expected an even rope_dim in dimension 1, got ", table.dim);
  const bool has_heads = x.dim() == 3;
  if (has_heads) check_shape(x, "x", {kAny, kAny, table.dim});
  else check_shape(x, "x", {kAny, table.dim});
  check_last_contiguous(x, "x");
  check_writable(x, "x");
  check_no_overlap(x, "x", {{"positions", positions}, {"cos_sin_cache", cos_sin_cache}});
  if (source) {
    SCO_CHECK(source->dim() == x.dim(), "source: expected ", x.dim(), " dimensions as x, got ", source->dim());
    check_device(*source, "source", x, "x");
    SCO_CHECK(source->scalar_type() == dtype, "source: expected dtype ", dtype_name(dtype), " as x, got ",
              dtype_name(source->scalar_type()));
    if (has_heads) check_shape(*source, "source", {x.size(0), x.size(1), table.dim});
    else check_shape(*source, "source", {x.size(0), table.dim});
    check_last_contiguous(*source, "source");
    check_no_overlap(x, "x", {{"source", *source}});
  }
  const Tensor& read = source ? *source : x;
  return {x.data_ptr(),
          read.data_ptr(),
          table,
          x.size(0),
          has_heads ? x.size(1) : 1,
          x.stride(0),
          has_heads ? x.stride(1) : 0,
          read.stride(0),
          has_heads ? read.stride(1) : 0,
          dtype == ScalarType::BFloat16};
}

}  // namespace sparse_cp_ops
