// Indexer scores of single keys, in one fixed order of operations.
#pragma once

#include <torch/headeronly/util/Float8_e4m3fn.h>

#include <cstring>
#include <limits>

#include "../ops/indexer_inputs.h"

namespace sparse_cp_ops {

inline float indexer_score(const IndexerInputs& in, int64_t row, int64_t key) {
  using torch::headeronly::Float8_e4m3fn;
  const int64_t page = in.block_table[in.req_ids[row] * in.table_stride + key / in.page_size];
  if (page < 0 || page >= in.pages) return std::numeric_limits<float>::quiet_NaN();
  const uint8_t* base = in.cache + page * in.page_stride;
  const uint8_t* k8 = base + index_values_offset(key % in.page_size);
  float scale;
  std::memcpy(&scale, base + index_scale_offset(in.page_size, key % in.page_size), sizeof scale);
  float k[kIndexDim];
  for (int64_t d = 0; d < kIndexDim; ++d) k[d] = Float8_e4m3fn(k8[d], Float8_e4m3fn::from_bits());
  float total = 0.0f;
  for (int64_t head = 0; head < in.heads; ++head) {
    const uint8_t* q8 = in.q_fp8 + (row * in.heads + head) * kIndexDim;
    float dot = 0.0f;
    for (int64_t d = 0; d < kIndexDim; ++d) dot += Float8_e4m3fn(q8[d], Float8_e4m3fn::from_bits()) * k[d];
    total += in.q_weights[row * in.heads + head] * (dot < 0.0f ? 0.0f : dot);  // relu that passes NaN on
  }
  return scale * total;
}

}  // namespace sparse_cp_ops
