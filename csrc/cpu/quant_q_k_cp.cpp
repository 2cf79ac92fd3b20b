// quant_q_k_cp on the CPU.
#include "../ops/quant_q_k_cp.h"

#include <torch/csrc/stable/library.h>

#include <cstring>
#include <tuple>

#include "../ops/op_functions.h"
#include "numeric.h"
#include "row_loop.h"

namespace sparse_cp_ops {
namespace {

// RoPE, Hadamard and FP8 of one vector; returns its scale.
SCO_INLINE float quantise_vector(const QuantQKParams& p, const uint16_t* x, const float* cos_sin, float absmax,
                                 uint8_t* out) {
  float values[kIndexDim];
  for (int64_t i = 0; i < kIndexDim; ++i) values[i] = bf16_to_float(x[i]);
  rope_in_place(values, cos_sin, p.table.dim, p.table.interleaved);
  if (p.hadamard) hadamard_in_place(values);
  return encode_fp8_tile(values, kIndexDim, absmax, p.ue8m0, out);
}

SCO_INLINE float weight_at(const QuantQKParams& p, int64_t row, int64_t head) {
  const int64_t i = row * p.weights_stride + head;
  return p.weights_bf16 ? bf16_to_float(static_cast<const uint16_t*>(p.weights)[i])
                        : static_cast<const float*>(p.weights)[i];
}

SCO_INLINE void quantise_rows(const QuantQKParams& p, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const float* cos_sin = cos_sin_row(p.table, row);
    const uint16_t* k = static_cast<const uint16_t*>(p.k) + row * p.k_stride;
    uint8_t* record = p.k_records + row * p.record_stride;
    const float k_scale = quantise_vector(p, k, cos_sin, kFp8Max, record);
    std::memcpy(record + kIndexDim, &k_scale, sizeof(k_scale));
    for (int64_t head = 0; head < p.heads; ++head) {
      const uint16_t* q = static_cast<const uint16_t*>(p.q) + row * p.q_row_stride + head * p.q_head_stride;
      const int64_t i = row * p.heads + head;
      const float q_scale = quantise_vector(p, q, cos_sin, p.q_absmax, p.q_fp8 + i * kIndexDim);
      p.q_weights[i] = canonical_nan(weight_at(p, row, head) * q_scale * p.weight_scale);
    }
  }
}
SCO_DEFINE_ROW_LOOP(quantise_rows, QuantQKParams)

}  // namespace

std::tuple<Tensor, Tensor> quant_q_k_cp(const Tensor& q, const Tensor& k, const Tensor& weights,
                                        const Tensor& positions, const Tensor& cos_sin_cache, Tensor k_records,
                                        bool interleaved, bool hadamard, double weight_scale, std::string scale_format,
                                        double q_absmax) {
  const QuantQKCall call = prepare_quant_q_k_cp(q, k, weights, positions, cos_sin_cache, k_records, interleaved,
                                                hadamard, weight_scale, scale_format, q_absmax);
  if (value_checks_enabled()) check_rope_positions(positions, cos_sin_cache);
  const QuantQKParams& p = call.params;
  const auto loop = quantise_rows_for_this_cpu();
  parallel_rows(p.rows, (p.heads + 1) * kIndexDim, [&](int64_t begin, int64_t end) { loop(p, begin, end); });
  return {call.q_fp8, call.q_weights};
}

}  // namespace sparse_cp_ops

STABLE_TORCH_LIBRARY_IMPL(sparse_cp_ops, CPU, m) { m.impl("quant_q_k_cp", TORCH_BOX(&sparse_cp_ops::quant_q_k_cp)); }
