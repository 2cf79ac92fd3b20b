// write_cache_store and read_cache_store: checks and parameters, shared by both ops on the CPU and CUDA.
#pragma once

#include <unordered_map>

#include "paged_cache.h"

namespace sparse_cp_ops {

inline constexpr int64_t kPageVectorBytes = 16;  // pages are moved in pieces of this size

// The two caches of one layer or of one layer in a store: arrays of pages.
struct PageArrays {
  uint8_t* mla;                               // [pages, page_size, 656]
  uint8_t* indexer;                           // [pages, page_size * 132], nullptr: none
  int64_t pages, mla_stride, indexer_stride;  // strides in bytes
};

struct CacheStoreParams {
  PageArrays cache;
  PageArrays store;
  const int32_t* page_ids;     // [pairs], pages of the cache
  const int64_t* store_slots;  // [pairs], pages of the store
  int64_t pairs, page_size;
};

inline void check_page_arrays(const Tensor& mla, const char* mla_name, const std::optional<Tensor>& indexer,
                              const char* indexer_name, bool written, const Tensor& like, const char* like_name,
                              PageArrays& pages, int64_t& page_size) {
  page_size = check_mla_cache(mla, mla_name, like, like_name);
  check_row_alignment(mla, mla_name, kPageVectorBytes);
  if (written) check_writable(mla, mla_name);
  pages = {static_cast<uint8_t*>(mla.data_ptr()), nullptr, mla.size(0), mla.stride(0), 0};
  if (!indexer.has_value()) return;
  check_indexer_cache(*indexer, indexer_name, mla.size(0), page_size, mla, mla_name);
  check_row_alignment(*indexer, indexer_name, kPageVectorBytes);
  if (written) check_writable(*indexer, indexer_name);
  pages.indexer = static_cast<uint8_t*>(indexer->data_ptr());
  pages.indexer_stride = indexer->stride(0);
}

// The store may lie in host memory beside CUDA caches; the CUDA kernel checks that it is pinned.
inline CacheStoreParams prepare_cache_store(const Tensor& mla_cache, const std::optional<Tensor>& indexer_cache,
                                            const Tensor& page_ids, const Tensor& store_slots, const Tensor& mla_store,
                                            const std::optional<Tensor>& indexer_store, bool writes_store) {
  SCO_CHECK(indexer_cache.has_value() == indexer_store.has_value(),
            "indexer_cache, indexer_store: expected both or neither, got only ",
            indexer_cache.has_value() ? "indexer_cache" : "indexer_store");
  CacheStoreParams p{};
  int64_t store_page_size = 0;
  check_page_arrays(mla_cache, "mla_cache", indexer_cache, "indexer_cache", !writes_store, mla_cache, "mla_cache",
                    p.cache, p.page_size);
  const bool host_store = mla_cache.is_cuda() && mla_store.is_cpu();
  check_page_arrays(mla_store, "mla_store", indexer_store, "indexer_store", writes_store,
                    host_store ? mla_store : mla_cache, host_store ? "mla_store" : "mla_cache", p.store,
                    store_page_size);
  SCO_CHECK(store_page_size == p.page_size, "mla_store: expected a page_size of ", p.page_size,
            " (that of mla_cache) in dimension 1, got ", store_page_size);
  check_tensor(page_ids, "page_ids", mla_cache, "mla_cache", ScalarType::Int, {kAny});
  check_contiguous(page_ids, "page_ids");
  check_tensor(store_slots, "store_slots", mla_cache, "mla_cache", ScalarType::Long, {page_ids.size(0)});
  check_contiguous(store_slots, "store_slots");
  p.page_ids = static_cast<const int32_t*>(page_ids.data_ptr());
  p.store_slots = static_cast<const int64_t*>(store_slots.data_ptr());
  p.pairs = page_ids.size(0);
  return p;
}

// Under SPARSE_CP_OPS_CHECK: -1 skips a pair, any other id has to be in its tensor, and no target is written twice.
inline void check_page_pairs(const CacheStoreParams& p, const Tensor& page_ids, const Tensor& store_slots,
                             bool writes_store) {
  const Tensor host_pages = host_copy(page_ids), host_slots = host_copy(store_slots);
  const auto* pages = static_cast<const int32_t*>(host_pages.data_ptr());
  const auto* slots = static_cast<const int64_t*>(host_slots.data_ptr());
  std::unordered_map<int64_t, int64_t> written_by;
  for (int64_t pair = 0; pair < p.pairs; ++pair) {
    SCO_CHECK(pages[pair] >= -1 && pages[pair] < p.cache.pages, "page_ids: pair ", pair,
              ": expected -1 or a page in [0, ", p.cache.pages, "), got ", pages[pair]);
    SCO_CHECK(slots[pair] >= -1 && slots[pair] < p.store.pages, "store_slots: pair ", pair,
              ": expected -1 or a slot in [0, ", p.store.pages, "), got ", slots[pair]);
    if (pages[pair] < 0 || slots[pair] < 0) continue;
    const int64_t target = writes_store ? slots[pair] : pages[pair];
    const auto [other, first] = written_by.emplace(target, pair);
    SCO_CHECK(first, writes_store ? "store_slots" : "page_ids", ": pair ", pair, ": expected a target of its own, got ",
              target, ", the target of pair ", other->second);
  }
}

}  // namespace sparse_cp_ops
