// Hopper kernel, consumer warpgroups. Both hold the output of all 64 heads: consumer w dimensions [256 w, 256 w + 256).
// Steps alternate: the owner of a step computes its scores and weights, both add weights . values, step after step.
// While an owner's softmax runs on the ordinary units, the tensor core does its addition of the step before, and
// everything of the other consumer.
#pragma once

#include "sm90_softmax.cuh"

namespace sparse_cp_ops {
namespace sm90 {

// Starts s += q . k over one chunk of the own tile.
__device__ __forceinline__ void start_chunk(const Consumer& c, float (&s)[32], int chunk, bool rope, bool add) {
  const uint64_t q = swizzled_tile(c.base + kQueryOffset + chunk * kChunkBytes);
  const uint64_t k = swizzled_tile(c.tile(c.w) + chunk * kChunkBytes);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (rope) wgmma_n64_bf16(s, advance(q, i * 32), advance(k, i * 32), true);
    else wgmma_n64_f16(s, advance(q, i * 32), advance(k, i * 32), add || i != 0);
  }
}

__device__ __forceinline__ void wait_part(const Consumer& c, int part) {
  mbarrier_wait(c.barriers.full(c.w, part), c.own_parity);
  fence_async_proxy();
}

// Starts the scores of the own tile over its own half of the dimensions, which arrives first, then over the rest.
__device__ __forceinline__ void start_own_half(const Consumer& c, float (&s)[32]) {
  wgmma_fence();
#pragma unroll
  for (int j = 0; j < kLatentChunks / 2; ++j) start_chunk(c, s, c.w * (kLatentChunks / 2) + j, false, j != 0);
  wgmma_commit();
}
__device__ __forceinline__ void start_rest(const Consumer& c, float (&s)[32]) {
  wait_part(c, 1);
  wgmma_fence();
#pragma unroll
  for (int j = 0; j < kLatentChunks / 2; ++j) start_chunk(c, s, (c.w ^ 1) * (kLatentChunks / 2) + j, false, true);
  start_chunk(c, s, kRopeChunk, true, true);
  wgmma_commit();
}

// Starts s += q . k over one scale tile of a mixed step.
__device__ __forceinline__ void start_scale_tile(const Consumer& c, float (&s)[32], int t) {
  wgmma_fence();
  start_chunk(c, s, 2 * t, false, t != 0);
  start_chunk(c, s, 2 * t + 1, false, true);
}

// Waits for that sum and takes it from the unit of scale tile t into that of the next one, or of RoPE.
__device__ __forceinline__ void change_unit(const Consumer& c, float (&s)[32], int t) {
  float ratios[16];
#pragma unroll
  for (int k = 0; k < 16; ++k) {
    const float factor = shared_f32(c.factors(k / 2 * 8 + c.lane % 4 * 2 + k % 2) + t * 4);
    ratios[k] = t == kLatentTiles - 1 ? mantissa_of(factor) : factor;
  }
  wgmma_wait<0>();
  pin(s);
#pragma unroll
  for (int k = 0; k < 16; ++k) {
    s[k / 2 * 4 + k % 2] *= ratios[k];
    s[k / 2 * 4 + k % 2 + 2] *= ratios[k];
  }
}

__device__ __forceinline__ void rescale(Consumer& c, const float (&factor)[2]) {
  if (__all_sync(~0u, factor[0] == 1.0f && factor[1] == 1.0f)) return;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int j = 0; j < 32; ++j) {
      c.o[j / 16][j % 16 * 4 + 2 * i] *= factor[i];
      c.o[j / 16][j % 16 * 4 + 2 * i + 1] *= factor[i];
    }
  }
}

// Values of the own dimensions in tile `owner`: 64 keys x 256, transposed.
__device__ __forceinline__ uint64_t values(const Consumer& c, int owner) {
  return swizzled_tile(c.tile(owner) + c.w * 4 * kChunkBytes, kChunkBytes);
}

// Starts the addition of a step that the other consumer owns. kMayMix: it can be a mixed one.
template <bool kMayMix>
__device__ __forceinline__ void start_other_step(Consumer& c) {
  const int owner = c.w ^ 1;
  mbarrier_wait(c.barriers.weights(owner), c.other_parity);
  float factor[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float peak = shared_f32(c.base + kPeakOffset + (c.row + 8 * i) * 4);
    factor[i] = peak == c.peak[i] ? 1.0f : fast_exp2(c.peak[i] - peak);
    c.peak[i] = peak;
  }
  c.total[0] *= factor[0], c.total[1] *= factor[1];
  rescale(c, factor);
  const uint64_t v = values(c, owner), weights = swizzled_tile(c.tile(owner) + kRopeChunk * kChunkBytes);
  uint64_t second = weights;  // of a mixed step: its own for the second scale tile
  if (kMayMix && shared_u32(c.barriers.mixed(owner)) != 0) second = swizzled_tile(c.base + kWeightsOffset);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    if constexpr (kMayMix) {
      wgmma_n128_f16_transposed(c.o[0], advance(weights, k * 32), advance(v, k * 2048), true);
      wgmma_n128_f16_transposed(c.o[1], advance(second, k * 32), advance(v, 2 * kChunkBytes + k * 2048), true);
    } else {
      wgmma_n256_f16_transposed(c.o, advance(weights, k * 32), advance(v, k * 2048), true);
    }
    if (!kMayMix) wgmma_commit();
  }
  if (kMayMix) wgmma_commit();
}

// Frees the part of a tile whose values this consumer adds; kBehind groups have been committed since. 16 keys are freed
// as soon as their products have ended; where steps can be mixed, those are one group (the compiler serialises four).
template <bool kMayMix, int kBehind>
__device__ __forceinline__ void release_part(const Consumer& c, int tile, int part) {
  auto release = [&](int quarter) { mbarrier_arrive_if(c.lane == 0, c.barriers.empty(tile, part, quarter)); };
  constexpr int kLater = kMayMix ? 0 : 1;  // groups that a quarter adds
  __syncwarp();
  wgmma_wait<kBehind + 3 * kLater>();
  release(0);
  wgmma_wait<kBehind + 2 * kLater>();
  release(1);
  wgmma_wait<kBehind + kLater>();
  release(2);
  wgmma_wait<kBehind>();
  release(3);
}

template <bool kMayMix, int kBehind>
__device__ __forceinline__ void release_other_step(Consumer& c) {
  c.other_parity ^= 1;
  release_part<kMayMix, kBehind>(c, c.w ^ 1, 1);
}

// Peaks for the other consumer; then lets it go on with the weights.
template <bool kMayMix>
__device__ __forceinline__ void publish(const Consumer& c, bool mixed) {
  if (c.lane % 4 == 0) {
    const uint32_t peaks = c.base + kPeakOffset;
    set_shared(peaks + c.row * 4, c.peak[0]);
    set_shared(peaks + (c.row + 8) * 4, c.peak[1]);
    if (kMayMix) set_shared(c.barriers.mixed(c.w), static_cast<uint32_t>(mixed));
  }
  fence_async_proxy();
  mbarrier_arrive(c.barriers.weights(c.w));
}

// The last own scores of an item exist: its queries are not needed any more.
__device__ __forceinline__ void release_queries(const Consumer& c, bool last) {
  mbarrier_arrive_if(last && c.lane == 0, c.barriers.item_empty());
}

// The tensor core works on the own q.k, first half, the other's step, the own q.k, second half: the other's step waits
// for weights while the first half runs, and its tile is free before the own scores are complete.
template <bool kMayMix>
__device__ __forceinline__ void uniform_step(Consumer& c, bool first, bool last) {
  float s[32], factor[2], units[16];
  start_own_half(c, s);
  float least = INFINITY, largest = 0.0f;
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    units[j] = unit<true>(c, j);  // now, while products run: behind them each load would be waited for
    least = fminf(least, units[j]);
    largest = fmaxf(largest, units[j]);
  }
  if (!first) start_other_step<kMayMix>(c);
  start_rest(c, s);
  if (!first) release_other_step<kMayMix, 1>(c);
  const bool common = is_common_step(c, least, largest);
  wgmma_wait<0>();
  pin(s);
  pin(c.o[0]);
  pin(c.o[1]);
  release_queries(c, last);
  uint32_t packed[16];
  softmax(c, common, s, units, packed, factor);
#pragma unroll
  for (int quarter = 0; quarter < 4; ++quarter)
    store_quarter(c, published_weights(c), quarter, fragment(packed, quarter));
  publish<kMayMix>(c, false);
  rescale(c, factor);
  const uint64_t v = values(c, c.w);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    if constexpr (kMayMix) {
      wgmma_n128_f16_transposed(c.o[0], fragment(packed, k), advance(v, k * 2048), true);
      wgmma_n128_f16_transposed(c.o[1], fragment(packed, k), advance(v, 2 * kChunkBytes + k * 2048), true);
    } else {
      wgmma_n256_f16_transposed(c.o, fragment(packed, k), advance(v, k * 2048), true);
    }
    if (!kMayMix) wgmma_commit();
  }
  if (kMayMix) wgmma_commit();
  release_part<kMayMix, 0>(c, c.w, 0);
  pin(c.o[0]);
  pin(c.o[1]);
}

// A mixed step: the sum changes its unit after each scale tile, and each tile's values have their own weights.
__device__ __forceinline__ void mixed_step(Consumer& c, bool first, bool last) {
  float s[32], factor[2];
  wait_part(c, 1);
  start_scale_tile(c, s, 0);
  wgmma_commit();
  if (!first) start_other_step<true>(c);
  change_unit(c, s, 0);
  pin(c.o[0]);
  pin(c.o[1]);
  if (!first) release_other_step<true, 0>(c);
#pragma unroll
  for (int t = 1; t < kLatentTiles; ++t) {
    start_scale_tile(c, s, t);
    wgmma_commit();
    change_unit(c, s, t);
  }
  wgmma_fence();
  start_chunk(c, s, kRopeChunk, true, true);
  wgmma_commit();
  const float units[2] = {unit_of(shared_f32(c.factors(c.lane) + 12)),
                          unit_of(shared_f32(c.factors(c.lane + 32) + 12))};
  const bool common = is_common_step(c, fminf(units[0], units[1]), fmaxf(units[0], units[1]));
  wgmma_wait<0>();
  pin(s);
  pin(c.o[0]);
  pin(c.o[1]);
  release_queries(c, last);
  uint32_t own[2][16];
  float total[2];
  move_peaks<false>(c, s, factor);
  if (common) find_mixed_weights<true>(c, s, false, own, total);
  else find_mixed_weights<false>(c, s, has_extreme_units(c), own, total);
  c.total[0] = c.total[0] * factor[0] + total[0];
  c.total[1] = c.total[1] * factor[1] + total[1];
  publish<true>(c, true);
  rescale(c, factor);
  const uint64_t v = values(c, c.w);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    wgmma_n128_f16_transposed(c.o[0], fragment(own[0], k), advance(v, k * 2048), true);
    wgmma_n128_f16_transposed(c.o[1], fragment(own[1], k), advance(v, 2 * kChunkBytes + k * 2048), true);
  }
  wgmma_commit();
  release_part<true, 0>(c, c.w, 0);
  pin(c.o[0]);
  pin(c.o[1]);
}

// first, last: of all steps, of the own steps of an item.
template <bool kMayMix>
__device__ __forceinline__ void own_step(Consumer& c, bool first, bool last) {
  asm volatile("" : "+r"(c.base));  // keeps ptxas from holding every descriptor in registers across steps
  wait_part(c, 0);
  if (kMayMix && is_mixed_step(c)) mixed_step(c, first, last);
  else uniform_step<kMayMix>(c, first, last);
  c.own_parity ^= 1;
}

// Exchanges four registers between the four lanes of a quad: lane i ends with everybody's register i, in lane order.
__device__ __forceinline__ uint4 transpose_quad(int lane, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  const bool odd = lane & 1, high = lane & 2;
  const uint32_t ab = __shfl_xor_sync(~0u, odd ? a : b, 1), cd = __shfl_xor_sync(~0u, odd ? c : d, 1);
  const uint32_t p0 = odd ? ab : a, p1 = odd ? b : ab, q0 = odd ? cd : c, q1 = odd ? d : cd;
  const uint32_t x = __shfl_xor_sync(~0u, high ? p0 : q0, 2), y = __shfl_xor_sync(~0u, high ? p1 : q1, 2);
  return high ? make_uint4(x, y, q0, q1) : make_uint4(p0, p1, x, y);
}

__device__ __forceinline__ void store_results(const SparseMlaParams& p, const KeySplit& split, const Item& item,
                                              Consumer& c) {
  const bool whole = split.parts == 1;
  float total[2], inverse[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    c.total[i] += __shfl_xor_sync(~0u, c.total[i], 1);
    c.total[i] += __shfl_xor_sync(~0u, c.total[i], 2);
  }
  // Behind the first barrier all peaks have been read; their place takes the totals of consumer 1.
  const uint32_t places[2] = {c.base + kTotalOffset + c.row * 4, c.base + kPeakOffset + c.row * 4};
  const uint32_t own = places[c.w], others = places[c.w ^ 1];
  named_barrier(kConsumerBarrier, kConsumers);
  if (c.lane % 4 == 0) {
    set_shared(own, c.total[0]);
    set_shared(own + 32, c.total[1]);
  }
  named_barrier(kConsumerBarrier, kConsumers);
  const int64_t row = whole ? item.row : item.part * p.rows + item.row;
  float* lse = whole ? p.lse : split.partial_lse;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    total[i] = c.total[i] + shared_f32(others + i * 32);
    inverse[i] = 1.0f / total[i];
    if (c.w == 0 && c.lane % 4 == 0)
      lse[row * p.heads + item.head0 + c.row + i * 8] =
          total[i] == 0.0f ? -INFINITY : c.peak[i] * kLn2 + logf(total[i]);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int64_t start = (row * p.heads + item.head0 + c.row + i * 8) * kLatentDim + c.w * 256;
    auto value = [&](int j, int e) {  // dimension 8 * j + 2 * (lane % 4) + e
      return total[i] == 0.0f ? 0.0f : c.o[j / 16][j % 16 * 4 + 2 * i + e] * inverse[i];
    };
    if (whole) {
      auto* out = static_cast<__nv_bfloat16*>(p.out) + start + c.lane % 4 * 8;
#pragma unroll
      for (int j = 0; j < 32; j += 4)
        *reinterpret_cast<uint4*>(out + j * 8) = transpose_quad(
            c.lane, float_to_bf16x2(value(j, 0), value(j, 1)), float_to_bf16x2(value(j + 1, 0), value(j + 1, 1)),
            float_to_bf16x2(value(j + 2, 0), value(j + 2, 1)), float_to_bf16x2(value(j + 3, 0), value(j + 3, 1)));
    } else {
      float* out = split.partial_out + start + c.lane % 4 * 2;
#pragma unroll
      for (int j = 0; j < 32; ++j) *reinterpret_cast<float2*>(out + j * 8) = make_float2(value(j, 0), value(j, 1));
    }
  }
}

template <bool kMayMix>
__device__ __forceinline__ void consume(const SparseMlaParams& p, const KeySplit& split, int64_t items, uint32_t base) {
  Consumer c;
  c.base = base;
  c.barriers = Barriers{base + kBarrierOffset};
  c.w = __shfl_sync(~0u, threadIdx.x / kWarpgroup, 0);
  c.warp = threadIdx.x % kWarpgroup / 32;
  c.lane = threadIdx.x % 32;
  c.row = c.warp * 16 + c.lane / 4;
  c.own_parity = c.other_parity = 0;
  int count = 0;
  for (int64_t number = blockIdx.x; number < items; number += gridDim.x, ++count) {
    const Item item = work_item(p, split, number);
    mbarrier_wait(c.barriers.item_full(), count & 1);
    const int steps = static_cast<int>(shared_u32(c.barriers.steps()));
    c.query_factor[0] = shared_f32(c.base + kQueryFactorOffset + c.row * 4);
    c.query_factor[1] = shared_f32(c.base + kQueryFactorOffset + (c.row + 8) * 4);
    __syncwarp();
    release_queries(c, steps <= c.w);
    c.peak[0] = c.peak[1] = -INFINITY;
    c.total[0] = c.total[1] = 0.0f;
#pragma unroll
    for (int j = 0; j < 64; ++j) c.o[0][j] = c.o[1][j] = 0.0f;
#pragma unroll 1
    for (int i = c.w; i <= steps; i += 2) {
      if (i < steps) {
        own_step<kMayMix>(c, i == 0, i + 2 >= steps);
      } else if (i != 0) {  // the last step is the other's
        start_other_step<kMayMix>(c);
        release_other_step<kMayMix, 0>(c);
        pin(c.o[0]);
        pin(c.o[1]);
      }
    }
    store_results(p, split, item, c);
  }
}

}  // namespace sm90
}  // namespace sparse_cp_ops
