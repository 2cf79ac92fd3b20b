// rope_ on the CPU.
#include "../ops/rope_.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <vector>

#include "../ops/op_functions.h"
#include "numeric.h"
#include "row_loop.h"

namespace sparse_cp_ops {
namespace {

SCO_INLINE void rope_rows(const RopeParams& p, int64_t begin, int64_t end) {
  std::vector<float> buffer(p.table.dim);
  float* values = buffer.data();
  for (int64_t row = begin; row < end; ++row) {
    const float* cos_sin = cos_sin_row(p.table, row);
    for (int64_t head = 0; head < p.heads; ++head) {
      const int64_t offset = row * p.row_stride + head * p.head_stride;
      const int64_t source_offset = row * p.source_row_stride + head * p.source_head_stride;
      if (p.is_bf16) {
        uint16_t* x = static_cast<uint16_t*>(p.x) + offset;
        const uint16_t* source = static_cast<const uint16_t*>(p.source) + source_offset;
        for (int64_t i = 0; i < p.table.dim; ++i) values[i] = bf16_to_float(source[i]);
        rope_in_place(values, cos_sin, p.table.dim, p.table.interleaved);
        for (int64_t i = 0; i < p.table.dim; ++i) x[i] = float_to_bf16(values[i]);
      } else {
        float* x = static_cast<float*>(p.x) + offset;
        const float* source = static_cast<const float*>(p.source) + source_offset;
        std::copy_n(source, p.table.dim, values);
        rope_in_place(values, cos_sin, p.table.dim, p.table.interleaved);
        for (int64_t i = 0; i < p.table.dim; ++i) x[i] = canonical_nan(values[i]);
      }
    }
  }
}
SCO_DEFINE_ROW_LOOP(rope_rows, RopeParams)

}  // namespace

void rope_(Tensor x, const Tensor& positions, const Tensor& cos_sin_cache, bool interleaved,
           std::optional<Tensor> source) {
  const RopeParams p = prepare_rope_(x, positions, cos_sin_cache, interleaved, source);
  if (value_checks_enabled()) check_rope_positions(positions, cos_sin_cache);
  const auto loop = rope_rows_for_this_cpu();
  parallel_rows(p.rows, p.heads * p.table.dim, [&](int64_t begin, int64_t end) { loop(p, begin, end); });
}

}  // namespace sparse_cp_ops

STABLE_TORCH_LIBRARY_IMPL(sparse_cp_ops, CPU, m) { m.impl("rope_", TORCH_BOX(&sparse_cp_ops::rope_)); }
