// Hopper kernel, producer warpgroup: lists -> slots -> key tiles in shared memory, two steps ahead of the consumers.
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

// The entries of a step that this thread looks after: rows row0 + i * kRowsAtOnce of the tile.
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
  Workspace workspace;

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

// Waits until at most `groups` of this thread's last copies are on their way.
__device__ __forceinline__ void wait_for_copies(int groups) {
  if (groups <= 0) cp_async_wait<0>();
  else if (groups == 1) cp_async_wait<1>();
  else if (groups == 2) cp_async_wait<2>();
  else cp_async_wait<3>();
}

// Records of the cache. Their bytes are copied into a free part of a tile, 16 of them to one of the two places that
// their values will take, and converted there. A thread converts what it has copied itself, so it waits for its own
// copies only.
struct DirectSource {
  static constexpr int kProducers = 2 * kWarpgroup, kRows = kRowsPerThread<kProducers>;

  __device__ bool may_mix() const { return true; }

  // The parts of an item's tiles in turn: part k % 2 of step k / 2.
  struct Walk {
    const SparseMlaParams& p;
    const Barriers& barriers;
    StepEntries<kRows>& next;  // of the step whose copies come next
    Lookup lookup;
    uint32_t base, uses;
    int page_shift;
    int pages[kRows], slots[kRows];
    uint32_t used = 0;                         // rows of the last two steps, kRows bits a tile
    uint32_t multipliers[2], rope_multiplier;  // of row `lane`: pairs of f16 of the two halves

    __device__ static int lane() { return threadIdx.x % kLanesPerRow; }
    __device__ uint32_t tile(int k) const { return base + kKeyOffset + (k >> 1 & 1) * kTileBytes; }
    __device__ uint32_t factors(int k) const {
      return base + kFactorOffset + ((k >> 1 & 1) * kKeys + next.row0 + lane() * kRowsAtOnce<kRows>)*16;
    }
    // Lanes 4 to 7 have the second chunk of a scale tile, other place first: eight lanes fall into eight bank groups.
    __device__ uint32_t latent(int k) const {
      const int half = (k >> 1 ^ k) & 1;
      return tile(k) + (half * (kLatentChunks / 2) + lane() / 4) * kChunkBytes +
             swizzled(next.row0, lane() % 4 * 2 + lane() / 4);
    }
    __device__ uint32_t rope(int k) const { return tile(k) + kRopeChunk * kChunkBytes + swizzled(next.row0, lane()); }

    // The last quarter is freed last.
    __device__ uint32_t empty(int k) const { return barriers.empty(k >> 1 & 1, k & 1, kQuarters - 1); }
    __device__ uint32_t parity(int k) const { return (uses >> (k >> 1 & 1) ^ k >> 2 ^ 1) & 1; }
    __device__ bool is_free(int k) const { return __all_sync(~0u, mbarrier_test(empty(k), parity(k))) != 0; }

    __device__ const uint8_t* record(int slot) const {
      const int offset = slot & ((1 << page_shift) - 1);
      return p.kv_cache + (slot >> page_shift) * p.page_stride + offset * static_cast<int>(kMlaRecordBytes);
    }

    __device__ void copy(int k) {
      const int half = (k >> 1 ^ k) & 1;
      if ((k & 1) == 0) {
        lookup.find_rows(next.entries, pages, slots);
        next.load((k >> 1) + 1);
        int slot = -1;
        uint32_t bits = 0;
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          slot = lane() == i ? slots[i] : slot;
          bits |= static_cast<uint32_t>(slots[i] >= 0) << i;
        }
        const int shift = (k >> 1 & 1) * kRows;
        used = (used & ~(((1u << kRows) - 1) << shift)) | bits << shift;
        if (lane() < kRows) cp_async_16(factors(k), record(max(slot, 0)) + kMlaScaleOffset, slot >= 0);
      }
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const uint8_t* source = record(max(slots[i], 0)) + lane() * 16;
        const uint32_t row = i * kRowsAtOnce<kRows> * 128;
#pragma unroll
        for (int t = 0; t < 2; ++t)
          cp_async_16(latent(k) + 2 * t * kChunkBytes + row, source + half * 256 + t * 128, slots[i] >= 0);
        if (k & 1) cp_async_16(rope(k) + row, source + kMlaRopeOffset, slots[i] >= 0);
      }
      cp_async_commit();
      if (k & 1) lookup.find_pages(next.entries, pages);
    }

    // An unused row has bytes and scales of 0, so values of 0.
    __device__ void convert_scales(int k) {
      RecordScales scales = record_scales(lane() < kRows ? shared_f32x4(factors(k)) : make_float4(0, 0, 0, 0));
      if (lane() < kRows) {
        if ((used >> ((k >> 1 & 1) * kRows + lane()) & 1) == 0) scales.factors = make_float4(0, 0, 0, 0);
        set_shared(factors(k), reinterpret_cast<const uint4&>(scales.factors));
      }
      multipliers[0] = __byte_perm(scales.multipliers[0], scales.multipliers[1], 0x5410);
      multipliers[1] = __byte_perm(scales.multipliers[2], scales.multipliers[3], 0x5410);
      rope_multiplier = scales.rope_multiplier;
    }

    __device__ void convert(int k) {
      const bool second = lane() >= 4;
      const int half = (k >> 1 ^ k) & 1;
      if ((k & 1) == 0) convert_scales(k);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const uint32_t row = i * kRowsAtOnce<kRows> * 128;
        const uint32_t pair = __shfl_sync(~0u, half ? multipliers[1] : multipliers[0], i, kLanesPerRow);
#pragma unroll
        for (int t = 0; t < 2; ++t) {
          const uint32_t place = latent(k) + 2 * t * kChunkBytes + row;
          const uint4 v = shared_u32x4(place);
          const uint32_t multiplier = __byte_perm(pair, 0, t ? 0x3232 : 0x1010);
          const uint4 low = convert_latent(make_uint2(v.x, v.y), multiplier);
          const uint4 high = convert_latent(make_uint2(v.z, v.w), multiplier);
          set_shared(place, second ? high : low);
          set_shared(place ^ 16, second ? low : high);
        }
        if (k & 1) {
          const uint32_t multiplier = __shfl_sync(~0u, rope_multiplier, i, kLanesPerRow);
          set_shared(rope(k) + row, convert_rope(shared_u32x4(rope(k) + row), multiplier));
        }
      }
      mbarrier_arrive(barriers.full(k >> 1 & 1, k & 1));
    }
  };

  __device__ void fill(const SparseMlaParams& p, int page_shift, StepEntries<kRows>& next, int steps, uint32_t base,
                       const Barriers& barriers, uint32_t& uses) const {
    const QueryLoader<kProducers> queries(p, base);
    queries.copy(next.item);
    Walk walk{p, barriers, next, Lookup(p, next.keys, page_shift, 0), base, uses, page_shift};
    walk.lookup.find_pages(next.entries, walk.pages);
    int copied = 0, converted = 0;
    bool queries_wait = true;  // the first keys are on their way before the queries are converted
    while (queries_wait || converted < 2 * steps) {
      const bool more = copied < 2 * steps;
      if (more && copied == converted) mbarrier_wait(walk.empty(copied), walk.parity(copied));
      if (more && (copied == converted || walk.is_free(copied))) {
        walk.copy(copied++);
      } else if (queries_wait) {
        queries.convert(barriers.item_full());
        queries_wait = false;
      } else {
        wait_for_copies(copied - converted - 1);
        walk.convert(converted++);
      }
    }
    uses ^= (static_cast<uint32_t>(steps + 1) >> 1 & 1) | (static_cast<uint32_t>(steps) >> 1 & 1) << 1;
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
    StepEntries<Source::kRows> next{keys, item, thread / kLanesPerRow, {}};
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
