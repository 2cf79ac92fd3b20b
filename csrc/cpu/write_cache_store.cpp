// write_cache_store on the CPU: pages of one layer to slots of a store.
#include <torch/csrc/stable/library.h>

#include "cache_store.h"

namespace sparse_cp_ops {
namespace {

void write_cache_store(const Tensor& mla_cache, std::optional<Tensor> indexer_cache, const Tensor& page_ids,
                       const Tensor& store_slots, Tensor mla_store, std::optional<Tensor> indexer_store) {
  const CacheStoreParams p =
      prepare_cache_store(mla_cache, indexer_cache, page_ids, store_slots, mla_store, indexer_store, true);
  if (value_checks_enabled()) check_page_pairs(p, page_ids, store_slots, true);
  copy_pages(p, true);
}

}  // namespace
}  // namespace sparse_cp_ops

STABLE_TORCH_LIBRARY_IMPL(sparse_cp_ops, CPU, m) {
  m.impl("write_cache_store", TORCH_BOX(&sparse_cp_ops::write_cache_store));
}
