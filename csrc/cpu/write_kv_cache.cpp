// write_kv_cache on the CPU: gathered records to their slots of the paged caches.
#include "../ops/write_kv_cache.h"

#include <torch/csrc/stable/library.h>

#include <array>
#include <atomic>
#include <cstring>
#include <mutex>

#include "../ops/op_functions.h"
#include "row_loop.h"

namespace sparse_cp_ops {
namespace {

// Two rows on one slot: one of them wins, whole, both records from the same row. Threads take the slot's lock.
class SlotLocks {
 public:
  std::mutex& of(int64_t slot) { return locks_[slot % locks_.size()]; }

 private:
  std::array<std::mutex, 1024> locks_;
};

const uint8_t* record_at(const RecordRows& records, int64_t row) {
  return records.data + row / records.block_rows * records.block_stride + row % records.block_rows * records.row_stride;
}

void write_rows(const WriteKvCacheParams& p, SlotLocks& locks, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const int64_t slot = p.slot_of(p.target_of(row));
    if (slot < 0) continue;
    const int64_t page = slot >> p.page_shift, offset = slot & (p.page_size - 1);
    const std::lock_guard guard(locks.of(slot));
    std::memcpy(p.mla_cache + page * p.mla_page_stride + offset * kMlaRecordBytes, record_at(p.mla_records, row),
                kMlaRecordBytes);
    if (p.k_records.data == nullptr) continue;
    const uint8_t* k_record = record_at(p.k_records, row);
    uint8_t* index_page = p.indexer_cache + page * p.indexer_page_stride;
    std::memcpy(index_page + index_values_offset(offset), k_record, kIndexDim);
    std::memcpy(index_page + index_scale_offset(p.page_size, offset), k_record + kIndexDim, sizeof(float));
  }
}

}  // namespace

void write_kv_cache(const Tensor& mla_records, std::optional<Tensor> k_records, std::optional<Tensor> req_ids,
                    std::optional<Tensor> positions, std::optional<Tensor> block_table, Tensor mla_cache,
                    std::optional<Tensor> indexer_cache, std::optional<Tensor> slots) {
  const WriteKvCacheParams p =
      prepare_write_kv_cache(mla_records, k_records, req_ids, positions, block_table, mla_cache, indexer_cache, slots);
  if (value_checks_enabled()) check_write_targets(p, req_ids, positions, block_table, slots);
  if (p.rows == 0) return;
  SlotLocks locks;
  parallel_rows(p.rows, kMlaRecordBytes, [&](int64_t begin, int64_t end) { write_rows(p, locks, begin, end); });
}

}  // namespace sparse_cp_ops

STABLE_TORCH_LIBRARY_IMPL(sparse_cp_ops, CPU, m) {
  m.impl("write_kv_cache", TORCH_BOX(&sparse_cp_ops::write_kv_cache));
}
