// sparse_mla_fp8_cp on the CPU: attention of every row over its own list of records of the FP8 cache.
#include "../ops/sparse_mla_fp8_cp.h"

#include <torch/csrc/stable/library.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Float8_e4m3fn.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <tuple>
#include <vector>

namespace sparse_cp_ops {
namespace {

using torch::headeronly::BFloat16;
using torch::headeronly::Float8_e4m3fn;

void read_record(const uint8_t* record, float* values) {
  for (int64_t d = 0; d < kLatentDim; ++d) {
    float scale;
    std::memcpy(&scale, record + kMlaScaleOffset + d / kScaleTile * 4, 4);
    values[d] = static_cast<float>(Float8_e4m3fn(record[d], Float8_e4m3fn::from_bits())) * scale;
  }
  for (int64_t d = 0; d < kRopeDim; ++d) {
    uint16_t bits;
    std::memcpy(&bits, record + kMlaRopeOffset + d * 2, 2);
    values[kLatentDim + d] = static_cast<float>(BFloat16(bits, BFloat16::from_bits()));
  }
}

void attend_row(const SparseMlaParams& p, int64_t row) {
  const bool paged = p.paged;
  const int64_t request = paged ? p.req_ids[row] : 0;
  const bool pad = paged && (request < 0 || request >= p.requests);
  const int32_t* table = paged && !pad ? p.block_table + request * p.table_stride : nullptr;
  const int32_t kv_len = paged && !pad ? p.kv_lens[row] : 0;
  std::vector<float> keys;
  for (int64_t i = 0; i < p.topk && !pad; ++i) {
    const int64_t offset = mla_record_offset(p, p.indices[row * p.indices_stride + i], kv_len, table);
    if (offset < 0) continue;
    keys.resize(keys.size() + kQkDim);
    read_record(p.kv_cache + offset, keys.data() + keys.size() - kQkDim);
  }
  const int64_t n = keys.size() / kQkDim;
  std::vector<float> weights(n), sum(kLatentDim);
  for (int64_t head = 0; head < p.heads; ++head) {
    const BFloat16* q = static_cast<const BFloat16*>(p.q) + row * p.q_row_stride + head * p.q_head_stride;
    float peak = -std::numeric_limits<float>::infinity(), total = 0.0f;
    for (int64_t j = 0; j < n; ++j) {
      float logit = 0.0f;
      for (int64_t d = 0; d < kQkDim; ++d) logit += static_cast<float>(q[d]) * keys[j * kQkDim + d];
      weights[j] = logit * p.softmax_scale;
      if (weights[j] > peak) peak = weights[j];
    }
    const float shift = std::isinf(peak) && peak < 0 ? 0.0f : peak;
    std::fill(sum.begin(), sum.end(), 0.0f);
    for (int64_t j = 0; j < n; ++j) {
      const float weight = std::exp(weights[j] - shift);
      total += weight;
      for (int64_t d = 0; d < kLatentDim; ++d) sum[d] += weight * keys[j * kQkDim + d];
    }
    BFloat16* out = static_cast<BFloat16*>(p.out) + (row * p.heads + head) * kLatentDim;
    for (int64_t d = 0; d < kLatentDim; ++d) out[d] = BFloat16(total == 0.0f ? 0.0f : sum[d] / total);
    p.lse[row * p.heads + head] = shift + std::log(total);
  }
}

std::tuple<Tensor, Tensor> sparse_mla_fp8_cp(const Tensor& q, const Tensor& kv_cache, const Tensor& indices,
                                             const std::optional<Tensor>& block_table,
                                             const std::optional<Tensor>& req_ids, const std::optional<Tensor>& kv_lens,
                                             double softmax_scale, const std::string& precision, bool batch_invariant) {
  SparseMlaCall call = prepare_sparse_mla_fp8_cp(q, kv_cache, indices, block_table, req_ids, kv_lens, softmax_scale,
                                                 precision, batch_invariant);
  if (value_checks_enabled()) check_sparse_mla_values(call.params);
  torch::stable::parallel_for(0, call.params.rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) attend_row(call.params, row);
  });
  return {call.out, call.lse};
}

}  // namespace
}  // namespace sparse_cp_ops

STABLE_TORCH_LIBRARY_IMPL(sparse_cp_ops, CPU, m) {
  m.impl("sparse_mla_fp8_cp", TORCH_BOX(&sparse_cp_ops::sparse_mla_fp8_cp));
}
