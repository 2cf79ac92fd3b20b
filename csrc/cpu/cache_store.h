// Copies pages between the caches of a layer and a store; write_cache_store and read_cache_store differ in direction.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <cstring>

#include "../ops/cache_store.h"

namespace sparse_cp_ops {

inline void copy_pages(const CacheStoreParams& p, bool writes_store) {
  constexpr int64_t kGrain = 4;  // pages a thread: 200 KB at page_size 64, some 20 us
  const PageArrays& from = writes_store ? p.cache : p.store;
  const PageArrays& to = writes_store ? p.store : p.cache;
  torch::stable::parallel_for(0, p.pairs, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t pair = begin; pair < end; ++pair) {
      const int64_t page = p.page_ids[pair], slot = p.store_slots[pair];
      if (page < 0 || page >= p.cache.pages || slot < 0 || slot >= p.store.pages) continue;
      const int64_t source = writes_store ? page : slot, target = writes_store ? slot : page;
      std::memcpy(to.mla + target * to.mla_stride, from.mla + source * from.mla_stride, p.page_size * kMlaRecordBytes);
      if (from.indexer == nullptr) continue;
      std::memcpy(to.indexer + target * to.indexer_stride, from.indexer + source * from.indexer_stride,
                  p.page_size * kIndexRecordBytes);
    }
  });
}

}  // namespace sparse_cp_ops
