// Few heads, an adder: weights times values of every step, for its half of the dimensions, and the results of an item
// that a block has for itself.
#pragma once

#include "sm90_few_heads_scorer.cuh"

namespace sparse_cp_ops {
namespace few_heads {

template <class S>
struct Adder {
  // out^T: [scale tile][even or odd pair of dimensions]; in an accumulator 4 * j + 2 * half + e, head 8 * j + 2 * (lane
  // % 4) + e, dimension 128 * (first_tile() + tile) + dims() + 2 * pair + half.
  float o[S::kTiles][2][S::kAccumulators];
  uint32_t base;
  int a, warp, lane;

  __device__ int thread() const { return threadIdx.x - S::kScorerThreads; }  // of all adders
  __device__ int first_tile() const { return a * S::kTiles; }
  // First of the four neighbouring dimensions of a scale tile that this thread holds: a warp has four words and the
  // four that lie 8 further.
  __device__ int dims() const { return 4 * (lane / 4 % 4 + lane / 16 * 8 + warp % 2 * 4 + warp / 2 * 16); }
  // First of the four keys of a quarter whose values it loads (Scorer::key of rows 2 * (lane % 4) and on).
  __device__ int key() const { return lane % 2 * 4 + lane % 4 / 2; }
  __device__ int column(int j) const { return 8 * j + 2 * (lane % 4); }  // the first of two
};

// References have moved: sums get the factors of their heads and the ratios of their scale tiles.
template <class S>
__device__ __forceinline__ void move_sums(Adder<S>& c, int scorer) {
#pragma unroll
  for (int t = 0; t < S::kTiles; ++t) {
    const float ratio = shared_f32(S::move_ratio(c.base, scorer) + (c.first_tile() + t) * 4);
#pragma unroll
    for (int j = 0; j < S::kHeads / 8; ++j) {
      const float2 factor = shared_f32x2(S::move_factor(c.base, scorer, c.column(j)));
      const float x = factor.x * ratio, y = factor.y * ratio;
#pragma unroll
      for (int i = 0; i < 8; ++i) c.o[t][i / 4][4 * j + i % 4] *= i & 1 ? y : x;
    }
  }
}

// out^T += V^T . weights^T. Frees the quarters one after the other.
template <class S>
__device__ __forceinline__ void add_values(Adder<S>& c, const RingPosition<S>& position, int scorer) {
  constexpr int kGroups = 4 * S::kTiles;  // of two products: 16 keys, a scale tile
  const uint32_t place = c.key() * kRecord + c.first_tile() * kScaleTile + c.dims();
  const uint64_t weights = swizzled_tile(S::weights(c.base, scorer, c.first_tile()));
  int slots[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) slots[i] = i == 0 ? position.slot() : next_slot<S>(slots[i - 1]);
  uint32_t words[S::kAdderAhead][4], address;
  auto load = [&](int group) {
    const int tile = group % S::kTiles;
    if (tile == 0) address = S::quarter(c.base, slots[group / S::kTiles]) + place;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      words[group % S::kAdderAhead][i] = shared_u32(address + tile * kScaleTile + (i % 2 * 2 + i / 2 * 8) * kRecord);
  };
#pragma unroll
  for (int group = 0; group < S::kAdderAhead; ++group) load(group);
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    const int product = group / S::kTiles, tile = group % S::kTiles;
    const uint32_t (&x)[4] = words[group % S::kAdderAhead];
    wgmma_wait<1>();
    uint32_t a[2][4];
#pragma unroll
    for (int pair = 0; pair < 2; ++pair)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t keys = __byte_perm(x[2 * i], x[2 * i + 1], pair ? 0x7362 : 0x5140);
        a[pair][2 * i] = latent_pair(keys, false);
        a[pair][2 * i + 1] = latent_pair(keys, true);
      }
    if (group + S::kAdderAhead < kGroups) load(group + S::kAdderAhead);
    wgmma_fence();
#pragma unroll
    for (int pair = 0; pair < 2; ++pair)
      wgmma_registers_f16(c.o[tile][pair], a[pair], advance(weights, tile * S::kChunkBytes + product * 32), true);
    wgmma_commit();
    if (tile == S::kTiles - 1) {
      __syncwarp();
      if (c.lane == 0) mbarrier_arrive(S::empty(c.base, slots[product]));
    }
  }
  wgmma_wait<0>();
#pragma unroll
  for (int i = 0; i < 2 * S::kTiles; ++i) pin(c.o[i / 2][i % 2]);
}

template <class S>
__device__ __forceinline__ void take_step(Adder<S>& c, uint32_t number, uint32_t item_count, bool first) {
  const RingPosition<S> position = keys_position<S>(number, item_count);
  const StepNumber<S> step{number};
  const int scorer = step.scorer();
  mbarrier_wait(S::weights_full(c.base, scorer), step.parity());
  __syncwarp();
  // The scorers have the item's queries. Slots become empty in the order of the ring, so that producers never meet a
  // barrier that is two rounds behind.
  if (first && c.lane < S::kQuerySlots)
    mbarrier_arrive(S::empty(c.base, (position + (c.lane - S::kQuerySlots)).slot()));
  const uint32_t event = polled_u32(S::event(c.base, scorer));
  if (event == kSkip) {
    if (c.lane < 4) mbarrier_arrive(S::empty(c.base, (position + c.lane).slot()));
  } else {
    if (event == kMoveAndAdd) move_sums(c, scorer);
    add_values(c, position, scorer);
  }
  __syncwarp();
  if (c.lane == 0) mbarrier_arrive(S::weights_empty(c.base, scorer));
}

// The four neighbouring dimensions of head column i that a thread holds in a scale tile.
template <class S>
__device__ __forceinline__ float4 four_values(const Adder<S>& c, int tile, int i) {
  const int k = i / 2 * 4 + i % 2;
  return make_float4(c.o[tile][0][k], c.o[tile][0][k + 2], c.o[tile][1][k], c.o[tile][1][k + 2]);
}

__device__ __forceinline__ uint2 pack_bf16x4(const float4& x, float factor) {
  return make_uint2(float_to_bf16x2(x.x * factor, x.y * factor), float_to_bf16x2(x.z * factor, x.w * factor));
}

__device__ __forceinline__ float log_sum(float peak, float total) {
  return total == 0.0f ? -INFINITY : peak * kLn2 + logf(total);
}

// 2^(reference - 127)
__device__ __forceinline__ float reference_power(int reference) {
  return __uint_as_float(static_cast<uint32_t>(reference) << 23);
}

template <class S>
__device__ __forceinline__ void store_results(const SparseMlaParams& p, const Item& item, const Adder<S>& c) {
  const int64_t first = item.row * p.heads + item.head0;
  if (c.thread() < S::kHeads)
    p.lse[first + c.thread()] =
        log_sum(shared_f32(S::final_peak(c.base, c.thread())), shared_f32(S::final_total(c.base, c.thread())));
  float powers[S::kTiles];
#pragma unroll
  for (int t = 0; t < S::kTiles; ++t)
    powers[t] = reference_power(static_cast<int>(shared_u32(S::final_reference(c.base, c.first_tile() + t))));
#pragma unroll
  for (int i = 0; i < S::kColumns; ++i) {
    const int head = c.column(i / 2) + i % 2;
    const float total = shared_f32(S::final_total(c.base, head)), inverse = 1.0f / total;
    auto* out =
        static_cast<__nv_bfloat16*>(p.out) + (first + head) * kLatentDim + c.first_tile() * kScaleTile + c.dims();
#pragma unroll
    for (int t = 0; t < S::kTiles; ++t)
      *reinterpret_cast<uint2*>(out + t * kScaleTile) =
          total == 0.0f ? make_uint2(0, 0) : pack_bf16x4(four_values(c, t, i), powers[t] * inverse);
  }
}

}  // namespace few_heads
}  // namespace sparse_cp_ops
