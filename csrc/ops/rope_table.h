// Positions and cos_sin_cache: the RoPE arguments that rope_, quant_q_k_cp and pack_mla_kv share.
#pragma once

#include "../value_checks.h"

namespace sparse_cp_ops {

struct RopeTable {
  const int32_t* positions;  // [rows]
  const float* cos_sin;      // [max_positions, dim]: dim/2 cosines, then dim/2 sines
  int64_t max_positions, dim;
  bool interleaved;  // pairs (2i, 2i+1), else (i, i + dim/2)
};

inline RopeTable check_rope_table(const Tensor& positions, const Tensor& cos_sin_cache, bool interleaved, int64_t rows,
                                  const Tensor& like, const char* like_name) {
  check_tensor(positions, "positions", like, like_name, ScalarType::Int, {rows});
  check_contiguous(positions, "positions");
  check_tensor(cos_sin_cache, "cos_sin_cache", like, like_name, ScalarType::Float, {kAny, kAny});
  check_contiguous(cos_sin_cache, "cos_sin_cache");
  return {static_cast<const int32_t*>(positions.data_ptr()), static_cast<const float*>(cos_sin_cache.data_ptr()),
          cos_sin_cache.size(0), cos_sin_cache.size(1), interleaved};
}

// Under SPARSE_CP_OPS_CHECK: reads the positions on the host.
inline void check_rope_positions(const Tensor& positions, const Tensor& cos_sin_cache) {
  const Tensor host = host_copy(positions);
  const int32_t* values = static_cast<const int32_t*>(host.data_ptr());
  for (int64_t row = 0; row < host.size(0); ++row)
    SCO_CHECK(values[row] >= 0 && values[row] < cos_sin_cache.size(0), "positions: row ", row,
              ": expected a position inside cos_sin_cache, [0, ", cos_sin_cache.size(0), "), got ", values[row]);
}

}  // namespace sparse_cp_ops
