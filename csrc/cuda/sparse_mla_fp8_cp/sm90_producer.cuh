// Hopper kernel, producers: lists -> slots -> key tiles in shared memory, two steps ahead of the consumers. Here what
// both sources of keys share, and keys from the workspace.
#pragma once

#include "../device/cp_async.cuh"
#include "sm90_queries.cuh"

namespace sparse_cp_ops {
namespace sm90 {

// Eight lanes share a row, so a thread looks after kRows = 64 * 8 / kProducers of them.
inline constexpr int kLanesPerRow = 8;
template <int kProducers>
inline constexpr int kRowsPerThread = kKeys * kLanesPerRow / kProducers;
template <int kRows>
inline constexpr int kRowsAtOnce = kKeys / kRows;

// How the entries of a row's list turn into rows of the source: through the request's pages, or counted from `first`.
// Pages and rows are two steps, so that the loads of pages can be on their way while keys are loaded.
struct Lookup {
  const int32_t* table;   // or null
  uint32_t limit, pages;  // entries from `limit` on are unused, and negative ones; so are pages that the cache has not
  int first, shift;

  // 2^31 slots would be 1.4 TB.
  __device__ Lookup(const SparseMlaParams& p, const RowKeys& keys, int page_shift, int per_request)
      : table(p.paged && per_request == 0 ? keys.table : nullptr),
        limit(static_cast<uint32_t>(min(p.num_pages << page_shift, int64_t{INT_MAX}))),
        pages(table != nullptr ? static_cast<uint32_t>(p.num_pages) : INT_MAX),
        first(keys.request * per_request),
        shift(page_shift) {
    if (p.paged)
      limit = static_cast<uint32_t>(max(min(int64_t{keys.kv_len}, int64_t{p.table_width} << page_shift), int64_t{0}));
    if (keys.pad) limit = 0;
  }
  template <int kRows>
  __device__ void find_pages(const int32_t (&entries)[kRows], int (&found)[kRows]) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i) found[i] = entries[i] >> shift;
    if (table == nullptr) return;
#pragma unroll
    for (int i = 0; i < kRows; ++i) found[i] = static_cast<uint32_t>(entries[i]) < limit ? table[found[i]] : -1;
  }
  // -1 if an entry is unused.
  template <int kRows>
  __device__ void find_rows(const int32_t (&entries)[kRows], const int (&found)[kRows], int (&rows)[kRows]) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const bool used = static_cast<uint32_t>(entries[i]) < limit && static_cast<uint32_t>(found[i]) < pages;
      rows[i] = used ? first + (found[i] << shift) + (entries[i] & ((1 << shift) - 1)) : -1;
    }
  }
};

// The entries that this thread looks up, a distance of kRowsAtOnce apart; the first is row `row0` of a step's tile, or
// of the tiles from that step on.
template <int kRows>
struct StepEntries {
  const RowKeys& keys;
  const Item& item;
  int row0;
  int32_t entries[kRows];

  __device__ void load(int step) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int entry = step * kKeys + row0 + i * kRowsAtOnce<kRows>;
      entries[i] = entry < item.entries ? keys.list[item.begin + entry] : -1;
    }
  }
};

// Waits until a part of a tile is free; `uses` holds the parity of the two tiles in a bit each.
struct TileUse {
  uint32_t address, factors, parity;
  int tile;
  Barriers barriers;

  __device__ TileUse(const Barriers& b, uint32_t base, int t, uint32_t& uses)
      : address(base + kKeyOffset + t * kTileBytes),
        factors(base + kFactorOffset + t * kKeys * 16),
        parity((uses >> t & 1) ^ 1),
        tile(t),
        barriers(b) {
    uses ^= 1u << tile;
  }
  __device__ void wait(int part, int quarter) const { mbarrier_wait(barriers.empty(tile, part, quarter), parity); }
  __device__ uint32_t full(int part) const { return barriers.full(tile, part); }
};

// 16-bit rows of the workspace, 128 bytes of a row by eight neighbouring lanes.
struct WorkspaceSource {
  static constexpr int kProducers = kWarpgroup, kRows = kRowsPerThread<kProducers>;
  static constexpr int kArrivals = kProducers;  // for a full part
  using Entries = StepEntries<kRows>;
  Workspace workspace;

  __device__ static int first_entry(int thread) { return thread / kLanesPerRow; }

  __device__ bool may_mix() const { return *workspace.mixed != 0; }

  // Part kPart of a tile, half `half` of the latent dimensions. Row i of a thread lies in quarter i; the RoPE chunk
  // holds weights until all of the part is free. `sources`: this lane's 16 bytes of the first chunk.
  static_assert(kRowsAtOnce<kRows> * kQuarters == kKeys);
  template <int kPart>
  __device__ static void load(const int (&rows)[kRows], const uint8_t* const (&sources)[kRows], int half,
                              uint32_t target, const TileUse& use) {
    auto load_chunk = [&](int i, int chunk) {
      cp_async_16(target + chunk * kChunkBytes + i * kRowsAtOnce<kRows> * 128, sources[i] + chunk * 128, rows[i] >= 0);
    };
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      use.wait(kPart, i);
#pragma unroll
      for (int j = 0; j < kLatentChunks / 2; ++j) load_chunk(i, half * (kLatentChunks / 2) + j);
    }
    if (kPart == 1) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) load_chunk(i, kRopeChunk);
    }
  }

  // Lane i of the eight that share rows looks after the factors of row i.
  __device__ void load_factors(const int (&rows)[kRows], int row0, uint32_t target) const {
    const int lane = threadIdx.x % kLanesPerRow;
    int row = rows[0];
#pragma unroll
    for (int i = 1; i < kRows; ++i) row = lane == i ? rows[i] : row;
    if (lane < kRows)
      cp_async_16(target + (row0 + lane * kRowsAtOnce<kRows>)*16, workspace.factors + max(row, 0), row >= 0);
  }

  // A step into tile kTile, a constant so that most addresses are.
  template <int kTile>
  __device__ void fill_tile(const Lookup& lookup, StepEntries<kRows>& next, int (&rows)[kRows], int step, uint32_t base,
                            const Barriers& barriers, uint32_t& uses) const {
    const int lane = threadIdx.x % kLanesPerRow;
    const uint8_t* sources[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i)
      sources[i] = workspace.rows + max(rows[i], 0) * int64_t{kWorkspaceRowBytes} + lane * 16;
    const TileUse use(barriers, base, kTile, uses);
    const uint32_t target = use.address + swizzled(next.row0, lane);
    load<0>(rows, sources, kTile, target, use);
    load_factors(rows, next.row0, use.factors);
    mbarrier_arrive_after_cp_async(use.full(0));
    int pages[kRows];
    lookup.find_pages(next.entries, pages);
    load<1>(rows, sources, kTile ^ 1, target, use);
    mbarrier_arrive_after_cp_async(use.full(1));
    lookup.find_rows(next.entries, pages, rows);
    next.load(step + 2);
  }

  __device__ void fill(const SparseMlaParams& p, int page_shift, StepEntries<kRows>& next, int steps, uint32_t base,
                       const Barriers& barriers, uint32_t& uses) const {
    const QueryLoader<kProducers> queries(p, base);
    queries.copy(next.item);
    const Lookup lookup(p, next.keys, page_shift, workspace.per_request);
    int rows[kRows], pages[kRows];
    lookup.find_pages(next.entries, pages);
    lookup.find_rows(next.entries, pages, rows);
    next.load(1);
    // The first keys are on their way before the queries are converted; the second tile becomes free later. No branch
    // around a tile in the loop: where two values of `next` met, the compiler would wait for the loads of one to copy
    // it.
    if (steps > 0) fill_tile<0>(lookup, next, rows, 0, base, barriers, uses);
    queries.convert(barriers.item_full());
    for (int step = 1; step < steps; ++step) {
      fill_tile<1>(lookup, next, rows, step, base, barriers, uses);
      if (++step >= steps) break;
      fill_tile<0>(lookup, next, rows, step, base, barriers, uses);
    }
  }
};

template <class Source>
__device__ __forceinline__ void produce(const SparseMlaParams& p, const KeySplit& split, const Source& source,
                                        int page_shift, int64_t items, uint32_t base) {
  const Barriers barriers{base + kBarrierOffset};
  const int thread = threadIdx.x - kConsumers;
  int count = 0;      // of items
  uint32_t uses = 0;  // of the two tiles, modulo 2 in a bit each
  for (int64_t number = blockIdx.x; number < items; number += gridDim.x, ++count) {
    const Item item = work_item(p, split, number);
    const RowKeys keys = row_keys(p, item.row);
    typename Source::Entries next{keys, item, Source::first_entry(thread), {}};
    next.load(0);
    prefetch_queries<Source::kProducers>(p, item, thread);
    const int steps = count_steps<Source::kProducers>(p, keys, item, thread, barriers.scan(0));
    mbarrier_wait(barriers.item_empty(), (count & 1) ^ 1);
    if (thread == 0) set_shared(barriers.steps(), static_cast<uint32_t>(steps));
    source.fill(p, page_shift, next, steps, base, barriers, uses);
  }
}

}  // namespace sm90
}  // namespace sparse_cp_ops
