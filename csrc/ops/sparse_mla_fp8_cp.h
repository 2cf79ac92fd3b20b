// sparse_mla_fp8_cp: checks and parameters, shared by the CPU and CUDA kernels.
#pragma once

#include <cmath>
#include <optional>
#include <string>

#include "../kv_record.h"
#include "../new_tensor.h"
#include "../tensor_checks.h"

#if defined(__CUDACC__)
#define SCO_HOST_DEVICE __host__ __device__
#else
#define SCO_HOST_DEVICE
#endif

namespace sparse_cp_ops {

inline constexpr int64_t kIndexListMultiple = 64;  // widths that every kernel's key block divides

struct SparseMlaParams {
  const void* q;               // bf16 [rows, heads, 576], strides below, last one 1
  const uint8_t* kv_cache;     // [num_pages, page_size, 656], pages page_stride bytes apart
  const int32_t* indices;      // [rows, topk], rows indices_stride apart
  const int32_t* block_table;  // [requests, table_width], rows table_stride apart; read only if paged
  const int32_t* req_ids;      // [rows], read only if paged
  const int32_t* kv_lens;      // [rows], read only if paged
  void* out;                   // bf16 [rows, heads, 512]
  float* lse;                  // [rows, heads]
  int64_t rows, heads, topk;
  int64_t num_pages, page_size, requests, table_width;
  int64_t q_row_stride, q_head_stride;  // elements
  int64_t page_stride;                  // bytes
  int64_t indices_stride, table_stride;
  float softmax_scale;
  bool paged;            // indices are positions of a request; false: physical slots
  bool low_precision;    // precision="fp8"
  bool batch_invariant;  // false: a split of the keys may depend on the number of rows
};

// Byte offset of the record behind one entry of a row's index list, -1 if the entry is not used. `kv_len` and `table`
// (the row of block_table) are read only with a block table; a pad row has kv_len 0.
SCO_HOST_DEVICE inline int64_t mla_record_offset(const SparseMlaParams& p, int32_t index, int32_t kv_len,
                                                 const int32_t* table) {
  if (index < 0) return -1;
  int64_t page = index / static_cast<int32_t>(p.page_size);
  const int64_t offset = index - page * p.page_size;
  if (p.paged) {
    if (index >= kv_len || page >= p.table_width) return -1;
    page = table[page];
    if (page < 0) return -1;
  }
  if (page >= p.num_pages) return -1;
  return page * p.page_stride + offset * kMlaRecordBytes;
}

struct SparseMlaCall {
  SparseMlaParams params;
  Tensor out, lse;
};

inline bool is_supported_head_count(int64_t heads) {
  return heads == 8 || heads == 16 || heads == 32 || heads == 64 || heads == 128;
}

inline SparseMlaCall prepare_sparse_mla_fp8_cp(const Tensor& q, const Tensor& kv_cache, const Tensor& indices,
                                               const std::optional<Tensor>& block_table,
                                               const std::optional<Tensor>& req_ids,
                                               const std::optional<Tensor>& kv_lens, double softmax_scale,
                                               const std::string& precision, bool batch_invariant) {
  check_tensor(q, "q", q, "q", ScalarType::BFloat16, {kAny, kAny, kQkDim});
  const int64_t rows = q.size(0), heads = q.size(1);
  SCO_CHECK(is_supported_head_count(heads), "q: expected 8, 16, 32, 64 or 128 heads, got ", heads, " (shape ",
            shape_string(q), ")");
  check_last_contiguous(q, "q");

  check_tensor(kv_cache, "kv_cache", q, "q", ScalarType::Byte, {kAny, kAny, kMlaRecordBytes});
  const int64_t page_size = kv_cache.size(1);
  SCO_CHECK(is_supported_page_size(page_size), "kv_cache: expected a page size of 16, 32, 64 or 128, got ", page_size,
            " (shape ", shape_string(kv_cache), ")");
  check_last_contiguous(kv_cache, "kv_cache");
  SCO_CHECK(kv_cache.size(0) == 0 || kv_cache.stride(1) == kMlaRecordBytes, "kv_cache: expected records ",
            kMlaRecordBytes, " bytes apart, got stride ", kv_cache.stride(1), " in dimension 1");
  SCO_CHECK(kv_cache.size(0) <= 1 || kv_cache.stride(0) % 16 == 0,
            "kv_cache: expected a page stride that is a multiple of 16, got ", kv_cache.stride(0));
  check_alignment(kv_cache, "kv_cache", 16);

  check_tensor(indices, "indices", q, "q", ScalarType::Int, {rows, kAny});
  const int64_t topk = indices.size(1);
  SCO_CHECK(topk % kIndexListMultiple == 0, "indices: expected a width that is a multiple of ", kIndexListMultiple,
            " (pad with -1), got ", topk);
  check_last_contiguous(indices, "indices");

  const bool paged = block_table.has_value();
  SCO_CHECK(paged == req_ids.has_value() && paged == kv_lens.has_value(),
            "block_table, req_ids, kv_lens: expected all three (request-local indices) or none (physical slots), got ",
            paged ? "block_table" : "no block_table", ", ", req_ids.has_value() ? "req_ids" : "no req_ids", ", ",
            kv_lens.has_value() ? "kv_lens" : "no kv_lens");
  if (paged) {
    check_tensor(*block_table, "block_table", q, "q", ScalarType::Int, {kAny, kAny});
    check_last_contiguous(*block_table, "block_table");
    check_tensor(*req_ids, "req_ids", q, "q", ScalarType::Int, {rows});
    check_contiguous(*req_ids, "req_ids");
    check_tensor(*kv_lens, "kv_lens", q, "q", ScalarType::Int, {rows});
    check_contiguous(*kv_lens, "kv_lens");
  }
  SCO_CHECK(std::isfinite(static_cast<float>(softmax_scale)), "softmax_scale: expected a finite number, got ",
            softmax_scale);
  SCO_CHECK(precision == "high" || precision == "fp8", "precision: expected \"high\" or \"fp8\", got \"", precision,
            "\"");

  Tensor out = new_tensor(q, {rows, heads, kLatentDim});
  Tensor lse = new_tensor(q, {rows, heads}, ScalarType::Float);
  SparseMlaParams params{};
  params.q = q.data_ptr();
  params.kv_cache = static_cast<const uint8_t*>(kv_cache.data_ptr());
  params.indices = static_cast<const int32_t*>(indices.data_ptr());
  if (paged) {
    params.block_table = static_cast<const int32_t*>(block_table->data_ptr());
    params.req_ids = static_cast<const int32_t*>(req_ids->data_ptr());
    params.kv_lens = static_cast<const int32_t*>(kv_lens->data_ptr());
    params.requests = block_table->size(0);
    params.table_width = block_table->size(1);
    params.table_stride = block_table->stride(0);
  }
  params.out = out.data_ptr();
  params.lse = static_cast<float*>(lse.data_ptr());
  params.rows = rows;
  params.heads = heads;
  params.topk = topk;
  params.num_pages = kv_cache.size(0);
  params.page_size = page_size;
  params.q_row_stride = q.stride(0);
  params.q_head_stride = q.stride(1);
  params.page_stride = kv_cache.stride(0);
  params.indices_stride = indices.stride(0);
  params.paged = paged;
  params.softmax_scale = static_cast<float>(softmax_scale);
  params.low_precision = precision == "fp8";
  params.batch_invariant = batch_invariant;
  return {params, out, lse};
}

// SPARSE_CP_OPS_CHECK=1: request ids and lengths out of range, a listed position of a request that has no page, or a
// slot outside the cache raise instead of being skipped. All pointers it reads (indices, block_table, req_ids, kv_lens)
// must be host memory.
inline void check_sparse_mla_values(const SparseMlaParams& p) {
  const bool paged = p.paged;
  for (int64_t row = 0; row < p.rows; ++row) {
    const int64_t request = paged ? p.req_ids[row] : 0;
    SCO_CHECK(!paged || (request >= -1 && request < p.requests), "req_ids: row ", row,
              ": expected -1 (a pad) or a request in [0, ", p.requests, "), got ", request);
    if (request < 0) continue;
    const int64_t capacity = p.table_width * p.page_size;
    SCO_CHECK(!paged || (p.kv_lens[row] >= 0 && p.kv_lens[row] <= capacity), "kv_lens: row ", row, ", request ",
              request, ": expected 0..", capacity, " (block table width * page_size), got ", p.kv_lens[row]);
    const int32_t* table = paged ? p.block_table + request * p.table_stride : nullptr;
    for (int64_t i = 0; i < p.topk; ++i) {
      const int32_t index = p.indices[row * p.indices_stride + i];
      if (index < 0 || (paged && index >= p.kv_lens[row])) continue;  // a hole
      if (mla_record_offset(p, index, paged ? p.kv_lens[row] : 0, table) >= 0) continue;
      SCO_CHECK(paged, "indices: row ", row, ", column ", i, ": expected a slot below ", p.num_pages * p.page_size,
                ", got ", index);
      fail("block_table: request ", request, ", position ", index, ": expected a page in [0, ", p.num_pages, "), got ",
           table[index / p.page_size]);
    }
  }
}

}  // namespace sparse_cp_ops
