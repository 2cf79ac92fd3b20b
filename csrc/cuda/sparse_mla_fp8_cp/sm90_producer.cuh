// Hopper kernel, producer warpgroup: lists -> slots -> key tiles in shared memory, two steps ahead of the consumers.
#pragma once

#include "../device/cp_async.cuh"
#include "sm90_tile.cuh"

namespace sparse_cp_ops {
namespace sm90 {

inline constexpr int kLanesPerRow = 8, kRowsAtOnce = kWarpgroup / kLanesPerRow, kRowsPerThread = kKeys / kRowsAtOnce;

// Slot (page * page_size + offset) of an entry, -1 if it is unused.
__device__ __forceinline__ int64_t find_slot(const SparseMlaParams& p, const RowKeys& keys, int page_shift,
                                             int32_t index) {
  if (index < 0) return -1;
  int64_t page = index >> page_shift;
  if (p.paged) {
    if (index >= keys.kv_len || page >= p.table_width) return -1;
    page = keys.table[page];
    if (page < 0) return -1;
  }
  if (page >= p.num_pages) return -1;
  return (page << page_shift) + (index & ((1 << page_shift) - 1));
}

// Steps up to the last entry that may be used, agreed between the producer's warps and handed to the consumers.
__device__ __forceinline__ int count_steps(const SparseMlaParams& p, const RowKeys& keys, const Item& item,
                                           const Barriers& barriers) {
  const int thread = threadIdx.x % kWarpgroup;
  int last = -1;
  for (int64_t i = item.begin + thread; i < item.end; i += kWarpgroup)
    if (keys.may_use(p, keys.list[i])) last = static_cast<int>(i - item.begin);
  last = __reduce_max_sync(~0u, last);
  named_barrier(kProducerBarrier, kWarpgroup);  // the scratch of the item before has been read
  if (thread % 32 == 0) store_shared(barriers.scan(thread / 32), __int_as_float(last));
  named_barrier(kProducerBarrier, kWarpgroup);
#pragma unroll
  for (int warp = 0; warp < kWarpgroup / 32; ++warp) last = max(last, __float_as_int(load_shared(barriers.scan(warp))));
  return (last + kKeys) / kKeys;
}

__device__ __forceinline__ void prefetch_queries(const SparseMlaParams& p, const Item& item) {
  constexpr int kLines = kQkDim * 2 / 128;
  const auto* q = static_cast<const uint16_t*>(p.q) + item.row * p.q_row_stride + item.head0 * p.q_head_stride;
  for (int i = threadIdx.x % kWarpgroup; i < kHeads * kLines; i += kWarpgroup)
    prefetch_l2(q + i / kLines * p.q_head_stride + i % kLines * 64);
}

// 16-bit rows of the workspace, 128 bytes of a row by eight neighbouring lanes.
struct WorkspaceSource {
  Workspace workspace;

  __device__ bool uniform() const { return *workspace.mixed == 0; }

  __device__ void load(const SparseMlaParams&, int, const int64_t (&slots)[kRowsPerThread], uint32_t tile,
                       uint32_t factors, uint32_t full) const {
    const int row0 = threadIdx.x % kWarpgroup / kLanesPerRow, lane = threadIdx.x % kLanesPerRow;
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      const int row = row0 + i * kRowsAtOnce;
      const bool used = slots[i] >= 0;
      const int64_t slot = used ? slots[i] : 0;
      const uint8_t* source = workspace.rows + slot * kWorkspaceRowBytes + lane * 16;
      const uint32_t target = tile + swizzled(row, lane);
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk)
        cp_async_16(target + chunk * kChunkBytes, source + chunk * 128, used);
      if (lane == 0) cp_async_16(factors + row * 16, workspace.factors + slot, used);
    }
    mbarrier_arrive_after_cp_async(full);
  }
};

__device__ __forceinline__ uint4 load_global(const uint8_t* address) {
  uint4 x;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(address));
  return x;
}

// Records of the cache, converted on the way; eight lanes share one.
struct DirectSource {
  __device__ bool uniform() const { return false; }

  struct Piece {
    uint4 latent[kLatentTiles], scales, rope;
  };

  __device__ static void read(const SparseMlaParams& p, int page_shift, int64_t slot, Piece& x) {
    const int lane = threadIdx.x % kLanesPerRow;
    const int64_t offset = slot & ((1 << page_shift) - 1);
    const uint8_t* record = p.kv_cache + (slot >> page_shift) * p.page_stride + offset * kMlaRecordBytes;
#pragma unroll
    for (int t = 0; t < kLatentTiles; ++t) x.latent[t] = load_global(record + t * 128 + lane * 16);
    x.scales = load_global(record + kMlaScaleOffset);
    x.rope = load_global(record + kMlaRopeOffset + lane * 16);
  }

  __device__ static void write(int row, bool used, const Piece& x, uint32_t tile, uint32_t factors) {
    const int lane = threadIdx.x % kLanesPerRow;
    const RecordScales scales = record_scales(reinterpret_cast<const float4&>(x.scales));
    const uint4 zero = make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int t = 0; t < kLatentTiles; ++t) {
      const uint4& v = x.latent[t];
      const uint4 low = used ? convert_latent(make_uint2(v.x, v.y), scales.multipliers[t]) : zero;
      const uint4 high = used ? convert_latent(make_uint2(v.z, v.w), scales.multipliers[t]) : zero;
      // Lanes 4 to 7 write the second chunk, other half first: eight lanes fall into eight bank groups.
      const int second = lane / 4, piece = lane % 4 * 2;
      const uint32_t chunk = tile + (2 * t + second) * kChunkBytes;
      store_shared4(chunk + swizzled(row, piece + second), second ? high : low);
      store_shared4(chunk + swizzled(row, piece + 1 - second), second ? low : high);
    }
    store_shared4(tile + kRopeChunk * kChunkBytes + swizzled(row, lane),
                  used ? convert_rope(x.rope, scales.rope_multiplier) : zero);
    if (lane == 0) store_shared4(factors + row * 16, used ? reinterpret_cast<const uint4&>(scales.factors) : zero);
  }

  __device__ void load(const SparseMlaParams& p, int page_shift, const int64_t (&slots)[kRowsPerThread], uint32_t tile,
                       uint32_t factors, uint32_t full) const {
    const int row0 = threadIdx.x % kWarpgroup / kLanesPerRow;
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      Piece x = {};
      if (slots[i] >= 0) read(p, page_shift, slots[i], x);
      write(row0 + i * kRowsAtOnce, slots[i] >= 0, x, tile, factors);
    }
    mbarrier_arrive(full);
  }
};

template <class Source>
__device__ __forceinline__ void produce(const SparseMlaParams& p, const KeySplit& split, const Source& source, int page_shift,
                        int64_t items, uint32_t base) {
  const Barriers barriers{base + kBarrierOffset};
  const int thread = threadIdx.x % kWarpgroup, row0 = thread / kLanesPerRow;
  int step = 0, count = 0;
  for (int64_t number = blockIdx.x; number < items; number += gridDim.x, ++count) {
    const Item item = work_item(p, split, number);
    const RowKeys keys = row_keys(p, item.row);
    auto load_entries = [&](int64_t first, int32_t (&entries)[kRowsPerThread]) {
#pragma unroll
      for (int i = 0; i < kRowsPerThread; ++i) {
        const int64_t entry = first + row0 + i * kRowsAtOnce;
        entries[i] = entry < item.end && !keys.pad ? keys.list[entry] : -1;
      }
    };
    int32_t entries[kRowsPerThread];
    load_entries(item.begin, entries);
    prefetch_queries(p, item);
    const int steps = count_steps(p, keys, item, barriers);
    if (thread == 0) {
      mbarrier_wait(barriers.item_empty(count & 1), (count >> 1 & 1) ^ 1);
      store_shared(barriers.steps(count & 1), __int_as_float(steps));
      mbarrier_arrive(barriers.item_full(count & 1));
    }
    for (int i = 0; i < steps; ++i, ++step) {
      int64_t slots[kRowsPerThread];
#pragma unroll
      for (int j = 0; j < kRowsPerThread; ++j) slots[j] = find_slot(p, keys, page_shift, entries[j]);
      load_entries(item.begin + (i + 1) * kKeys, entries);
      const int tile = step & 1;
      mbarrier_wait(barriers.empty(tile), (step >> 1 & 1) ^ 1);
      source.load(p, page_shift, slots, base + kKeyOffset + tile * kTileBytes, base + kFactorOffset + tile * kKeys * 16,
                  barriers.full(tile));
    }
  }
}

}  // namespace sm90
}  // namespace sparse_cp_ops
