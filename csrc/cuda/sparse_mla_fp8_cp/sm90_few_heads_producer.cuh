// Few heads, producer warps: lists -> records in the ring. All four resolve the 64 entries of a step, each copies 16.
#pragma once

#include "../device/bulk_copy.cuh"
#include "sm90_few_heads.cuh"

namespace sparse_cp_ops {
namespace few_heads {

// Stands for the record of an unused entry: a slot must hold finite numbers, also where weights are 0.
static __device__ uint4 zero_record[kMlaRecordBytes / 16];

__device__ __forceinline__ const uint8_t* find_record(const SparseMlaParams& p, const RowKeys& keys, int page_shift,
                                                      int32_t index) {
  if (!keys.may_use(p, index)) return nullptr;
  int64_t page = index >> page_shift;
  if (p.paged) {
    if (page >= p.table_width) return nullptr;
    page = keys.table[page];
  }
  if (page < 0 || page >= p.num_pages) return nullptr;
  return p.kv_cache + page * p.page_stride + (index & ((1 << page_shift) - 1)) * static_cast<int>(kMlaRecordBytes);
}

template <class S>
__device__ __forceinline__ void prefetch_queries(const SparseMlaParams& p, const Item& item) {
  constexpr int kLines = kQkDim * 2 / 128;
  const auto* q = static_cast<const uint16_t*>(p.q) + item.row * p.q_row_stride + item.head0 * p.q_head_stride;
  for (int i = threadIdx.x - S::kConsumers; i < S::kHeads * kLines; i += kWarpgroup)
    prefetch_l2(q + i / kLines * p.q_head_stride + i % kLines * 64);
}

template <class S>
__device__ __forceinline__ void produce(const SparseMlaParams& p, const KeySplit& split, int page_shift, int64_t items,
                                        uint32_t base) {
  const int lane = threadIdx.x % 32, warp = __shfl_sync(~0u, threadIdx.x / 32 % 4, 0);
  const auto* nothing = reinterpret_cast<const uint8_t*>(zero_record);
  RingPosition<S> position = RingPosition<S>{} + warp;
  for (int64_t number = blockIdx.x; number < items; number += gridDim.x) {
    const Item item = work_item<S>(p, split, number);
    const RowKeys keys = row_keys(p, item.row);
    const int32_t* list = keys.list + item.begin + lane;
    int32_t entries[2] = {-1, -1};  // of the step after the next
    const uint8_t* records[2];      // of the next step
    auto load_entries = [&](int step) {
#pragma unroll
      for (int i = 0; i < 2; ++i) entries[i] = step < item.steps ? list[step * kKeys + i * 32] : -1;
    };
    auto find_records = [&] {
#pragma unroll
      for (int i = 0; i < 2; ++i) records[i] = find_record(p, keys, page_shift, entries[i]);
    };
    load_entries(0);
    find_records();
    load_entries(1);
    for (int step = 0; step < item.steps; ++step) {
      const uint32_t used[2] = {__ballot_sync(~0u, records[0] != nullptr), __ballot_sync(~0u, records[1] != nullptr)};
      const bool any = used[0] | used[1];
      const uint8_t* own = warp < 2 ? records[0] : records[1];
      if (own == nullptr) own = nothing;
      const uint32_t mask = ((warp < 2 ? used[0] : used[1]) >> warp % 2 * kQuarter & 0xffff) | (any ? 1u << 16 : 0) |
                            position.tag() << kTagShift;
      find_records();  // both loads run during the copies below
      load_entries(step + 2);
      const int slot = position.slot();
      const uint32_t full = S::full(base, slot);
      mbarrier_wait(S::empty(base, slot), position.parity() ^ 1);
      if (lane == 0) {
        set_shared(S::mask(base, slot), mask);
        if (any) mbarrier_expect_bytes(full, kQuarterBytes);
        else mbarrier_arrive(full);
      }
      __syncwarp();  // or the shuffles below take the way of a divergent warp, many times slower
      if (any) {
        const uint32_t target = S::quarter(base, slot);
#pragma unroll
        for (int i = 0; i < kQuarter; ++i) {
          const auto address = reinterpret_cast<uint64_t>(own);
          const uint64_t record = __shfl_sync(~0u, address, warp % 2 * kQuarter + i);
          bulk_copy_by_warp(target + i * kRecord, reinterpret_cast<const void*>(record), kRecord, full);
        }
      }
      position = position + 4;
    }
    if (number + gridDim.x < items) prefetch_queries<S>(p, work_item<S>(p, split, number + gridDim.x));
  }
}

}  // namespace few_heads
}  // namespace sparse_cp_ops
