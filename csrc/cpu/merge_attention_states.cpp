// merge_attention_states on the CPU: softmax-weighted sum of P partial attention states.
#include "../ops/merge_attention_states.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/util/BFloat16.h>

#include <cmath>
#include <limits>
#include <tuple>
#include <vector>

namespace sparse_cp_ops {
namespace {

using torch::headeronly::BFloat16;

template <class T>
void merge_row(const MergeAttentionStatesParams& p, int64_t row, float* accumulator) {
  const int64_t states = p.rows * p.heads;
  const float infinity = std::numeric_limits<float>::infinity();
  float peak = -infinity;
  bool has_nan = false;
  for (int64_t part = 0; part < p.parts; ++part) {
    const float lse = p.lses[part * states + row];
    has_nan |= std::isnan(lse);
    if (lse > peak) peak = lse;
  }
  T* out = static_cast<T*>(p.out) + row * p.dim;
  if (has_nan || peak == -infinity) {
    const float fill = has_nan ? std::numeric_limits<float>::quiet_NaN() : 0.0f;
    for (int64_t d = 0; d < p.dim; ++d) out[d] = T(fill);
    p.lse[row] = has_nan ? fill : -infinity;
    return;
  }
  for (int64_t d = 0; d < p.dim; ++d) accumulator[d] = 0.0f;
  float total = 0.0f;
  for (int64_t part = 0; part < p.parts; ++part) {
    const float lse = p.lses[part * states + row];
    if (lse == -infinity) continue;  // weighs nothing, whatever its out holds
    const float weight = lse == peak ? 1.0f : std::exp(lse - peak);
    total += weight;
    const T* source = static_cast<const T*>(p.outs) + (part * states + row) * p.dim;
    for (int64_t d = 0; d < p.dim; ++d) accumulator[d] += weight * static_cast<float>(source[d]);
  }
  for (int64_t d = 0; d < p.dim; ++d) out[d] = T(accumulator[d] / total);
  p.lse[row] = peak + std::log(total);
}

std::tuple<Tensor, Tensor> merge_attention_states(const Tensor& outs, const Tensor& lses) {
  MergeAttentionStatesCall call = prepare_merge_attention_states(outs, lses);
  const auto& p = call.params;
  torch::stable::parallel_for(0, p.rows * p.heads, 64, [&](int64_t begin, int64_t end) {
    std::vector<float> accumulator(p.dim);
    for (int64_t row = begin; row < end; ++row) {
      if (p.is_bf16) merge_row<BFloat16>(p, row, accumulator.data());
      else merge_row<float>(p, row, accumulator.data());
    }
  });
  return {call.out, call.lse};
}

}  // namespace
}  // namespace sparse_cp_ops

STABLE_TORCH_LIBRARY_IMPL(sparse_cp_ops, CPU, m) {
  m.impl("merge_attention_states", TORCH_BOX(&sparse_cp_ops::merge_attention_states));
}
