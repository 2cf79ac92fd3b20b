// Hopper kernel for few heads a block: sizes, shared memory and work items that its roles share.
//
// Both products are swapped, scores^T = K . Q^T and out^T = V^T . weights^T, so that the heads are columns: 8, 16 or 32
// cost what they are. K and V^T are first operands in registers, converted straight out of the raw records, which
// producer warps bring by bulk copies. Each worker (a warpgroup) takes whole steps of 64 keys; workers, and with a
// split list the blocks of a cluster, join their states at the end of a row. Picture: docs/kernels/sparse_mla.md.
//
// Numbers: e4m3 is exact in f16, so a sum over one scale tile is exact before its fp32 scale. Weights carry the scale
// of their values, weight' = exp2(logit - peak) * scale * 2^-reference, in f16; a head has one running peak, a scale
// tile one running reference, the exponent of the largest scale so far.
#pragma once

#include "../device/mma_sync.cuh"
#include "../device/shared_access.cuh"
#include "../device/sm90.cuh"
#include "../device/wgmma.cuh"
#include "../device/wgmma_registers.cuh"
#include "kernels.h"
#include "mla_record.cuh"
#include "row_keys.cuh"

namespace sparse_cp_ops {
namespace few_heads {

inline constexpr int kWarpgroup = 128;
inline constexpr int kKeys = 64;       // of a step
inline constexpr int kQuarter = 16;    // keys that a warp scores, and that a ring slot holds
inline constexpr int kChunkDims = 64;  // 128 bytes: width of a swizzled tile
inline constexpr int kChunks = kQkDim / kChunkDims, kRopeChunk = kLatentDim / kChunkDims;
inline constexpr uint32_t kRecord = kMlaRecordBytes;
inline constexpr uint32_t kQuarterBytes = kQuarter * kRecord;
inline constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

template <int kHeads_, int kWorkers_>
struct Shape {
  static constexpr int kHeads = kHeads_, kWorkers = kWorkers_;
  static constexpr int kConsumers = kWorkers * kWarpgroup, kThreads = kConsumers + kWarpgroup;
  // What a multiprocessor has for that many warpgroups.
  static constexpr int kConsumerRegisters = kWorkers == 2 ? 232 : 152, kProducerRegisters = kWorkers == 2 ? 40 : 56;
  static constexpr int kProducts = 2;  // of 16 dimensions in a group of score instructions; 4 don't fit with 32 heads
  static constexpr int kColumns = kHeads / 4;       // heads of a thread: 8 * j + 2 * (lane % 4) + e at 2 * j + e
  static constexpr int kAccumulators = kHeads / 2;  // of a thread in a 64 x kHeads product

  // Shared memory, bytes from a base that is aligned to 1024.
  static constexpr uint32_t kChunkBytes = kHeads * 128;  // 64 dimensions of the queries, or a scale tile's weights
  static constexpr uint32_t kQueryOffset = 0;
  static constexpr uint32_t kWeightsOffset = kQueryOffset + kChunks * kChunkBytes;           // [worker][scale tile]
  static constexpr uint32_t kWeightsBytes = kLatentTiles * kChunkBytes;                      // of a worker
  static constexpr uint32_t kQueryFactorOffset = kWeightsOffset + kWorkers * kWeightsBytes;  // float [heads]
  static constexpr uint32_t kPeakOffset = kQueryFactorOffset + kHeads * 4;                   // float [worker][heads]
  static constexpr uint32_t kScratchOffset = kPeakOffset + kWorkers * kHeads * 4;  // float [worker][warp][heads]
  static constexpr uint32_t kReferenceOffset = kScratchOffset + kWorkers * 4 * kHeads * 4;  // int [worker][warp][tile]
  static constexpr uint32_t kBlockOffset = kReferenceOffset + kWorkers * 4 * kLatentTiles * 4;  // State of the block
  static constexpr uint32_t kRecordsOffset =
      kBlockOffset + (3 * kHeads + 8) * 4;  // pointers [producer warp][2][quarter]
  static constexpr uint32_t kBarrierOffset = kRecordsOffset + 4 * 2 * kQuarter * 8;
  static constexpr uint32_t kLimit = 227 * 1024, kBytesASlot = kQuarterBytes + 20;  // two barriers and a mask
  static constexpr int kSlots = (kLimit - kBarrierOffset - 16) / kBytesASlot;
  static constexpr uint32_t kMaskOffset = kBarrierOffset + kSlots * 16;
  static constexpr uint32_t kRingOffset = (kMaskOffset + kSlots * 4 + 15) / 16 * 16;
  static constexpr uint32_t kSharedBytes = kRingOffset + kSlots * kQuarterBytes;
  static_assert(kSharedBytes <= kLimit && kBarrierOffset % 8 == 0 && kSlots >= kWorkers * 4);

  // fp32 results of the block for the others of its cluster, in the ring: rows of 512, spread over the banks.
  static constexpr uint32_t kStagingPitch = kLatentDim * 4 + 16;
  static_assert(kHeads * kStagingPitch <= kSlots * kQuarterBytes);

  __device__ static uint32_t full(uint32_t base, int slot) { return base + kBarrierOffset + slot * 16; }
  __device__ static uint32_t empty(uint32_t base, int slot) { return base + kBarrierOffset + slot * 16 + 8; }
  // uint32: bits 0 to 15 the used keys of the quarter (nothing has been copied if there are none), above them the tag.
  __device__ static uint32_t mask(uint32_t base, int slot) { return base + kMaskOffset + slot * 4; }
  __device__ static uint32_t quarter(uint32_t base, int slot) { return base + kRingOffset + slot * kQuarterBytes; }
};

inline constexpr int kTagShift = 16;
inline constexpr uint32_t kNoTag = ~0u >> kTagShift;  // of a slot that has not been used

// A place in the sequence of quarters that go through the ring.
template <class S>
struct RingPosition {
  uint32_t count = 0;

  __device__ int slot() const { return count % S::kSlots; }
  __device__ uint32_t parity() const { return count / S::kSlots & 1; }
  // Tells the step from those that used its slots before.
  __device__ uint32_t tag() const { return count / 4 & kNoTag >> 1; }
  __device__ RingPosition operator+(int quarters) const { return {count + quarters}; }
};

enum NamedBarrier { kConsumerBarrier = 1, kWorkerBarrier = 2 };  // workers count on from the second

// One row's share of a block: kHeads heads over one part of the row's list.
struct Item {
  int64_t row;
  int part, head0;
  int begin, steps;  // in the row's list; of 64 entries
};

// Parts of a row and head group are neighbours: they form a cluster.
template <class S>
__device__ __forceinline__ Item work_item(const SparseMlaParams& p, const KeySplit& split, int64_t number) {
  const int groups = static_cast<int>(p.heads) / S::kHeads, parts = static_cast<int>(split.parts);
  const int inner = static_cast<int>(number % (groups * parts));
  Item item;
  item.row = number / (groups * parts);
  item.part = inner % parts;
  item.head0 = inner / parts * S::kHeads;
  item.begin = item.part * static_cast<int>(split.width);
  item.steps = max(min(static_cast<int>(split.width), static_cast<int>(p.topk) - item.begin), 0) / kKeys;
  return item;
}

}  // namespace few_heads
}  // namespace sparse_cp_ops
