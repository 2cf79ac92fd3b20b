// read_cache_store on the CPU: slots of a store to pages of one layer.
#include <torch/csrc/stable/library.h>

#include "cache_store.h"

namespace sparse_cp_ops {
namespace {

void read_cache_store(const Tensor& mla_store, std::optional<Tensor> indexer_store, const Tensor& store_slots,
                      const Tensor& page_ids, Tensor mla_cache, std::optional<Tensor> indexer_cache) {
  const CacheStoreParams p =
      prepare_cache_store(mla_cache, indexer_cache, page_ids, store_slots, mla_store, indexer_store, false);
  if (value_checks_enabled()) check_page_pairs(p, page_ids, store_slots, false);
  copy_pages(p, false);
}

}  // namespace
}  // namespace sparse_cp_ops

STABLE_TORCH_LIBRARY_IMPL(sparse_cp_ops, CPU, m) {
  m.impl("read_cache_store", TORCH_BOX(&sparse_cp_ops::read_cache_store));
}
