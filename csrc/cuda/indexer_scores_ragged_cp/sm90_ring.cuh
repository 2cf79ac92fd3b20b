// The ring of key tiles of the Hopper scoring kernel, and the shares of work that both of its sides walk through.
//
// Tile t of a CTA, counted over all segments, lies in stage t % kStages. Producer warp t % kProducers copies it. Where
// tiles are not shared, warpgroup t % kConsumers takes it and releases it for the others too, who pass it over. By a
// barrier's parity a round differs from the next one only, so nobody may look at a stage two rounds early or late.
// Late: the round in question can't be followed by another without the copy or the release of the one who looks. Early:
// * A producer warp copies its tiles in order. Before tile t it copied t - 4, t - 8 and t - 12, for which the tiles
//   kStages before each were released: one by each warpgroup, so that all are past tile t - 2 * kStages.
// * A warpgroup that waits for t waited for t - kStages too or, if that was another's, met the others since: they meet
//   where shared tiles follow others.
#pragma once

#include "own_plan.cuh"
#include "sm90_mma.cuh"
#include "sm90_scores.h"

namespace sparse_cp_ops {

inline constexpr int kConsumers = 3;  // warpgroups
inline constexpr int kProducers = 4;  // warps
inline constexpr int kStages = 15;
inline constexpr int kPieces = kTileKeys / kPieceKeys;
inline constexpr int kLaneKeyDistance = 8;  // a lane's two keys of a product
inline constexpr int kTileBytes = kTileKeys * kIndexDim;

static_assert(kStages % kConsumers == 0, "a stage belongs to the same warpgroup in every round");
static_assert(kStages >= kConsumers * kProducers && kConsumers == 3 && kProducers == 4, "see above");

struct Stage {
  float scales[kTileKeys];
  int positions[kPieces];  // first key of a piece
};

// Of a warpgroup's rows, a part for each lane of a quad, as the columns of a product (sm90_scores.cu); parts lie in
// different banks.
template <int HEADS>
struct RowWeights {
  alignas(16) float of[kGroupRows][HEADS + 4];
};

template <int HEADS>
struct Shared {  // aligned to 1024 bytes for the swizzle
  uint8_t keys[kStages][kTileBytes];
  uint8_t queries[kConsumers][kGroupRows * HEADS * kIndexDim];
  Stage stages[kStages];
  RowWeights<HEADS> weights[kConsumers];
  OwnPlan plan;
  uint64_t full[kStages], empty[kStages];
};

// A CTA's share of one block.
struct Segment {
  ScoreBlock block;
  int first, last;    // tiles
  int pieces;         // of the block's whole key range
  bool shared_tiles;  // every warpgroup takes every tile
};

// OWN: the CTA may have a plan of its own.
template <bool OWN, class Body>
__device__ __forceinline__ void for_each_segment(const Sm90ScoreTask& task, const OwnPlan& own_plan, const Body& body) {
  const StepTable& steps = task.plan.steps(task.sweep);
  const auto own = [&] { return OWN && plans_itself(task); };
  const auto first_step = [&](int b) { return own() ? own_plan.first_steps[b] : steps.first_steps[b]; };
  const int blocks = own() ? own_plan.count : *task.plan.block_count;
  if (blocks == 0) return;
  const int64_t total = first_step(blocks);
  int step = static_cast<int>(total * blockIdx.x / gridDim.x);
  const int end = static_cast<int>(total * (blockIdx.x + 1) / gridDim.x);
  if (step == end) return;
  for (int b = own() ? own_plan.block_of(step) : steps.cta_blocks[blockIdx.x]; step < end; ++b) {
    const int first = first_step(b), last = min(end, first_step(b + 1));
    if (last == first) continue;
    Segment segment{own() ? own_plan.blocks[b] : task.plan.blocks[b], step - first, last - first, 0, true};
    segment.pieces = ceil_div(segment.block.end - static_cast<int>(task.first_key), kPieceKeys);
    if (!shares_tiles(task.sweep, segment.block.rows)) {
      segment.shared_tiles = false;
      const int tiles = ceil_div(sweep_pieces(task.sweep, segment.block.stride, segment.pieces), kPieces);
      segment.first *= kConsumers;
      segment.last = min(segment.last * kConsumers, tiles);
    }
    body(segment);
    step = last;
  }
}

// What a lane needs of a tile beside the products: its two keys and their scales.
struct TileFacts {
  float scale0, scale1;
  int key;  // the first one; the other is kLaneKeyDistance behind
};

// The same value, which all threads of the warp have, and the compiler knows it.
template <class T>
__device__ __forceinline__ T uniform(T value) {
  return __shfl_sync(~0u, value, 0);
}

// A consumer's view of the ring.
//
// NOTES: stage and parity must stay the same for all threads in the compiler's eyes too (no step of the ring under a
// condition it can't prove uniform in the loop over shared tiles). Otherwise descriptors are built in vector registers
// and moved over before each product, which cost 20 % of the fp32 rate.
template <int HEADS>
struct KeyRing {
  Shared<HEADS>& shared;
  int in_tile;  // this lane's first key of a tile
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void wait() const { mbarrier_wait(shared_address(&shared.full[stage]), parity); }
  // For this warpgroup, or for ARRIVALS of them at once.
  template <int ARRIVALS = 1>
  __device__ __forceinline__ void release() const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(shared_address(&shared.empty[stage]), ARRIVALS);
  }
  __device__ __forceinline__ void advance(int tiles = 1) {
    stage += tiles;
    if (stage >= kStages) stage -= kStages, parity ^= 1;
  }
  __device__ __forceinline__ void go_back(int tiles) {
    stage -= tiles;
    if (stage < 0) stage += kStages, parity ^= 1;
  }
  __device__ __forceinline__ void make_uniform() {
    stage = uniform(stage);
    parity = uniform(parity);
  }
  __device__ __forceinline__ void skip() {
    wait();
    release();
    advance();
  }
  __device__ __forceinline__ uint64_t operand() const { return swizzled_tile(shared_address(shared.keys[stage])); }
  __device__ __forceinline__ TileFacts facts() const {
    const Stage& s = shared.stages[stage];
    const int key = s.positions[in_tile / kPieceKeys] + in_tile % kPieceKeys;
    return {s.scales[in_tile], s.scales[in_tile + kLaneKeyDistance], key};
  }
};

}  // namespace sparse_cp_ops
