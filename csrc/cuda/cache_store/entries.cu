// What CacheStore does with entries in staging memory on the device (docs/cache_store.md): their checksums, and the way
// of their pages to the caches of all layers in one kernel.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <vector>

#include "../../ops/paged_cache.h"
#include "../launch.h"
#include "copy_piece.cuh"
#include "xxh3.cuh"

namespace sparse_cp_ops {
namespace {

// ---- checksum_entries ----

constexpr int kChecksumBytes = 16;
constexpr int kSumThreads = 256;
constexpr int kSumBlocks = 64;  // of threads, for each entry: with 16 entries 8 a multiprocessor

// What each block of an entry's payload adds to the accumulators: a warp a block, 16 bytes a lane and half.
__global__ void __launch_bounds__(kSumThreads)
    sum_blocks_kernel(const uint8_t* payloads, int64_t entry_bytes, int64_t blocks, uint64_t* sums) {
  const int lane = threadIdx.x % 32, stripe = lane / 4, pair = lane % 4;
  uint64_t secret[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) secret[i] = xxh3::secret_word(8 * (stripe + 2 * pair + i % 2 + (i < 2 ? 0 : 8)));
  const uint8_t* payload = payloads + blockIdx.y * entry_bytes;
  uint64_t* entry_sums = sums + blockIdx.y * blocks * xxh3::kLanes;
  const int64_t warps = gridDim.x * (kSumThreads / 32);
  for (int64_t block = blockIdx.x * (kSumThreads / 32) + threadIdx.x / 32; block < blocks; block += warps) {
    const auto* words = reinterpret_cast<const ulonglong2*>(payload + block * xxh3::kBlockBytes);
    const ulonglong2 first = words[lane], second = words[lane + 32];
    uint64_t even = xxh3::contribution(first.x, first.y, secret[0]) + xxh3::contribution(second.x, second.y, secret[2]);
    uint64_t odd = xxh3::contribution(first.y, first.x, secret[1]) + xxh3::contribution(second.y, second.x, secret[3]);
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2) {
      even += __shfl_xor_sync(~0u, even, distance);
      odd += __shfl_xor_sync(~0u, odd, distance);
    }
    if (stripe == 0)
      reinterpret_cast<ulonglong2*>(entry_sums + block * xxh3::kLanes)[pair] = make_ulonglong2(even, odd);
  }
}

// The chain through the blocks' sums and the rest of an entry: a warp an entry, of which 8 lanes count.
__global__ void __launch_bounds__(32)
    finish_checksum_kernel(const uint8_t* payloads, int64_t entry_bytes, int64_t payload_bytes, int64_t blocks,
                           const uint64_t* sums, uint8_t* checksums) {
  constexpr int kAhead = 32;  // sums that are loaded while those before them are used: 1000 cycles
  const int lane = threadIdx.x % xxh3::kLanes;
  const uint64_t* own = sums + blockIdx.x * blocks * xxh3::kLanes + lane;
  const uint64_t secret = xxh3::secret_word(xxh3::kScrambleSecret + 8 * lane);
  uint64_t accumulator = xxh3::kInitial[lane];
  uint64_t next[kAhead];
  const auto load = [&](int64_t start) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) next[i] = own[min(start + i, blocks - 1) * xxh3::kLanes];
  };
  if (blocks > 0) load(0);
  for (int64_t start = 0; start < blocks; start += kAhead) {
    uint64_t current[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) current[i] = next[i];
    load(start + kAhead);
    if (start + kAhead <= blocks) {
#pragma unroll
      for (int i = 0; i < kAhead; ++i) accumulator = xxh3::scramble(accumulator + current[i], secret);
    } else {
#pragma unroll
      for (int i = 0; i < kAhead; ++i)
        if (start + i < blocks) accumulator = xxh3::scramble(accumulator + current[i], secret);
    }
  }
  // The stripes behind the last whole block, and the last 64 bytes once more.
  const uint8_t* payload = payloads + blockIdx.x * entry_bytes;
  const auto add = [&](int64_t at, int secret_byte) {
    const uint64_t word = reinterpret_cast<const uint64_t*>(payload + at)[lane];
    accumulator += xxh3::contribution(word, __shfl_xor_sync(~0u, word, 1), xxh3::secret_word(secret_byte + 8 * lane));
  };
  const int64_t rest = blocks * xxh3::kBlockBytes;
  for (int stripe = 0; rest + (stripe + 1) * xxh3::kStripeBytes < payload_bytes; ++stripe)
    add(rest + stripe * xxh3::kStripeBytes, 8 * stripe);
  add(payload_bytes - xxh3::kStripeBytes, xxh3::kLastStripeSecret);
  uint64_t all[xxh3::kLanes];
#pragma unroll
  for (int i = 0; i < xxh3::kLanes; ++i) all[i] = __shfl_sync(~0u, accumulator, i);
  if (threadIdx.x >= kChecksumBytes) return;
  // Canonical: the high half, then the low one, each from its highest byte on.
  const auto length = static_cast<uint64_t>(payload_bytes);
  const uint64_t high = xxh3::merge(all, xxh3::kHighSecret, ~(length * xxh3::kPrime64_2));
  const uint64_t low = xxh3::merge(all, xxh3::kLowSecret, length * xxh3::kPrime64_1);
  const uint64_t half = threadIdx.x < 8 ? high : low;
  checksums[blockIdx.x * kChecksumBytes + threadIdx.x] = static_cast<uint8_t>(half >> (56 - 8 * lane));
}

void checksum_entries(const Tensor& entries, int64_t first, int64_t count, int64_t header_bytes, Tensor sums,
                      Tensor checksums) {
  check_tensor(entries, "entries", entries, "entries", ScalarType::Byte, {kAny, kAny});
  check_contiguous(entries, "entries");
  const int64_t entry_bytes = entries.size(1), payload_bytes = entry_bytes - header_bytes;
  SCO_CHECK(first >= 0 && count >= 0 && first + count <= entries.size(0), "first, count: expected entries in [0, ",
            entries.size(0), "), got ", first, " and ", count);
  SCO_CHECK(entry_bytes % 16 == 0 && header_bytes % 16 == 0 && header_bytes >= 0 && payload_bytes > xxh3::kShortBytes,
            "header_bytes: expected a multiple of 16 that leaves more than ", xxh3::kShortBytes, " of ", entry_bytes,
            " bytes, got ", header_bytes);
  const int64_t blocks = (payload_bytes - 1) / xxh3::kBlockBytes;
  check_tensor(sums, "sums", entries, "entries", ScalarType::Long, {entries.size(0), blocks, xxh3::kLanes});
  check_contiguous(sums, "sums");
  check_tensor(checksums, "checksums", entries, "entries", ScalarType::Byte, {entries.size(0), kChecksumBytes});
  check_contiguous(checksums, "checksums");
  if (count == 0) return;
  torch::stable::accelerator::DeviceGuard guard(entries.get_device_index());
  cudaStream_t stream = current_stream(entries.get_device_index());
  const auto* payloads = static_cast<const uint8_t*>(entries.data_ptr()) + first * entry_bytes + header_bytes;
  auto* own_sums = static_cast<uint64_t*>(sums.data_ptr());
  uint8_t* target = static_cast<uint8_t*>(checksums.data_ptr()) + first * kChecksumBytes;
  if (blocks > 0)
    sum_blocks_kernel<<<dim3(kSumBlocks, static_cast<unsigned>(count)), kSumThreads, 0, stream>>>(payloads, entry_bytes,
                                                                                                  blocks, own_sums);
  finish_checksum_kernel<<<static_cast<unsigned>(count), 32, 0, stream>>>(payloads, entry_bytes, payload_bytes, blocks,
                                                                          own_sums, target);
  check_launch("checksum_entries");
}

// ---- load_entries ----

constexpr int64_t kMaxLayers = 128, kMaxPages = 64;  // of one kernel: its parameters are a table of 3.4 KB

struct LoadParams {
  struct Layer {
    uint8_t* mla;      // [pages, page_size, 656]
    uint8_t* indexer;  // [pages, page_size * 132], nullptr: none
    int64_t offset;    // of the layer in an entry
  } layers[kMaxLayers];
  int32_t pages[kMaxPages];
  const uint8_t* entries;  // the first of them
  int64_t entry_bytes, page_size;
  int piece_shift;  // log2 of the pieces of a page
};
static_assert(sizeof(LoadParams) <= 4096);

// A block copies a piece of one layer of one entry.
__global__ void __launch_bounds__(kCopyThreads) load_entries_kernel(const __grid_constant__ LoadParams p) {
  const LoadParams::Layer& layer = p.layers[blockIdx.x >> p.piece_shift];
  const int64_t page = p.pages[blockIdx.y], mla_bytes = p.page_size * kMlaRecordBytes;
  const uint8_t* from = p.entries + blockIdx.y * p.entry_bytes + layer.offset;
  copy_piece(from, layer.indexer != nullptr ? from + mla_bytes : nullptr, layer.mla + page * mla_bytes,
             layer.indexer + page * p.page_size * kIndexRecordBytes, blockIdx.x & ((1 << p.piece_shift) - 1));
}

void load_entries(const Tensor& entries, int64_t first, std::vector<int64_t> pages, std::vector<Tensor> mla_caches,
                  std::vector<Tensor> indexer_caches, std::vector<int64_t> indexer_layers) {
  check_tensor(entries, "entries", entries, "entries", ScalarType::Byte, {kAny, kAny});
  check_contiguous(entries, "entries");
  const auto count = static_cast<int64_t>(pages.size()), num_layers = static_cast<int64_t>(mla_caches.size());
  SCO_CHECK(first >= 0 && first + count <= entries.size(0), "first, pages: expected entries in [0, ", entries.size(0),
            "), got ", first, " and ", count);
  SCO_CHECK(num_layers >= 1, "mla_caches: expected a layer, got none");
  SCO_CHECK(indexer_caches.size() == indexer_layers.size(), "indexer_layers: expected as many as indexer_caches, ",
            indexer_caches.size(), ", got ", indexer_layers.size());
  LoadParams p{};
  const Tensor& like = mla_caches[0];
  p.page_size = check_mla_cache(like, "mla_caches", entries, "entries");
  p.entry_bytes = entries.size(1);
  std::vector<LoadParams::Layer> layers(num_layers);
  for (int64_t i = 0; i < num_layers; ++i) {
    const Tensor& mla = mla_caches[i];
    check_tensor(mla, "mla_caches", entries, "entries", ScalarType::Byte, {like.size(0), p.page_size, kMlaRecordBytes});
    check_contiguous(mla, "mla_caches");
    layers[i].mla = static_cast<uint8_t*>(mla.data_ptr());
  }
  for (size_t i = 0; i < indexer_caches.size(); ++i) {
    const int64_t layer = indexer_layers[i];
    SCO_CHECK(layer >= 0 && layer < num_layers, "indexer_layers: expected layers in [0, ", num_layers, "), got ",
              layer);
    check_indexer_cache(indexer_caches[i], "indexer_caches", like.size(0), p.page_size, entries, "entries");
    check_contiguous(indexer_caches[i], "indexer_caches");
    layers[layer].indexer = static_cast<uint8_t*>(indexer_caches[i].data_ptr());
  }
  int64_t payload_bytes = 0;
  for (LoadParams::Layer& layer : layers) {
    layer.offset = payload_bytes;
    payload_bytes += p.page_size * (kMlaRecordBytes + (layer.indexer != nullptr ? kIndexRecordBytes : 0));
  }
  const int64_t header_bytes = p.entry_bytes - payload_bytes;
  SCO_CHECK(header_bytes >= 0 && header_bytes % kPageVectorBytes == 0, "entries: expected a header in front of ",
            payload_bytes, " bytes, got ", p.entry_bytes, " bytes an entry");
  for (int64_t page : pages)
    SCO_CHECK(page >= 0 && page < like.size(0), "pages: expected pages in [0, ", like.size(0), "), got ", page);

  torch::stable::accelerator::DeviceGuard guard(entries.get_device_index());
  cudaStream_t stream = current_stream(entries.get_device_index());
  p.piece_shift = piece_shift_of(p.page_size);
  for (int64_t start = 0; start < count; start += kMaxPages)
    for (int64_t layer = 0; layer < num_layers; layer += kMaxLayers) {
      const int64_t part = std::min(kMaxPages, count - start), some_layers = std::min(kMaxLayers, num_layers - layer);
      std::copy_n(pages.begin() + start, part, p.pages);
      std::copy_n(layers.begin() + layer, some_layers, p.layers);
      p.entries = static_cast<const uint8_t*>(entries.data_ptr()) + (first + start) * p.entry_bytes + header_bytes;
      const dim3 grid(static_cast<unsigned>(some_layers << p.piece_shift), static_cast<unsigned>(part));
      load_entries_kernel<<<grid, kCopyThreads, 0, stream>>>(p);
      check_launch("load_entries");
    }
}

}  // namespace
}  // namespace sparse_cp_ops

// Beside the public ops of sparse_cp_ops: their callers know that the arguments fit together.
STABLE_TORCH_LIBRARY(sparse_cp_ops_store, m) {
  m.def(
      "checksum_entries(Tensor entries, int first, int count, int header_bytes, Tensor(a!) sums, Tensor(b!) checksums) "
      "-> ()");
  m.def(
      "load_entries(Tensor entries, int first, int[] pages, Tensor(a!)[] mla_caches, Tensor(b!)[] indexer_caches, "
      "int[] indexer_layers) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(sparse_cp_ops_store, CUDA, m) {
  m.impl("checksum_entries", TORCH_BOX(&sparse_cp_ops::checksum_entries));
  m.impl("load_entries", TORCH_BOX(&sparse_cp_ops::load_entries));
}
