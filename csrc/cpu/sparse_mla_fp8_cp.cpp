// sparse_mla_fp8_cp on the CPU: attention of every row over its own list of records of the FP8 cache.
#include "../ops/sparse_mla_fp8_cp.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <numbers>
#include <tuple>
#include <vector>

#include "../ops/op_functions.h"
#include "e4m3_tables.h"
#include "isa.h"
#include "numeric.h"
#if SCO_HAS_X86_LEVELS
#include <immintrin.h>
#endif

// GCC 12 takes the deliberately undefined operands inside its own AVX-512 intrinsics for a mistake (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

#define SCO_INLINE [[gnu::always_inline]] inline

namespace sparse_cp_ops {
namespace {

namespace generic {
#define SCO_SPARSE_MLA_LEVEL 0
#include "sparse_mla_vec.h"

#include "sparse_mla_row.h"
#undef SCO_SPARSE_MLA_LEVEL
}  // namespace generic

#if SCO_HAS_X86_LEVELS
SCO_BEGIN_AVX2
namespace avx2 {
#define SCO_SPARSE_MLA_LEVEL 1
#include "sparse_mla_vec.h"

#include "sparse_mla_row.h"
#undef SCO_SPARSE_MLA_LEVEL
}  // namespace avx2
SCO_END_TARGET

SCO_BEGIN_AVX512
namespace avx512 {
#define SCO_SPARSE_MLA_LEVEL 2
#include "sparse_mla_vec.h"

#include "sparse_mla_row.h"
#undef SCO_SPARSE_MLA_LEVEL
}  // namespace avx512
SCO_END_TARGET

SCO_BEGIN_AVX512_BF16
namespace avx512_bf16 {
#define SCO_SPARSE_MLA_LEVEL 3
#include "sparse_mla_vec.h"

#include "sparse_mla_row.h"
#undef SCO_SPARSE_MLA_LEVEL
}  // namespace avx512_bf16
SCO_END_TARGET
#endif

struct Kernel {
  decltype(&generic::attend_row) attend_row;
  decltype(&generic::scratch_floats) scratch_floats;
};

Kernel kernel_for(Isa isa) {
#if SCO_HAS_X86_LEVELS
  if (isa == Isa::kAvx512Bf16) return {avx512_bf16::attend_row, avx512_bf16::scratch_floats};
  if (isa == Isa::kAvx512) return {avx512::attend_row, avx512::scratch_floats};
  if (isa == Isa::kAvx2) return {avx2::attend_row, avx2::scratch_floats};
#endif
  return {generic::attend_row, generic::scratch_floats};
}

// Offsets of the usable records of a row, in the order of its list; returns their number.
int64_t usable_records(const SparseMlaParams& p, int64_t row, int64_t* offsets) {
  const int64_t request = p.paged ? p.req_ids[row] : 0;
  if (p.paged && (request < 0 || request >= p.requests)) return 0;
  const int32_t* table = p.paged ? p.block_table + request * p.table_stride : nullptr;
  const int32_t kv_len = p.paged ? p.kv_lens[row] : 0;
  int64_t count = 0;
  for (int64_t i = 0; i < p.topk; ++i) {
    const int64_t offset = mla_record_offset(p, p.indices[row * p.indices_stride + i], kv_len, table);
    if (offset >= 0) offsets[count++] = offset;
  }
  return count;
}

// The smallest piece of work is a row; with fewer rows than threads it is a row's part of the heads.
int64_t heads_per_item(int64_t rows, int64_t heads, int64_t threads) {
  int64_t part = heads;
  while (part > 8 && rows * (heads / part) < threads) part /= 2;
  return part;
}

}  // namespace

std::tuple<Tensor, Tensor> sparse_mla_fp8_cp(const Tensor& q, const Tensor& kv_cache, const Tensor& indices,
                                             const std::optional<Tensor>& block_table,
                                             const std::optional<Tensor>& req_ids, const std::optional<Tensor>& kv_lens,
                                             double softmax_scale, const std::string& precision, bool batch_invariant) {
  const SparseMlaCall call = prepare_sparse_mla_fp8_cp(q, kv_cache, indices, block_table, req_ids, kv_lens,
                                                       softmax_scale, precision, batch_invariant);
  const SparseMlaParams& p = call.params;
  if (value_checks_enabled()) check_sparse_mla_values(p);
  const int64_t threads = torch::stable::get_num_threads();
  const int64_t heads = heads_per_item(p.rows, p.heads, threads);
  const int64_t parts = p.heads / heads, items = p.rows * parts;
  const Kernel kernel = kernel_for(cpu_isa());
  // Rows differ in their number of usable keys: a thread takes the next row when it is done with one.
  std::atomic<int64_t> next{0};
  torch::stable::parallel_for(0, std::min(threads, items), 1, [&](int64_t, int64_t) {
    constexpr size_t kAlignment = 64;
    const size_t floats = kernel.scratch_floats(heads);
    std::vector<int64_t> offsets(p.topk);
    std::vector<float> memory(floats + kAlignment / sizeof(float));
    void* aligned = memory.data();
    size_t space = memory.size() * sizeof(float);
    std::align(kAlignment, floats * sizeof(float), aligned, space);
    for (int64_t item = next++; item < items; item = next++) {
      const int64_t row = item / parts;
      const int64_t count = usable_records(p, row, offsets.data());
      kernel.attend_row(p, row, item % parts * heads, heads, offsets.data(), count, static_cast<float*>(aligned));
    }
  });
  return {call.out, call.lse};
}

}  // namespace sparse_cp_ops

STABLE_TORCH_LIBRARY_IMPL(sparse_cp_ops, CPU, m) {
  m.impl("sparse_mla_fp8_cp", TORCH_BOX(&sparse_cp_ops::sparse_mla_fp8_cp));
}
