// Hopper kernel for precision="fp8": both products in e4m3. Sizes, shared memory and barriers that its roles share.
//
// A record's bytes are operands as they are, as keys from shared memory and, transposed on the way into registers, as
// values. Both products are swapped, scores^T = K . q^T and out^T = V^T . weights^T: keys are rows of the scores, so
// that a thread has the scales of two keys in registers. One warpgroup finds logits, two make weights and add values,
// one copies records. docs/kernels/sparse_mla.md has the picture.
//
// Numbers: a query head is e4m3 * 2^k, its RoPE part bf16. The product of a scale tile is a sum of its own in f16; four
// of them, each times its scale, join in f16, the RoPE part and the key's largest scale in fp32. A weight carries the
// scale of its value, so there are four of each, one a scale tile: e4m3(2^(logit - shift) * scale * 2^-reference), one
// running shift a head and one running reference a scale tile, the exponent of its largest scale so far. Totals are
// sums of weights in front of that rounding, f16 in a step, fp32 over all.
#pragma once

#include "../device/shared_access.cuh"
#include "../device/sm90.cuh"
#include "../device/wgmma.cuh"
#include "kernels.h"
#include "mla_record.cuh"
#include "sm90_items.cuh"

namespace sparse_cp_ops {
namespace fp8_mode {

using sm90::Item;
using sm90::kChunkBytes;
using sm90::kHeads;
using sm90::kKeys;
using sm90::kLn2;
using sm90::kLog2e;
using sm90::kWarpgroup;
using sm90::swizzled;

// Warpgroups 0 and 1 add values, each 256 dimensions of all heads; 2 finds scores; 3 copies. 168 + 168 + 144 + 32
// registers are what a Hopper SM has for four warpgroups.
inline constexpr int kThreads = 4 * kWarpgroup, kScorer = 2;
inline constexpr int kValueRegisters = 168, kScoreRegisters = 144, kProducerRegisters = 32;
inline constexpr int kWarps = kWarpgroup / 32, kValueWarps = 2 * kWarps, kConsumerWarps = 3 * kWarps;

// Keys of a tile and queries alike: a chunk a scale tile (128 e4m3) and one of the RoPE part (64 bf16).
inline constexpr int kRopeChunk = kLatentTiles, kChunks = kRopeChunk + 1;
inline constexpr uint32_t kTileBytes = kChunks * kChunkBytes;
inline constexpr int kTiles = 4;  // of the ring

// Shared memory, bytes from a base that is aligned to 1024.
inline constexpr uint32_t kQueryOffset = 0;
inline constexpr uint32_t kTileOffset = kQueryOffset + kTileBytes;
// [adding warpgroup]: rows are heads, 64 bytes for each of its two scale tiles; keys in the order of publish().
inline constexpr uint32_t kWeightsOffset = kTileOffset + kTiles * kTileBytes;
inline constexpr uint32_t kScaleOffset = kWeightsOffset + 2 * kChunkBytes;      // [tile][key] of 16 bytes, see Message
inline constexpr uint32_t kHeadOffset = kScaleOffset + kTiles * kKeys * 16;     // of two heads: float2 factors, shifts
inline constexpr uint32_t kScratchOffset = kHeadOffset + kHeads * 8;            // scorer's, float [warp][head]
inline constexpr uint32_t kTotalOffset = kScratchOffset + kWarps * kHeads * 4;  // adders', float [warp][head]
inline constexpr uint32_t kInverseOffset = kTotalOffset + kWarps * kHeads * 4;  // float [head]: 1 / total
inline constexpr uint32_t kExponentOffset = kInverseOffset + kHeads * 4;        // int [warp][scale tile]
inline constexpr uint32_t kReferenceOffset = kExponentOffset + kWarps * kLatentTiles * 4;  // uint32 [scale tile]
inline constexpr uint32_t kMessageOffset = kReferenceOffset + kLatentTiles * 4;

// What the scorer tells the adders with a step, one a tile of the ring. Logits less their shift, f16, take the place of
// the tile's RoPE part, where each thread finds those of the scorer's thread of the same number; four f16 a key, the
// factors of its weights, that of its scales.
struct Message {
  uint32_t base;  // of shared memory
  int tile;

  __device__ uint32_t at(uint32_t offset) const { return base + kMessageOffset + tile * kBytes + offset; }
  // If `moved` is not 0, all sums so far are to be multiplied by factor[head] * ratio[scale tile].
  __device__ uint32_t factors() const { return at(0); }                            // float [head]
  __device__ uint32_t ratios() const { return at(kHeads * 4); }                    // float [scale tile]
  __device__ uint32_t moved() const { return at(kHeads * 8 + kLatentTiles * 8); }  // int
  // With the last step of an item: what it ends with.
  __device__ uint32_t shifts() const { return at(kHeads * 4 + kLatentTiles * 4); }      // float [head]
  __device__ uint32_t references() const { return at(kHeads * 8 + kLatentTiles * 4); }  // float [scale tile]
  __device__ uint32_t key_factors(int key) const { return base + kScaleOffset + (tile * kKeys + key) * 16; }
  __device__ uint32_t logits(int thread, int i) const {  // 4 of a thread's 16 pairs
    return base + kTileOffset + tile * kTileBytes + kRopeChunk * kChunkBytes + thread / 32 * 2048 + i * 512 +
           thread % 32 * 16;
  }
  static constexpr uint32_t kBytes = kHeads * 8 + kLatentTiles * 8 + 16;
};

inline constexpr uint32_t kBarrierOffset = kMessageOffset + kTiles * Message::kBytes;
inline constexpr uint32_t kSharedBytes = kBarrierOffset + 3 * kTiles * 8 + 4 * 8 + 2 * 4 + kWarps * 4;
static_assert(kSharedBytes <= 227 * 1024 && kBarrierOffset % 16 == 0);

struct Barriers {
  uint32_t base;
  __device__ uint32_t full(int tile) const { return base + 8 * tile; }
  __device__ uint32_t message(int tile) const { return base + 8 * kTiles + 8 * tile; }
  __device__ uint32_t empty(int tile) const { return base + 16 * kTiles + 8 * tile; }
  __device__ uint32_t item_full(int slot) const { return base + 24 * kTiles + 8 * slot; }
  __device__ uint32_t item_empty(int slot) const { return base + 24 * kTiles + 16 + 8 * slot; }
  __device__ uint32_t steps(int slot) const { return base + 24 * kTiles + 32 + 4 * slot; }  // int: steps of an item
  __device__ uint32_t scan() const { return base + 24 * kTiles + 40; }                      // int [4], of count_steps()
};
// Of the scorer's warps, of the adders', of both.
inline constexpr int kScoreBarrier = 1, kAddBarrier = 3, kQueryBarrier = 4;

// A tile's place in the sequence of all tiles.
struct RingPosition {
  uint32_t count = 0;

  __device__ int tile() const { return count % kTiles; }
  __device__ uint32_t parity() const { return count / kTiles & 1; }
};

__device__ __forceinline__ uint32_t chunk_address(uint32_t base, int tile, int chunk) {
  return base + kTileOffset + tile * kTileBytes + chunk * kChunkBytes;
}

// Scales of an entry that is not used; those of a record are never negative.
inline constexpr uint32_t kUnusedScale = 0xff800000u;

// The block's item number `count`, of all.
__device__ __forceinline__ int64_t item_number(uint32_t count) {
  return blockIdx.x + static_cast<int64_t>(count) * gridDim.x;
}

// The number of steps of the block's item number `count`, once the producer knows it.
__device__ __forceinline__ int wait_for_item(const Barriers& barriers, uint32_t count) {
  const int slot = static_cast<int>(count & 1);
  mbarrier_wait(barriers.item_full(slot), count >> 1 & 1);
  const int steps = static_cast<int>(shared_u32(barriers.steps(slot)));
  __syncwarp();
  if (threadIdx.x % 32 == 0) mbarrier_arrive(barriers.item_empty(slot));
  return steps;
}

}  // namespace fp8_mode
}  // namespace sparse_cp_ops
