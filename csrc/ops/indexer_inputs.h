// The six tensors that indexer_topk_ragged_cp and indexer_scores_ragged_cp share: checks and parameters.
#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "../kv_record.h"
#include "../new_tensor.h"
#include "../tensor_checks.h"

namespace sparse_cp_ops {

inline constexpr int64_t kMaxIndexHeads = 64;
inline constexpr uint8_t kF16MaxByte = 0x36;  // 0.875 as e4m3: the largest |q8| of precision "f16" (q_absmax 0.875)

struct IndexerInputs {
  const uint8_t* q_fp8;        // [rows, heads, 128] e4m3
  const float* q_weights;      // [rows, heads]
  const uint8_t* cache;        // [pages] pages of page_size * 132 bytes, page_stride bytes apart
  const int32_t* block_table;  // [requests, table_width], rows table_stride entries apart
  const int32_t* req_ids;      // [rows]
  const int32_t* kv_lens;      // [rows]
  int64_t rows, heads;
  int64_t pages, page_size, page_stride;
  int64_t requests, table_width, table_stride;
  bool f16;

  int64_t capacity() const { return table_width * page_size; }  // positions that a request can have; fits int32

  // Keys that the row sees: a pad none, a length beyond the block table is cut, a negative one counts as 0.
  int64_t keys_of(int64_t row) const {
    if (req_ids[row] < 0 || req_ids[row] >= requests) return 0;
    return std::clamp<int64_t>(kv_lens[row], 0, capacity());
  }
};

inline IndexerInputs check_indexer_inputs(const Tensor& q_fp8, const Tensor& q_weights, const Tensor& indexer_cache,
                                          const Tensor& block_table, const Tensor& req_ids, const Tensor& kv_lens,
                                          const std::string& precision) {
  check_tensor(q_fp8, "q_fp8", q_fp8, "q_fp8", ScalarType::Byte, {kAny, kAny, kIndexDim});
  const int64_t rows = q_fp8.size(0), heads = q_fp8.size(1);
  SCO_CHECK(heads >= 8 && heads <= kMaxIndexHeads && heads % 8 == 0,
            "q_fp8: expected 8, 16, 24, 32, 40, 48, 56 or 64 heads, got ", heads, " (shape ", shape_string(q_fp8), ")");
  check_contiguous(q_fp8, "q_fp8");
  check_alignment(q_fp8, "q_fp8", 16);
  check_tensor(q_weights, "q_weights", q_fp8, "q_fp8", ScalarType::Float, {rows, heads});
  check_contiguous(q_weights, "q_weights");

  check_tensor(indexer_cache, "indexer_cache", q_fp8, "q_fp8", ScalarType::Byte, {kAny, kAny});
  const int64_t pages = indexer_cache.size(0), page_bytes = indexer_cache.size(1);
  const int64_t page_size = page_bytes / kIndexRecordBytes;
  SCO_CHECK(page_bytes % kIndexRecordBytes == 0 && is_supported_page_size(page_size),
            "indexer_cache: expected [pages, page_size*132] with page_size 16, 32, 64 or 128, got shape ",
            shape_string(indexer_cache));
  check_last_contiguous(indexer_cache, "indexer_cache");
  const int64_t page_stride = pages > 1 ? indexer_cache.stride(0) : page_bytes;
  SCO_CHECK(page_stride % 16 == 0, "indexer_cache: expected a page stride that is a multiple of 16 bytes, got ",
            page_stride);
  check_alignment(indexer_cache, "indexer_cache", 16);

  check_tensor(block_table, "block_table", q_fp8, "q_fp8", ScalarType::Int, {kAny, kAny});
  check_last_contiguous(block_table, "block_table");
  const int64_t requests = block_table.size(0), table_width = block_table.size(1);
  SCO_CHECK(table_width <= std::numeric_limits<int32_t>::max() / page_size, "block_table: expected at most ",
            std::numeric_limits<int32_t>::max() / page_size, " columns (32-bit positions), got shape ",
            shape_string(block_table));
  check_tensor(req_ids, "req_ids", q_fp8, "q_fp8", ScalarType::Int, {rows});
  check_contiguous(req_ids, "req_ids");
  check_tensor(kv_lens, "kv_lens", q_fp8, "q_fp8", ScalarType::Int, {rows});
  check_contiguous(kv_lens, "kv_lens");
  SCO_CHECK(precision == "fp32" || precision == "f16", "precision: expected \"fp32\" or \"f16\", got \"", precision,
            "\"");

  return {static_cast<const uint8_t*>(q_fp8.data_ptr()),
          static_cast<const float*>(q_weights.data_ptr()),
          static_cast<const uint8_t*>(indexer_cache.data_ptr()),
          static_cast<const int32_t*>(block_table.data_ptr()),
          static_cast<const int32_t*>(req_ids.data_ptr()),
          static_cast<const int32_t*>(kv_lens.data_ptr()),
          rows,
          heads,
          pages,
          page_size,
          page_stride,
          requests,
          table_width,
          requests > 1 ? block_table.stride(0) : table_width,
          precision == "f16"};
}

// Values that the ops tolerate but no caller means (SPARSE_CP_OPS_CHECK=1). block_table, req_ids, kv_lens and, in f16
// mode, q_fp8 must point to host memory.
inline void check_indexer_values(const IndexerInputs& in) {
  std::vector<int64_t> longest(in.requests, 0);
  for (int64_t row = 0; row < in.rows; ++row) {
    const int64_t request = in.req_ids[row], length = in.kv_lens[row];
    SCO_CHECK(request >= -1 && request < in.requests, "req_ids: row ", row,
              ": expected -1 (a pad) or a request in [0, ", in.requests, "), got ", request);
    if (request < 0) continue;
    SCO_CHECK(length >= 0 && length <= in.capacity(), "kv_lens: row ", row, ", request ", request, ": expected 0..",
              in.capacity(), " (block table width * page_size), got ", length);
    longest[request] = std::max(longest[request], length);
  }
  for (int64_t request = 0; request < in.requests; ++request) {
    for (int64_t position = 0; position < longest[request]; position += in.page_size) {
      const int64_t page = in.block_table[request * in.table_stride + position / in.page_size];
      SCO_CHECK(page >= 0 && page < in.pages, "block_table: request ", request, ", position ", position,
                ": expected a page in [0, ", in.pages, "), got ", page);
    }
  }
  if (!in.f16) return;
  for (int64_t row = 0; row < in.rows; ++row) {
    for (int64_t i = 0; i < in.heads * kIndexDim; ++i) {
      const int magnitude = in.q_fp8[row * in.heads * kIndexDim + i] & 0x7F;
      SCO_CHECK(magnitude <= kF16MaxByte || magnitude == 0x7F, "q_fp8: row ", row, ", head ", i / kIndexDim,
                ": precision \"f16\" expects |q8| <= 0.875 (quantise with q_absmax=0.875), got the byte ", magnitude);
    }
  }
}

}  // namespace sparse_cp_ops
