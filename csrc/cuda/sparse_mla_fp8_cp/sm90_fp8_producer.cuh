// precision="fp8", producer warpgroup: lists -> records -> key tiles in shared memory, byte for byte.
#pragma once

#include "../device/cp_async.cuh"
#include "sm90_fp8.cuh"

namespace sparse_cp_ops {
namespace fp8_mode {

struct Record {
  uint4 latent[kLatentDim / 16], scales, rope[kRopeDim / 8];
};
static_assert(sizeof(Record) == kMlaRecordBytes);

inline constexpr uint32_t kUnusedRecord = ~0u;  // a record there would be in a cache of 64 GiB

// Eight neighbouring lanes share a key.
inline constexpr int kLanesPerKey = 8, kKeysAtOnce = kWarpgroup / kLanesPerKey, kKeysPerThread = kKeys / kKeysAtOnce;

// Stands for the record of an unused entry.
static __device__ const Record unused_record = {{}, {kUnusedScale, kUnusedScale, kUnusedScale, kUnusedScale}, {}};

// A warp copies 16 keys of a tile: 4 * warp + 16 * i + lane / 8, i = 0 to 3, eight lanes a key. Lane l finds the record
// of key 4 * warp + l % 4 + l / 4 % 4 * 16, in three stages a step apart, so that no load is waited for: entry of the
// list, page, place in the cache.
struct Place {
  int index, page;  // page < 0: unused
};

__device__ __forceinline__ Place find_page(const SparseMlaParams& p, const RowKeys& keys, int page_shift,
                                           int32_t index) {
  Place place{index, index < 0 ? -1 : index >> page_shift};
  if (p.paged && place.page >= 0)
    place.page = index < keys.kv_len && place.page < p.table_width ? keys.table[place.page] : -1;
  return place;
}

// In units of 16 bytes.
__device__ __forceinline__ uint32_t record_offset(const SparseMlaParams& p, int page_shift, const Place& place) {
  if (place.page < 0 || place.page >= p.num_pages) return kUnusedRecord;
  const uint32_t in_page = (place.index & ((1 << page_shift) - 1)) * static_cast<uint32_t>(kMlaRecordBytes / 16);
  return static_cast<uint32_t>(place.page * p.page_stride >> 4) + in_page;
}

__device__ __forceinline__ void copy_records(const SparseMlaParams& p, uint32_t offset, uint32_t base, int tile) {
  const int thread = threadIdx.x % kWarpgroup, row0 = thread / kLanesPerKey, lane = thread % kLanesPerKey;
#pragma unroll
  for (int i = 0; i < kKeysPerThread; ++i) {
    const int row = row0 + i * kKeysAtOnce;
    const uint32_t place = __shfl_sync(~0u, offset, i * 4 + thread % 32 / kLanesPerKey);
    const uint8_t* record = place == kUnusedRecord ? reinterpret_cast<const uint8_t*>(&unused_record)
                                                   : p.kv_cache + static_cast<uint64_t>(place) * 16;
    const uint8_t* source = record + lane * 16;
    const uint32_t target = chunk_address(base, tile, 0) + swizzled(row, lane);
#pragma unroll
    for (int t = 0; t < kLatentTiles; ++t) cp_async_16(target + t * kChunkBytes, source + t * kScaleTile, true);
    cp_async_16(target + kRopeChunk * kChunkBytes, source + kMlaRopeOffset, true);
    if (lane == i) cp_async_16(base + kScaleOffset + (tile * kKeys + row) * 16, record + kMlaScaleOffset, true);
  }
}

__device__ __forceinline__ void produce(const SparseMlaParams& p, const KeySplit& split, int page_shift, int64_t items,
                                        uint32_t base) {
  const Barriers barriers{base + kBarrierOffset};
  const int thread = threadIdx.x % kWarpgroup, lane = thread % 32;
  RingPosition position;
  for (uint32_t count = 0; item_number(count) < items; ++count) {
    const Item item = sm90::work_item(p, split, item_number(count));
    const RowKeys keys = row_keys(p, item.row);
    const int own_key = thread / 32 * 4 + lane % 4 + lane / 4 % 4 * 16;
    const int32_t* list = keys.list + item.begin + own_key;  // `left` entries from here on
    int left = keys.pad ? 0 : item.entries - own_key;
    auto next_entry = [&] {
      const int32_t entry = left > 0 ? *list : -1;
      list += kKeys, left -= kKeys;
      return entry;
    };
    Place place = find_page(p, keys, page_shift, next_entry());
    int32_t entry = next_entry();
    sm90::prefetch_queries<kWarpgroup>(p, item, thread);
    int steps = sm90::count_steps<kWarpgroup>(p, keys, item, thread, barriers.scan());
    if (thread == 0) {
      mbarrier_wait(barriers.item_empty(count & 1), (count >> 1 & 1) ^ 1);
      set_shared(barriers.steps(count & 1), static_cast<uint32_t>(steps));
      mbarrier_arrive(barriers.item_full(count & 1));
    }
    for (; steps > 0; --steps, ++position.count) {
      const uint32_t offset = record_offset(p, page_shift, place);
      place = find_page(p, keys, page_shift, entry);
      entry = next_entry();
      mbarrier_wait(barriers.empty(position.tile()), position.parity() ^ 1);
      copy_records(p, offset, base, position.tile());
      mbarrier_arrive_after_cp_async(barriers.full(position.tile()));
    }
  }
}

}  // namespace fp8_mode
}  // namespace sparse_cp_ops
