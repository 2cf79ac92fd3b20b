// What the Hopper kernels for 64 heads a block share: work items, and how far their lists reach.
#pragma once

#include "../device/shared_access.cuh"
#include "../device/sm90.cuh"
#include "kernels.h"
#include "row_keys.cuh"

namespace sparse_cp_ops {
namespace sm90 {

inline constexpr int kWarpgroup = 128;
inline constexpr int kHeads = 64;                  // of a block
inline constexpr int kKeys = 64;                   // of a step
inline constexpr uint32_t kChunkBytes = 64 * 128;  // 64 rows of a swizzled tile
inline constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;
inline constexpr int kProducerBarrier = 2;

// Piece `piece` (16 bytes) of row `row` in a swizzled chunk.
__device__ __forceinline__ uint32_t swizzled(int row, int piece) { return row * 128 + ((piece ^ (row & 7)) << 4); }

// One row's share of a block: 64 heads over one part of the row's list.
struct Item {
  int64_t row;
  int part, head0;
  int begin, entries;  // of the row's list
};

__device__ __forceinline__ Item work_item(const SparseMlaParams& p, const KeySplit& split, int64_t number) {
  const int groups = static_cast<int>(p.heads / kHeads), parts = static_cast<int>(split.parts);
  const int inner = static_cast<int>(number % (groups * parts));
  Item item;
  item.row = number / (groups * parts);
  item.part = inner / groups;
  item.head0 = inner % groups * kHeads;
  item.begin = item.part * static_cast<int>(split.width);
  item.entries = min(static_cast<int>(split.width), static_cast<int>(p.topk) - item.begin);
  return item;
}

// Steps up to the last entry that may be used, agreed between the producer's warps. `scratch`: int
// [kProducers / 32] in shared memory.
template <int kProducers>
__device__ __forceinline__ int count_steps(const SparseMlaParams& p, const RowKeys& keys, const Item& item, int thread,
                                           uint32_t scratch) {
  constexpr int kAtOnce = 8;
  int last = -1;
  for (int start = thread; start < item.entries; start += kAtOnce * kProducers) {
    int32_t entries[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int i = start + j * kProducers;
      entries[j] = i < item.entries ? keys.list[item.begin + i] : -1;
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j)
      if (keys.may_use(p, entries[j])) last = start + j * kProducers;
  }
  last = __reduce_max_sync(~0u, last);
  named_barrier(kProducerBarrier, kProducers);  // the scratch of the item before has been read
  if (thread % 32 == 0) set_shared(scratch + thread / 32 * 4, static_cast<uint32_t>(last));
  named_barrier(kProducerBarrier, kProducers);
#pragma unroll
  for (int warp = 0; warp < kProducers / 32; ++warp) last = max(last, static_cast<int>(shared_u32(scratch + warp * 4)));
  return (last + kKeys) / kKeys;
}

template <int kProducers>
__device__ __forceinline__ void prefetch_queries(const SparseMlaParams& p, const Item& item, int thread) {
  constexpr int kLines = kQkDim * 2 / 128;
  const auto* q = static_cast<const uint16_t*>(p.q) + item.row * p.q_row_stride + item.head0 * p.q_head_stride;
  for (int i = thread; i < kHeads * kLines; i += kProducers)
    prefetch_l2(q + i / kLines * p.q_head_stride + i % kLines * 64);
}

}  // namespace sm90
}  // namespace sparse_cp_ops
