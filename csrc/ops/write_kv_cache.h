// write_kv_cache: checks, parameters and the slot of a row, shared by the CPU and CUDA kernels.
#pragma once

#include "paged_cache.h"

namespace sparse_cp_ops {

// Rows of one or several equal blocks: row i starts at (i / block_rows) * block_stride + (i % block_rows) * row_stride.
struct RecordRows {
  const uint8_t* data;  // nullptr: none given
  int64_t block_rows, block_stride, row_stride;
};

struct WriteKvCacheParams {
  RecordRows mla_records;      // [rows, 656]
  RecordRows k_records;        // [rows, 132]
  const int32_t* req_ids;      // [rows], nullptr in the slots form
  const int32_t* positions;    // [rows]
  const int32_t* block_table;  // [num_requests, table_width]
  const int64_t* slots;        // [rows], nullptr in the block table form
  uint8_t* mla_cache;          // [num_pages, page_size, 656]
  uint8_t* indexer_cache;      // [num_pages, page_size * 132]
  int64_t rows, num_requests, table_width, table_stride;
  int64_t num_pages, page_size, page_shift;  // page_size = 1 << page_shift
  int64_t mla_page_stride, indexer_page_stride;

  // Where a row goes, as its arguments say it.
  struct Target {
    int64_t slot;      // in the slots form
    int64_t request;   // in the block table form
    int64_t position;  // likewise
  };
  SCO_HOST_DEVICE Target target_of(int64_t row) const {
    if (slots != nullptr) return {slots[row], 0, 0};
    return {0, req_ids[row], positions[row]};
  }

  // Physical slot of a target, -1 where nothing is written: pads, positions or pages that don't exist.
  SCO_HOST_DEVICE int64_t slot_of(const Target& target) const {
    if (slots != nullptr) return target.slot >= 0 && target.slot < num_pages << page_shift ? target.slot : -1;
    const int64_t request = target.request, position = target.position;
    if (request < 0 || request >= num_requests || position < 0) return -1;
    const int64_t column = position >> page_shift;
    if (column >= table_width) return -1;
    const int64_t page = block_table[request * table_stride + column];
    if (page < 0 || page >= num_pages) return -1;
    return (page << page_shift) + (position & (page_size - 1));
  }
};

inline RecordRows check_records(const Tensor& records, const char* name, const Tensor& like, const char* like_name,
                                int64_t record_bytes, int64_t alignment) {
  SCO_CHECK(records.dim() == 2 || records.dim() == 3, name, ": expected 2 or 3 dimensions, got ", records.dim(),
            " (shape ", shape_string(records), ")");
  const bool blocks = records.dim() == 3;
  check_device(records, name, like, like_name);
  check_dtype(records, name, ScalarType::Byte);
  if (blocks) check_shape(records, name, {kAny, kAny, record_bytes});
  else check_shape(records, name, {kAny, record_bytes});
  check_last_contiguous(records, name);
  check_row_alignment(records, name, alignment);
  const auto* data = static_cast<const uint8_t*>(records.data_ptr());
  if (blocks) return {data, records.size(1), records.stride(0), records.stride(1)};
  return {data, records.size(0), 0, records.stride(0)};
}

// Arguments that only make sense together.
inline void check_given_together(const char* group, std::initializer_list<bool> given) {
  int64_t count = 0;
  for (bool one : given) count += one;
  SCO_CHECK(count == 0 || count == static_cast<int64_t>(given.size()), group, ": expected all of them or none, got ",
            count, " of ", given.size());
}

inline void check_caches_overlap_none(const Tensor& mla_cache, const std::optional<Tensor>& indexer_cache,
                                      std::initializer_list<NamedTensor> read) {
  check_no_overlap(mla_cache, "mla_cache", read);
  if (indexer_cache.has_value()) check_no_overlap(*indexer_cache, "indexer_cache", read);
}

inline WriteKvCacheParams prepare_write_kv_cache(const Tensor& mla_records, const std::optional<Tensor>& k_records,
                                                 const std::optional<Tensor>& req_ids,
                                                 const std::optional<Tensor>& positions,
                                                 const std::optional<Tensor>& block_table, const Tensor& mla_cache,
                                                 const std::optional<Tensor>& indexer_cache,
                                                 const std::optional<Tensor>& slots) {
  const char* like = "mla_records";
  check_given_together("req_ids, positions, block_table",
                       {req_ids.has_value(), positions.has_value(), block_table.has_value()});
  check_given_together("k_records, indexer_cache", {k_records.has_value(), indexer_cache.has_value()});
  SCO_CHECK(slots.has_value() != req_ids.has_value(),
            "slots: expected either slots or req_ids, positions and block_table, got ",
            slots.has_value() ? "both" : "neither");

  WriteKvCacheParams p{};
  p.mla_records = check_records(mla_records, like, mla_records, like, kMlaRecordBytes, kMlaRecordAlignment);
  p.rows = mla_records.dim() == 3 ? mla_records.size(0) * mla_records.size(1) : mla_records.size(0);
  p.page_size = check_mla_cache(mla_cache, "mla_cache", mla_records, like);
  check_writable(mla_cache, "mla_cache");
  p.mla_cache = static_cast<uint8_t*>(mla_cache.data_ptr());
  p.num_pages = mla_cache.size(0);
  p.mla_page_stride = mla_cache.stride(0);
  p.page_shift = page_shift_of(p.page_size);
  if (k_records.has_value()) {
    p.k_records = check_records(*k_records, "k_records", mla_records, like, kIndexRecordBytes, kIndexRecordAlignment);
    if (mla_records.dim() == 3)
      check_shape(*k_records, "k_records", {mla_records.size(0), mla_records.size(1), kIndexRecordBytes});
    else check_shape(*k_records, "k_records", {mla_records.size(0), kIndexRecordBytes});
    check_indexer_cache(*indexer_cache, "indexer_cache", p.num_pages, p.page_size, mla_records, like);
    check_writable(*indexer_cache, "indexer_cache");
    p.indexer_cache = static_cast<uint8_t*>(indexer_cache->data_ptr());
    p.indexer_page_stride = indexer_cache->stride(0);
    check_caches_overlap_none(mla_cache, indexer_cache, {{"k_records", *k_records}});
  }
  check_caches_overlap_none(mla_cache, indexer_cache, {{like, mla_records}});
  if (slots.has_value()) {
    check_tensor(*slots, "slots", mla_records, like, ScalarType::Long, {p.rows});
    check_contiguous(*slots, "slots");
    check_caches_overlap_none(mla_cache, indexer_cache, {{"slots", *slots}});
    p.slots = static_cast<const int64_t*>(slots->data_ptr());
    return p;
  }
  check_tensor(*req_ids, "req_ids", mla_records, like, ScalarType::Int, {p.rows});
  check_tensor(*positions, "positions", mla_records, like, ScalarType::Int, {p.rows});
  check_tensor(*block_table, "block_table", mla_records, like, ScalarType::Int, {kAny, kAny});
  check_contiguous(*req_ids, "req_ids");
  check_contiguous(*positions, "positions");
  check_last_contiguous(*block_table, "block_table");
  check_caches_overlap_none(mla_cache, indexer_cache,
                            {{"req_ids", *req_ids}, {"positions", *positions}, {"block_table", *block_table}});
  p.req_ids = static_cast<const int32_t*>(req_ids->data_ptr());
  p.positions = static_cast<const int32_t*>(positions->data_ptr());
  p.block_table = static_cast<const int32_t*>(block_table->data_ptr());
  p.num_requests = block_table->size(0);
  p.table_width = block_table->size(1);
  p.table_stride = block_table->stride(0);
  return p;
}

// Under SPARSE_CP_OPS_CHECK: every row is a pad (req_id or slot -1) or lands on a page of the cache.
inline void check_write_targets(const WriteKvCacheParams& device, const std::optional<Tensor>& req_ids,
                                const std::optional<Tensor>& positions, const std::optional<Tensor>& block_table,
                                const std::optional<Tensor>& slots) {
  if (slots.has_value()) return check_slots(*slots, device.num_pages * device.page_size);
  const Tensor requests = host_copy(*req_ids), tokens = host_copy(*positions), table = host_copy(*block_table);
  const auto* request_of = static_cast<const int32_t*>(requests.data_ptr());
  const auto* position_of = static_cast<const int32_t*>(tokens.data_ptr());
  const auto* pages = static_cast<const int32_t*>(table.data_ptr());
  for (int64_t row = 0; row < device.rows; ++row) {
    const int64_t request = request_of[row], position = position_of[row];
    if (request == -1) continue;
    SCO_CHECK(request >= 0 && request < device.num_requests, "req_ids: row ", row, ": expected -1 or a request in [0, ",
              device.num_requests, "), got ", request);
    SCO_CHECK(position >= 0 && position < device.table_width * device.page_size, "positions: row ", row, ", request ",
              request, ": expected a position in [0, ", device.table_width * device.page_size,
              ") (the width of block_table), got ", position);
    const int64_t page = pages[request * device.table_width + position / device.page_size];
    SCO_CHECK(page >= 0 && page < device.num_pages, "block_table: row ", row, ", request ", request, ", position ",
              position, ": expected a page in [0, ", device.num_pages, "), got ", page);
  }
}

}  // namespace sparse_cp_ops
