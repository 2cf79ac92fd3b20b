// Few heads, producer warps: lists -> records in the ring. Warp i takes quarter i of each step.
#pragma once

#include "../device/bulk_copy.cuh"
#include "sm90_few_heads.cuh"

namespace sparse_cp_ops {
namespace few_heads {

// Stands for the record of an unused entry: a slot must hold finite numbers, also where weights are 0.
static __device__ uint4 zero_record[kMlaRecordBytes / 16];

// An entry on its way to its record: the page of the cache is being looked up.
struct Lookup {
  int32_t index;
  int32_t page;  // -1: not used
};

__device__ __forceinline__ Lookup begin_lookup(const SparseMlaParams& p, const RowKeys& keys, int page_shift,
                                               int32_t index) {
  const int page = index >> page_shift;
  Lookup lookup{index, -1};
  if (keys.may_use(p, index) && (!p.paged || page < p.table_width)) lookup.page = p.paged ? keys.table[page] : page;
  return lookup;
}

__device__ __forceinline__ const uint8_t* finish_lookup(const SparseMlaParams& p, int page_shift, Lookup lookup) {
  if (lookup.page < 0 || lookup.page >= p.num_pages) return nullptr;
  return p.kv_cache + lookup.page * p.page_stride +
         (lookup.index & ((1 << page_shift) - 1)) * static_cast<int>(kMlaRecordBytes);
}

// Issued where it stands.
__device__ __forceinline__ int32_t load_int(const int32_t* address) {
  int32_t x;
  asm volatile("ld.global.s32 %0, [%1];" : "=r"(x) : "l"(address) : "memory");
  return x;
}

template <class S>
__device__ __forceinline__ void prefetch_queries(const SparseMlaParams& p, const Item& item) {
  constexpr int kLines = kQkDim * 2 / 128;
  const auto* q = static_cast<const uint16_t*>(p.q) + item.row * p.q_row_stride + item.head0 * p.q_head_stride;
  for (int i = threadIdx.x - (S::kScorerThreads + S::kAdderThreads); i < S::kHeads * kLines; i += kWarpgroup)
    prefetch_l2(q + i / kLines * p.q_head_stride + i % kLines * 64);
}

template <class S>
__device__ __forceinline__ void produce(const SparseMlaParams& p, const KeySplit& split, int page_shift, int64_t items,
                                        uint32_t base) {
  const int lane = threadIdx.x % 32, warp = __shfl_sync(~0u, threadIdx.x / 32 % 4, 0);
  const uint32_t pointers = base + S::kRecordsOffset + warp * (2 * kQuarter * 8);
  RingPosition<S> position = RingPosition<S>{} + warp;
  for (int64_t number = blockIdx.x; number < items; number += gridDim.x) {
    const Item item = work_item<S>(p, split, number);
    // Half a warp a step: two steps at a time. The first entries are under way before the row's request is known.
    const int32_t* list = p.indices + item.row * p.indices_stride + item.begin + lane / kQuarter * kKeys +
                          warp * kQuarter + lane % kQuarter;
    auto load_entry = [&](int step) {
      return step + lane / kQuarter < item.steps ? load_int(list + step * kKeys) : -1;
    };
    const int32_t first = load_entry(0);
    int32_t entry = load_entry(2);
    const RowKeys keys = row_keys(p, item.row);
    Lookup lookup = begin_lookup(p, keys, page_shift, first);
    for (int step = 0; step < item.steps; step += 2) {
      const uint8_t* record = finish_lookup(p, page_shift, lookup);
      const uint32_t used = __ballot_sync(~0u, record != nullptr);
      set_shared(pointers + lane * 8,
                 reinterpret_cast<uint64_t>(record != nullptr ? record : reinterpret_cast<uint8_t*>(zero_record)));
      __syncwarp();
      lookup = begin_lookup(p, keys, page_shift, entry);  // both loads run during the copies below
      entry = load_entry(step + 4);
      for (int i = 0; i < 2 && step + i < item.steps; ++i) {
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
        position = position + 4;
      }
      __syncwarp();  // the pointers have been read
    }
    if (number + gridDim.x < items) prefetch_queries<S>(p, work_item<S>(p, split, number + gridDim.x));
  }
}

}  // namespace few_heads
}  // namespace sparse_cp_ops
