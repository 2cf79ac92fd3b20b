// write_cache_store and read_cache_store on CUDA: one kernel that copies pages in 16-byte vectors, also to and from
// pinned host memory, which it reaches through its mapped address.
#include <torch/csrc/stable/library.h>

#include <algorithm>

#include "../../ops/cache_store.h"
#include "../launch.h"
#include "../value_checks.h"
#include "copy_piece.cuh"

namespace sparse_cp_ops {
namespace {

// A host bus is far slower than the device: that many blocks, 440 KB in flight, fill it and leave the other
// multiprocessors to the kernels beside this one.
constexpr int64_t kHostBlocks = 32;

struct CopyParams {
  PageArrays from, to;
  const int32_t* page_ids;     // [pairs]
  const int64_t* store_slots;  // [pairs]
  int64_t cache_pages, store_pages;
  int64_t pieces;   // in all pairs
  int piece_shift;  // log2 of the pieces of a page
  bool writes_store;
};

__global__ void __launch_bounds__(kCopyThreads) copy_pages_kernel(const __grid_constant__ CopyParams p) {
  for (int64_t piece = blockIdx.x; piece < p.pieces; piece += gridDim.x) {
    const int64_t pair = piece >> p.piece_shift;
    const int index = static_cast<int>(piece & ((1 << p.piece_shift) - 1));
    const int64_t page = p.page_ids[pair], slot = p.store_slots[pair];
    if (page < 0 || page >= p.cache_pages || slot < 0 || slot >= p.store_pages) continue;
    const int64_t source = p.writes_store ? page : slot, target = p.writes_store ? slot : page;
    copy_piece(p.from.mla + source * p.from.mla_stride,
               p.from.indexer != nullptr ? p.from.indexer + source * p.from.indexer_stride : nullptr,
               p.to.mla + target * p.to.mla_stride, p.to.indexer + target * p.to.indexer_stride, index);
  }
}

// The address at which kernels reach a host tensor.
uint8_t* mapped_address(uint8_t* host, const char* name) {
  if (host == nullptr) return nullptr;
  cudaPointerAttributes attributes{};
  check_cuda(cudaPointerGetAttributes(&attributes, host), "cudaPointerGetAttributes");
  SCO_CHECK(attributes.type == cudaMemoryTypeHost && attributes.devicePointer != nullptr, name,
            ": expected pinned host memory beside CUDA caches, got memory that is not pinned");
  return static_cast<uint8_t*>(attributes.devicePointer);
}

void copy_pages(const CacheStoreParams& checked, bool writes_store, bool host_store, const Tensor& page_ids,
                const Tensor& store_slots) {
  torch::stable::accelerator::DeviceGuard guard(page_ids.get_device_index());
  CacheStoreParams p = checked;
  if (host_store) {
    p.store.mla = mapped_address(p.store.mla, "mla_store");
    p.store.indexer = mapped_address(p.store.indexer, "indexer_store");
  }
  cudaStream_t stream = current_stream(page_ids.get_device_index());
  if (value_checks_possible(stream)) check_page_pairs(p, page_ids, store_slots, writes_store);
  if (p.pairs == 0) return;
  const PageArrays &from = writes_store ? p.cache : p.store, &to = writes_store ? p.store : p.cache;
  const int piece_shift = piece_shift_of(p.page_size);
  const int64_t pieces = p.pairs << piece_shift;
  constexpr int64_t kMaxBlocks = INT32_MAX;  // of a grid's first dimension
  const dim3 grid(static_cast<unsigned>(std::min(pieces, host_store ? kHostBlocks : kMaxBlocks)));
  copy_pages_kernel<<<grid, kCopyThreads, 0, stream>>>(
      {from, to, p.page_ids, p.store_slots, p.cache.pages, p.store.pages, pieces, piece_shift, writes_store});
  check_launch(writes_store ? "write_cache_store" : "read_cache_store");
}

void write_cache_store(const Tensor& mla_cache, std::optional<Tensor> indexer_cache, const Tensor& page_ids,
                       const Tensor& store_slots, Tensor mla_store, std::optional<Tensor> indexer_store) {
  const CacheStoreParams p =
      prepare_cache_store(mla_cache, indexer_cache, page_ids, store_slots, mla_store, indexer_store, true);
  copy_pages(p, true, mla_store.is_cpu(), page_ids, store_slots);
}

void read_cache_store(const Tensor& mla_store, std::optional<Tensor> indexer_store, const Tensor& store_slots,
                      const Tensor& page_ids, Tensor mla_cache, std::optional<Tensor> indexer_cache) {
  const CacheStoreParams p =
      prepare_cache_store(mla_cache, indexer_cache, page_ids, store_slots, mla_store, indexer_store, false);
  copy_pages(p, false, mla_store.is_cpu(), page_ids, store_slots);
}

}  // namespace
}  // namespace sparse_cp_ops

STABLE_TORCH_LIBRARY_IMPL(sparse_cp_ops, CUDA, m) {
  m.impl("write_cache_store", TORCH_BOX(&sparse_cp_ops::write_cache_store));
  m.impl("read_cache_store", TORCH_BOX(&sparse_cp_ops::read_cache_store));
}
