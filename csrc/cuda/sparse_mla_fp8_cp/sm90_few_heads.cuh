// Hopper kernel for few heads a block: sizes, shared memory and work items that its roles share.
//
// Both products are swapped, scores^T = K . Q^T and out^T = V^T . weights^T, so that the heads are columns: 8, 16 or 32
// cost what they are. K and V^T are first operands in registers, converted straight out of the raw records, which
// producer warps bring by bulk copies. Scorers (warpgroups) take whole steps of 64 keys in turn, adders all steps, each
// for its half of the dimensions. With a split list the blocks of a cluster join their states at the end of a row.
// Picture: docs/kernels/sparse_mla_few_heads.md.
//
// Numbers: e4m3 is exact in f16, so a sum over one scale tile is exact before its fp32 scale. Weights carry the scale
// of their values, weight' = exp2(logit - peak) * scale * 2^-reference, in f16; a head has one running peak, a scale
// tile one running reference, the exponent of the largest scale so far. A step settles them before the next one does.
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
inline constexpr int kSlotHeads = 8;  // whose queries pass through a ring slot
static_assert(kSlotHeads * kQkDim * 2 <= kQuarterBytes);
inline constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

template <int kHeads_, int kScorers_>
struct Shape {
  static constexpr int kHeads = kHeads_, kScorers = kScorers_, kAdders = 2;
  static constexpr int kScorerThreads = kScorers * kWarpgroup, kAdderThreads = kAdders * kWarpgroup;
  static constexpr int kProducerThreads = kWarpgroup;
  static constexpr int kThreads = kScorerThreads + kAdderThreads + kProducerThreads;
  // A block's registers are those that it was launched with; the roles divide them.
  static constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
  static constexpr int kScorerRegisters = kScorers == 2 ? 104 : 88, kAdderRegisters = kScorers == 2 ? 112 : 88;
  static constexpr int kProducerRegisters = kScorers == 2 ? 48 : 40;
  static_assert(kScorers * kScorerRegisters + kAdders * kAdderRegisters + kProducerRegisters <=
                (kScorers + kAdders + 1) * kLaunchRegisters);
  static constexpr int kSums = kScorers == 2 ? 1 : 2;  // of scale tiles that a scorer has registers for
  // Pairs of products whose keys, or values, are read in advance.
  static constexpr int kAhead = kScorers == 2 ? 2 : 3, kAdderAhead = 2;
  static constexpr int kColumns = kHeads / 4;  // heads of a thread: 8 * j + 2 * (lane % 4) + e at 2 * j + e
  static constexpr int kQuerySlots = kHeads / kSlotHeads;
  static constexpr int kAccumulators = kHeads / 2;       // of a thread in a 64 x kHeads product
  static constexpr int kTiles = kLatentTiles / kAdders;  // scale tiles of an adder

  // Shared memory, bytes from a base that is aligned to 1024.
  static constexpr uint32_t kChunkBytes = kHeads * 128;  // 64 dimensions of the queries, or a scale tile's weights
  static constexpr uint32_t kQueryOffset = 0;
  static constexpr uint32_t kWeightsOffset = kQueryOffset + kChunks * kChunkBytes;           // [scorer][scale tile]
  static constexpr uint32_t kWeightsBytes = kLatentTiles * kChunkBytes;                      // of a scorer
  static constexpr uint32_t kQueryFactorOffset = kWeightsOffset + kScorers * kWeightsBytes;  // float [heads]
  static constexpr uint32_t kStateOffset = kQueryFactorOffset + kHeads * 4;
  static constexpr uint32_t kStateBytes = kHeads * 4 + 32;
  static constexpr uint32_t kFinalOffset = kStateOffset + 2 * kStateBytes;  // of this item and the next
  static constexpr uint32_t kFinalBytes = 3 * kHeads * 4 + 32;
  static constexpr uint32_t kMoveOffset = kFinalOffset + kFinalBytes;  // [scorer]
  static constexpr uint32_t kMoveBytes = kHeads * 4 + 32;
  static constexpr uint32_t kScratchOffset = kMoveOffset + kScorers * kMoveBytes;        // float [scorer][warp][heads]
  static constexpr uint32_t kTotalsOffset = kScratchOffset + kScorers * 4 * kHeads * 4;  // float [scorer][warp][heads]
  static constexpr uint32_t kReferenceOffset = kTotalsOffset + kScorers * 4 * kHeads * 4;  // int [scorer][warp][tile]
  static constexpr uint32_t kStatesOffset = kReferenceOffset + kScorers * 4 * kLatentTiles * 4;  // [rank]
  static constexpr int kMaxParts = few_heads_parts(kHeads), kStateWords = 2 * kHeads + kLatentTiles;
  static constexpr uint32_t kRecordsOffset =
      kStatesOffset + kMaxParts * kStateWords * 4;  // pointers [warp][2][quarter]
  static constexpr uint32_t kBarrierOffset = kRecordsOffset + 4 * 2 * kQuarter * 8;
  static constexpr uint32_t kFewBarriers = kScorers * 3 + 4;
  static constexpr uint32_t kSlotBarrierOffset = kBarrierOffset + kFewBarriers * 8;
  static constexpr uint32_t kLimit = 227 * 1024, kBytesASlot = kQuarterBytes + 20;  // two barriers and a mask
  static constexpr int kSlots = (kLimit - kSlotBarrierOffset - 16) / kBytesASlot;
  static constexpr uint32_t kMaskOffset = kSlotBarrierOffset + kSlots * 16;
  static constexpr uint32_t kRingOffset = (kMaskOffset + kSlots * 4 + 15) / 16 * 16;
  static constexpr uint32_t kSharedBytes = kRingOffset + kSlots * kQuarterBytes;
  static_assert(kSharedBytes <= kLimit && kRecordsOffset % 16 == 0 && kSlots <= 32 && kSlots >= (kScorers + 1) * 4 - 1);
  // A producer warp passes over an item's queries and a step; a barrier shows one round.
  static_assert(kSlots >= 4 + kQuerySlots);

  // What the blocks of a cluster send each other: states, in memory of their own; sums, in pieces of half a head, which
  // lie in the ring in front of those that arrive. The pitch spreads the pieces over the banks.
  static constexpr int kPieces = kAdders * kHeads, kPieceFloats = kLatentDim / kAdders;
  static constexpr uint32_t kPieceBytes = kPieceFloats * 4 + 16;
  static constexpr uint32_t kArrivedOffset = kRingOffset + kPieces * kPieceBytes;
  static_assert((2 * kPieces + kMaxParts) * kPieceBytes <= kSlots * kQuarterBytes);
  __device__ static uint32_t sent_state(uint32_t base, int rank, int word) {
    return base + kStatesOffset + (rank * kStateWords + word) * 4;
  }

  __device__ static uint32_t full(uint32_t base, int slot) { return base + kSlotBarrierOffset + slot * 16; }
  __device__ static uint32_t empty(uint32_t base, int slot) { return base + kSlotBarrierOffset + slot * 16 + 8; }
  // Of a scorer's weights: written, read; and whether the references of its step are settled.
  __device__ static uint32_t weights_full(uint32_t base, int w) { return base + kBarrierOffset + w * 24; }
  __device__ static uint32_t weights_empty(uint32_t base, int w) { return base + kBarrierOffset + w * 24 + 8; }
  __device__ static uint32_t settled(uint32_t base, int w) { return base + kBarrierOffset + w * 24 + 16; }
  // Of the final state of an item.
  __device__ static uint32_t final_full(uint32_t base) { return base + kBarrierOffset + kScorers * 24; }
  __device__ static uint32_t final_empty(uint32_t base) { return base + kBarrierOffset + kScorers * 24 + 8; }
  // Of the states and the sums that the blocks of the cluster send.
  __device__ static uint32_t stated(uint32_t base) { return base + kBarrierOffset + kScorers * 24 + 24; }
  __device__ static uint32_t joined(uint32_t base) { return base + kBarrierOffset + kScorers * 24 + 16; }
  // uint32: the used keys of the quarter (nothing has been copied if there are none).
  __device__ static uint32_t mask(uint32_t base, int slot) { return base + kMaskOffset + slot * 4; }
  __device__ static uint32_t quarter(uint32_t base, int slot) { return base + kRingOffset + slot * kQuarterBytes; }
  __device__ static uint32_t weights(uint32_t base, int w, int tile) {
    return base + kWeightsOffset + w * kWeightsBytes + tile * kChunkBytes;
  }

  // State of the item, as the last settled step has left it: peaks, references (biased exponents), how often it moved.
  __device__ static uint32_t peak(uint32_t base, int head) { return base + kStateOffset + head * 4; }
  __device__ static uint32_t reference(uint32_t base) { return base + kStateOffset + kHeads * 4; }
  __device__ static uint32_t version(uint32_t base) { return base + kStateOffset + kHeads * 4 + 16; }
  // Final state of the block: peaks, totals, references; then, of its cluster, the inverse totals, and the powers
  // behind the joint references.
  __device__ static uint32_t final_peak(uint32_t base, int head) { return base + kFinalOffset + head * 4; }
  __device__ static uint32_t final_total(uint32_t base, int head) { return final_peak(base, kHeads + head); }
  __device__ static uint32_t joint_inverse(uint32_t base, int head) { return final_peak(base, 2 * kHeads + head); }
  __device__ static uint32_t final_reference(uint32_t base, int tile) { return final_peak(base, 3 * kHeads + tile); }
  __device__ static uint32_t joint_power(uint32_t base, int tile) { return final_peak(base, 3 * kHeads + 4 + tile); }
  __device__ static uint32_t totals(uint32_t base, int w, int warp) {
    return base + kTotalsOffset + (w * 4 + warp) * kHeads * 4;
  }
  // What a scorer tells the adders with the weights of a step: factors of heads, ratios of tiles, an Event.
  __device__ static uint32_t move_factor(uint32_t base, int w, int head) {
    return base + kMoveOffset + w * kMoveBytes + head * 4;
  }
  __device__ static uint32_t move_ratio(uint32_t base, int w) { return move_factor(base, w, kHeads); }
  __device__ static uint32_t event(uint32_t base, int w) { return move_factor(base, w, kHeads + 4); }
};

enum Event : uint32_t { kAdd, kMoveAndAdd, kSkip };

// A place in the sequence of what goes through the ring: of each item, its queries, then the quarters of its steps.
template <class S>
struct RingPosition {
  uint32_t count = 0;

  __device__ int slot() const { return count % S::kSlots; }
  __device__ uint32_t parity() const { return count / S::kSlots & 1; }
  __device__ RingPosition operator+(int quarters) const { return {count + quarters}; }
};

template <class S>
__device__ __forceinline__ int next_slot(int slot) {  // without a division
  return slot == S::kSlots - 1 ? 0 : slot + 1;
}

// Steps and items are counted over all of a block's.
template <class S>
__device__ __forceinline__ RingPosition<S> queries_position(uint32_t first_step, uint32_t item_count) {
  return {first_step * 4 + item_count * S::kQuerySlots};
}
template <class S>
__device__ __forceinline__ RingPosition<S> keys_position(uint32_t step, uint32_t item_count) {
  return {step * 4 + (item_count + 1) * S::kQuerySlots};
}

// Step `number` of a block, over all its items, is that of scorer number % kScorers.
template <class S>
struct StepNumber {
  uint32_t number;
  __device__ int scorer() const { return number % S::kScorers; }
  __device__ uint32_t parity() const { return number / S::kScorers & 1; }
};

enum NamedBarrier { kScorersBarrier = 1, kAddersBarrier = 2, kScorerBarrier = 3 };  // scorers count on from the last

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
