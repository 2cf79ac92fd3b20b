// Few heads, producer warps: queries, then lists -> records, in the ring. Warp i takes quarter i of each step.
#pragma once

#include "../device/bulk_copy.cuh"
#include "sm90_few_heads.cuh"

namespace sparse_cp_ops {
namespace few_heads {

// Stands for the record of an unused entry: a slot must hold finite numbers, also where weights are 0.
static __device__ uint4 zero_record[kMlaRecordBytes / 16];

// An entry on its way to its record: the page of the cache is being looked up, whether the entry may be used or not,
// because that depends on a load of its own.
struct Lookup {
  int32_t index;
  int32_t page;  // -1: none
};

__device__ __forceinline__ Lookup begin_lookup(const SparseMlaParams& p, const RowKeys& keys, int page_shift,
                                               int32_t index) {
  const int page = index >> page_shift;
  Lookup lookup{index, -1};
  if (!keys.pad && index >= 0 && (!p.paged || page < p.table_width)) lookup.page = p.paged ? keys.table[page] : page;
  return lookup;
}

__device__ __forceinline__ const uint8_t* finish_lookup(const SparseMlaParams& p, const RowKeys& keys, int page_shift,
                                                        Lookup lookup) {
  if (!keys.may_use(p, lookup.index) || lookup.page < 0 || lookup.page >= p.num_pages) return nullptr;
  return p.kv_cache + lookup.page * p.page_stride +
         (lookup.index & ((1 << page_shift) - 1)) * static_cast<int>(kMlaRecordBytes);
}

// Issued where it stands.
__device__ __forceinline__ int32_t load_int(const int32_t* address) {
  int32_t x;
  asm volatile("ld.global.s32 %0, [%1];" : "=r"(x) : "l"(address) : "memory");
  return x;
}

// Queries of an item: kSlotHeads heads a warp, as far as there are.
template <class S>
__device__ __forceinline__ void copy_queries(const SparseMlaParams& p, const Item& item, int warp,
                                             RingPosition<S> position, uint32_t base) {
  if (warp >= S::kQuerySlots) return;
  constexpr uint32_t kHeadBytes = kQkDim * 2;
  const RingPosition<S> mine = position + warp;
  const int lane = threadIdx.x % 32, slot = mine.slot();
  const uint32_t full = S::full(base, slot), target = S::quarter(base, slot);
  const auto* q = static_cast<const uint16_t*>(p.q) + item.row * p.q_row_stride +
                  (item.head0 + warp * kSlotHeads) * p.q_head_stride;
  mbarrier_wait(S::empty(base, slot), mine.parity() ^ 1);
  if (reinterpret_cast<uintptr_t>(p.q) % 16 == 0 && p.q_row_stride % 8 == 0 && p.q_head_stride % 8 == 0) {
    if (lane == 0) mbarrier_expect_bytes(full, kSlotHeads * kHeadBytes);
    __syncwarp();
    for (int head = 0; head < kSlotHeads; ++head)
      bulk_copy_by_warp(target + head * kHeadBytes, q + head * p.q_head_stride, kHeadBytes, full);
  } else {
    for (int head = 0; head < kSlotHeads; ++head)
      for (int i = lane; i < kQkDim / 2; i += 32) {
        const uint16_t* x = q + head * p.q_head_stride + i * 2;
        set_shared(target + head * kHeadBytes + i * 4, x[0] | static_cast<uint32_t>(x[1]) << 16);
      }
    fence_async_proxy();  // a copy will overwrite them
    __syncwarp();
    if (lane == 0) mbarrier_arrive(full);
  }
}

template <class S>
__device__ __forceinline__ void produce(const SparseMlaParams& p, const KeySplit& split, int page_shift, int64_t items,
                                        uint32_t base) {
  const int lane = threadIdx.x % 32;
  // By a reduction, so that it and all addresses are in uniform registers: half as many instructions a copy.
  const int warp = __reduce_max_sync(~0u, threadIdx.x / 32 % 4);
  const uint32_t pointers = base + S::kRecordsOffset + warp * (2 * kQuarter * 8);
  uint32_t first_step = 0, item_count = 0;
  for (int64_t number = blockIdx.x; number < items; number += gridDim.x, ++item_count) {
    const Item item = work_item<S>(p, split, number);
    // Half a warp a step: two steps at a time. The first entries are under way before the row's request is known.
    const int32_t* list = p.indices + item.row * p.indices_stride + item.begin + lane / kQuarter * kKeys +
                          warp * kQuarter + lane % kQuarter;
    auto load_entry = [&](int step) {
      return step + lane / kQuarter < item.steps ? load_int(list + step * kKeys) : -1;
    };
    const int32_t first = load_entry(0);
    int32_t entry = load_entry(2);
    // A call's first queries are what it waits for; later ones wait for the ring, and lookups need not wait for them.
    if (item_count == 0) copy_queries<S>(p, item, warp, queries_position<S>(first_step, item_count), base);
    const RowKeys keys = row_keys(p, item.row);
    Lookup lookup = begin_lookup(p, keys, page_shift, first);
    if (item_count > 0) copy_queries<S>(p, item, warp, queries_position<S>(first_step, item_count), base);
    for (int step = 0; step < item.steps; step += 2) {
      const uint8_t* record = finish_lookup(p, keys, page_shift, lookup);
      const uint32_t used = __ballot_sync(~0u, record != nullptr);
      set_shared(pointers + lane * 8,
                 reinterpret_cast<uint64_t>(record != nullptr ? record : reinterpret_cast<uint8_t*>(zero_record)));
      __syncwarp();
      lookup = begin_lookup(p, keys, page_shift, entry);  // both loads run during the copies below
      entry = load_entry(step + 4);
      for (int i = 0; i < 2 && step + i < item.steps; ++i) {
        const RingPosition<S> position = keys_position<S>(first_step + step + i, item_count) + warp;
        const uint32_t mask = used >> i * kQuarter & 0xffff;
        const int slot = position.slot();
        const uint32_t full = S::full(base, slot), target = S::quarter(base, slot);
        mbarrier_wait(S::empty(base, slot), position.parity() ^ 1);
        if (lane == 0) {
          set_shared(S::mask(base, slot), mask);
          if (mask != 0) mbarrier_expect_bytes(full, kQuarterBytes);
          else mbarrier_arrive(full);
        }
        __syncwarp();  // or the copies below take the way of a divergent warp, many times slower
        if (mask != 0) {
          ulonglong2 next = shared_u64x2(pointers + i * kQuarter * 8);
#pragma unroll
          for (int j = 0; j < kQuarter; j += 2) {
            const ulonglong2 records = next;
            if (j + 2 < kQuarter) next = shared_u64x2(pointers + (i * kQuarter + j + 2) * 8);
            bulk_copy_by_warp(target + j * kRecord, reinterpret_cast<const void*>(records.x), kRecord, full);
            bulk_copy_by_warp(target + (j + 1) * kRecord, reinterpret_cast<const void*>(records.y), kRecord, full);
          }
        }
      }
      __syncwarp();  // the pointers have been read
    }
    first_step += item.steps;
  }
}

}  // namespace few_heads
}  // namespace sparse_cp_ops
