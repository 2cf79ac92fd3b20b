// The RoPE of the package on the device. No FMA contraction: the CPU rounds each product too.
#pragma once

#include "../../ops/rope_table.h"

namespace sparse_cp_ops {

// Row of the table, nullptr when its position is outside.
__device__ __forceinline__ const float* cos_sin_row(const RopeTable& table, int64_t row) {
  const int32_t position = __ldg(table.positions + row);
  return position >= 0 && position < table.max_positions ? table.cos_sin + position * table.dim : nullptr;
}

// Four neighbouring cosines or sines, NaN for a position outside the table.
__device__ __forceinline__ void load_cos_sin4(const float* cos_sin, int64_t offset, float* out) {
  float4 v = make_float4(__int_as_float(0x7FFFFFFF), __int_as_float(0x7FFFFFFF), __int_as_float(0x7FFFFFFF),
                         __int_as_float(0x7FFFFFFF));
  if (cos_sin != nullptr) v = __ldg(reinterpret_cast<const float4*>(cos_sin + offset));
  out[0] = v.x, out[1] = v.y, out[2] = v.z, out[3] = v.w;
}
__device__ __forceinline__ float load_cos_sin(const float* cos_sin, int64_t offset) {
  return cos_sin != nullptr ? __ldg(cos_sin + offset) : __int_as_float(0x7FFFFFFF);
}

__device__ __forceinline__ void rotate(float& a, float& b, float cosine, float sine) {
  const float first = __fsub_rn(__fmul_rn(a, cosine), __fmul_rn(b, sine));
  b = __fadd_rn(__fmul_rn(b, cosine), __fmul_rn(a, sine));
  a = first;
}

}  // namespace sparse_cp_ops
