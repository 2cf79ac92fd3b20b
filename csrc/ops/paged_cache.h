// Checks of the two paged caches: page size from the shape, bytes of a page contiguous, pages at any stride.
#pragma once

#include "../kv_record.h"
#include "../value_checks.h"

namespace sparse_cp_ops {

// Checks an MLA cache [num_pages, page_size, 656] and returns its page size.
inline int64_t check_mla_cache(const Tensor& cache, const char* name, const Tensor& like, const char* like_name) {
  check_tensor(cache, name, like, like_name, ScalarType::Byte, {kAny, kAny, kMlaRecordBytes});
  const int64_t page_size = cache.size(1);
  SCO_CHECK(is_supported_page_size(page_size), name, ": expected a page_size of 16, 32, 64 or 128 in dimension 1, got ",
            page_size);
  check_last_contiguous(cache, name);
  SCO_CHECK(cache.stride(1) == kMlaRecordBytes, name, ": expected contiguous pages, got stride ", cache.stride(1),
            " in dimension 1");
  check_row_alignment(cache, name, kMlaRecordAlignment);
  return page_size;
}

// Checks an indexer cache [num_pages, page_size * 132].
inline void check_indexer_cache(const Tensor& cache, const char* name, int64_t num_pages, int64_t page_size,
                                const Tensor& like, const char* like_name) {
  check_tensor(cache, name, like, like_name, ScalarType::Byte, {num_pages, page_size * kIndexRecordBytes});
  check_last_contiguous(cache, name);
  check_row_alignment(cache, name, kIndexRecordAlignment);
}

// Under SPARSE_CP_OPS_CHECK: -1 is a hole, any other slot has to be in the cache.
inline void check_slots(const Tensor& slots, int64_t num_slots) {
  const Tensor host = host_copy(slots);
  const int64_t* values = static_cast<const int64_t*>(host.data_ptr());
  for (int64_t row = 0; row < host.size(0); ++row)
    SCO_CHECK(values[row] >= -1 && values[row] < num_slots, "slots: row ", row, ": expected -1 or a slot in [0, ",
              num_slots, "), got ", values[row]);
}

}  // namespace sparse_cp_ops
