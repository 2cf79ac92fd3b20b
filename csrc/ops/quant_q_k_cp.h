// quant_q_k_cp: checks, parameters and results, shared by the CPU and CUDA kernels.
#pragma once

#include <cmath>

#include "../kv_record.h"
#include "../new_tensor.h"
#include "fp8_scale.h"
#include "rope_table.h"

namespace sparse_cp_ops {

struct QuantQKParams {
  const void* q;        // [rows, heads, 128] bf16
  const void* k;        // [rows, 128] bf16
  const void* weights;  // [rows, heads] bf16 or f32
  uint8_t* k_records;   // [rows, 132]
  uint8_t* q_fp8;       // [rows, heads, 128], contiguous
  float* q_weights;     // [rows, heads], contiguous
  RopeTable table;
  int64_t rows, heads;
  int64_t q_row_stride, q_head_stride, k_stride, weights_stride, record_stride;  // elements
  float weight_scale, q_absmax;
  bool hadamard, ue8m0, weights_bf16;
};

struct QuantQKCall {
  QuantQKParams params;
  Tensor q_fp8, q_weights;
};

inline QuantQKCall prepare_quant_q_k_cp(const Tensor& q, const Tensor& k, const Tensor& weights,
                                        const Tensor& positions, const Tensor& cos_sin_cache, const Tensor& k_records,
                                        bool interleaved, bool hadamard, double weight_scale,
                                        const std::string& scale_format, double q_absmax) {
  check_tensor(q, "q", q, "q", ScalarType::BFloat16, {kAny, kAny, kIndexDim});
  const int64_t rows = q.size(0), heads = q.size(1);
  check_tensor(k, "k", q, "q", ScalarType::BFloat16, {rows, kIndexDim});
  check_dim(weights, "weights", 2);
  check_device(weights, "weights", q, "q");
  const ScalarType weights_dtype = weights.scalar_type();
  SCO_CHECK(weights_dtype == ScalarType::BFloat16 || weights_dtype == ScalarType::Float,
            "weights: expected dtype bfloat16 or float32, got ", dtype_name(weights_dtype));
  check_shape(weights, "weights", {rows, heads});
  check_tensor(k_records, "k_records", q, "q", ScalarType::Byte, {rows, kIndexRecordBytes});
  const RopeTable table = check_rope_table(positions, cos_sin_cache, interleaved, rows, q, "q");
  SCO_CHECK(table.dim % 2 == 0 && table.dim <= kIndexDim,
            "cos_sin_cache: expected an even rope_dim of at most 128 in dimension 1, got ", table.dim);
  check_last_contiguous(q, "q");
  check_last_contiguous(k, "k");
  check_last_contiguous(weights, "weights");
  check_last_contiguous(k_records, "k_records");
  check_row_alignment(k_records, "k_records", kIndexRecordAlignment);
  check_writable(k_records, "k_records");
  check_no_overlap(
      k_records, "k_records",
      {{"q", q}, {"k", k}, {"weights", weights}, {"positions", positions}, {"cos_sin_cache", cos_sin_cache}});
  const bool ue8m0 = check_scale_format(scale_format);
  const float absmax = static_cast<float>(q_absmax), scale = static_cast<float>(weight_scale);
  SCO_CHECK(absmax > 0.0f && absmax <= kFp8Max, "q_absmax: expected a value in (0, 448], got ", q_absmax);
  SCO_CHECK(std::isfinite(scale), "weight_scale: expected a finite float32, got ", weight_scale);

  Tensor q_fp8 = new_tensor(q, {rows, heads, kIndexDim}, ScalarType::Byte);
  Tensor q_weights = new_tensor(q, {rows, heads}, ScalarType::Float);
  QuantQKParams params{q.data_ptr(),
                       k.data_ptr(),
                       weights.data_ptr(),
                       static_cast<uint8_t*>(k_records.data_ptr()),
                       static_cast<uint8_t*>(q_fp8.data_ptr()),
                       static_cast<float*>(q_weights.data_ptr()),
                       table,
                       rows,
                       heads,
                       q.stride(0),
                       q.stride(1),
                       k.stride(0),
                       weights.stride(0),
                       k_records.stride(0),
                       scale,
                       absmax,
                       hadamard,
                       ue8m0,
                       weights_dtype == ScalarType::BFloat16};
  return {params, q_fp8, q_weights};
}

}  // namespace sparse_cp_ops
