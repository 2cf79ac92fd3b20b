// Hopper kernel, consumer warpgroups. Both hold the output of all 64 heads: consumer w dimensions [256 w, 256 w + 256).
// Steps alternate: the owner of a step computes its scores and weights, both add weights . values, step after step.
// While an owner's softmax runs on the ordinary units, the tensor core does its addition of the step before, and
// everything of the other consumer.
#pragma once

#include "sm90_softmax.cuh"

namespace sparse_cp_ops {
namespace sm90 {

// 16 bytes of queries, whatever their alignment.
__device__ __forceinline__ uint4 load_query_piece(const uint16_t* source, bool vectors) {
  if (vectors) return *reinterpret_cast<const uint4*>(source);
  return make_uint4(source[0] | source[1] << 16, source[2] | source[3] << 16, source[4] | source[5] << 16,
                    source[6] | source[7] << 16);
}

// Queries of 64 heads into the swizzled tile; one warp a head at a time, the loads of all its heads before the first.
__device__ __forceinline__ void load_queries(const SparseMlaParams& p, const Item& item, Consumer& c) {
  constexpr int kPieces = kQkDim / 8, kLatentPieces = kLatentDim / 8, kPerLane = (kPieces + 31) / 32;
  constexpr int kWarps = kConsumers / 32, kHeadsPerWarp = kHeads / kWarps;
  const bool vectors =
      reinterpret_cast<uintptr_t>(p.q) % 16 == 0 && p.q_row_stride % 8 == 0 && p.q_head_stride % 8 == 0;
  const int warp = threadIdx.x / 32;
  const auto* q = static_cast<const uint16_t*>(p.q) + item.row * p.q_row_stride + (item.head0 + warp) * p.q_head_stride;
  uint4 pieces[kHeadsPerWarp][kPerLane];
#pragma unroll
  for (int h = 0; h < kHeadsPerWarp; ++h) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int piece = i * 32 + c.lane;
      pieces[h][i] = piece < kPieces ? load_query_piece(q + h * kWarps * p.q_head_stride + piece * 8, vectors)
                                     : make_uint4(0, 0, 0, 0);
    }
  }
#pragma unroll
  for (int h = 0; h < kHeadsPerWarp; ++h) {
    const int head = warp + h * kWarps;
    float peak = 0.0f;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i)
      if (i * 32 + c.lane < kLatentPieces) peak = query_peak(pieces[h][i], peak);
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, lanes));
    const int exponent = query_exponent(peak);
    const float factor = power_of_two(-exponent);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int piece = i * 32 + c.lane;
      if (piece >= kPieces) continue;
      const uint4& x = pieces[h][i];
      uint32_t pairs[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (uint32_t& pair : pairs) pair = scaled_query(pair, piece < kLatentPieces, factor);
      set_shared(c.base + kQueryOffset + piece / 8 * kChunkBytes + swizzled(head, piece % 8),
                 make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]));
    }
    if (c.lane == 0) set_shared(c.base + kPeakOffset + head * 4, power_of_two(exponent) * (p.softmax_scale * kLog2e));
  }
  fence_async_proxy();
  named_barrier(kConsumerBarrier, kConsumers);
  c.query_factor[0] = shared_f32(c.base + kPeakOffset + c.row * 4);
  c.query_factor[1] = shared_f32(c.base + kPeakOffset + (c.row + 8) * 4);
  named_barrier(kConsumerBarrier, kConsumers);  // the peaks' memory is free again
}

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
  fence_async_proxy();
  const uint32_t scratch = c.base + kScratchOffset + owner * kHeads * 4 + c.row * 4;
  const float factor[2] = {shared_f32(scratch), shared_f32(scratch + 32)};
  c.peak[0] = shared_f32(c.base + kPeakOffset + c.row * 4);
  c.peak[1] = shared_f32(c.base + kPeakOffset + (c.row + 8) * 4);
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
  }
  wgmma_commit();
}

// The addition of the other consumer's step has ended: its tile's second half is free.
__device__ __forceinline__ void release_other_step(Consumer& c) {
  c.other_parity ^= 1;
  __syncwarp();
  if (c.lane == 0) mbarrier_arrive(c.barriers.empty(c.w ^ 1, 1));
}

// Peaks and factors for the other consumer; then lets it go on with the weights.
template <bool kMayMix>
__device__ __forceinline__ void publish(const Consumer& c, bool mixed, const float (&factor)[2]) {
  if (c.lane % 4 == 0) {
    const uint32_t scratch = c.base + kScratchOffset + (c.w * kHeads + c.row) * 4, peaks = c.base + kPeakOffset;
    set_shared(scratch, factor[0]);
    set_shared(scratch + 32, factor[1]);
    set_shared(peaks + c.row * 4, c.peak[0]);
    set_shared(peaks + (c.row + 8) * 4, c.peak[1]);
    if (kMayMix) set_shared(c.barriers.mixed(c.w), static_cast<uint32_t>(mixed));
  }
  fence_async_proxy();
  mbarrier_arrive(c.barriers.weights(c.w));
}

// The tensor core works on the own q.k, first half, the other's step, the own q.k, second half: the other's step waits
// for weights while the first half runs, and its tile is free before the own scores are complete.
template <bool kMayMix>
__device__ __forceinline__ void uniform_step(Consumer& c, bool first) {
  float s[32], factor[2];
  start_own_half(c, s);
  if (!first) start_other_step<kMayMix>(c);
  start_rest(c, s);
  wgmma_wait<1>();
  if (!first) release_other_step(c);
  const bool common = is_common_step(c);
  wgmma_wait<0>();
  pin(s);
  pin(c.o[0]);
  pin(c.o[1]);
  uint32_t packed[16];
  softmax(c, common, s, packed, factor);
#pragma unroll
  for (int quarter = 0; quarter < 4; ++quarter)
    store_quarter(c, published_weights(c), quarter, fragment(packed, quarter));
  publish<kMayMix>(c, false, factor);
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
  }
  wgmma_commit();
  wgmma_wait<0>();
  pin(c.o[0]);
  pin(c.o[1]);
}

// A mixed step: the sum changes its unit after each scale tile, and each tile's values have their own weights.
__device__ __forceinline__ void mixed_step(Consumer& c, bool first) {
  float s[32], factor[2];
  wait_part(c, 1);
  start_scale_tile(c, s, 0);
  wgmma_commit();
  if (!first) start_other_step<true>(c);
  change_unit(c, s, 0);
  pin(c.o[0]);
  pin(c.o[1]);
  if (!first) release_other_step(c);
#pragma unroll
  for (int t = 1; t < kLatentTiles; ++t) {
    start_scale_tile(c, s, t);
    wgmma_commit();
    change_unit(c, s, t);
  }
  wgmma_fence();
  start_chunk(c, s, kRopeChunk, true, true);
  wgmma_commit();
  const bool common = is_common_step(c);
  wgmma_wait<0>();
  pin(s);
  pin(c.o[0]);
  pin(c.o[1]);
  uint32_t own[2][16];
  float total[2];
  move_peaks<false>(c, s, factor);
  if (common) find_mixed_weights<true>(c, s, false, own, total);
  else find_mixed_weights<false>(c, s, has_extreme_units(c), own, total);
  c.total[0] = c.total[0] * factor[0] + total[0];
  c.total[1] = c.total[1] * factor[1] + total[1];
  publish<true>(c, true, factor);
  rescale(c, factor);
  const uint64_t v = values(c, c.w);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    wgmma_n128_f16_transposed(c.o[0], fragment(own[0], k), advance(v, k * 2048), true);
    wgmma_n128_f16_transposed(c.o[1], fragment(own[1], k), advance(v, 2 * kChunkBytes + k * 2048), true);
  }
  wgmma_commit();
  wgmma_wait<0>();
  pin(c.o[0]);
  pin(c.o[1]);
}

template <bool kMayMix>
__device__ __forceinline__ void own_step(Consumer& c, bool first) {
  asm volatile("" : "+r"(c.base));  // keeps ptxas from holding every descriptor in registers across steps
  wait_part(c, 0);
  if (kMayMix && is_mixed_step(c)) mixed_step(c, first);
  else uniform_step<kMayMix>(c, first);
  c.own_parity ^= 1;
  __syncwarp();
  if (c.lane == 0) {
    mbarrier_arrive(c.barriers.empty(c.w, 0));
    mbarrier_arrive(c.barriers.empty(c.w, 1));
  }
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
  named_barrier(kConsumerBarrier, kConsumers);  // scratch and queries are free
  const uint32_t scratch = c.base + kScratchOffset + c.row * 4;
  if (c.lane % 4 == 0) {
    set_shared(scratch + c.w * kHeads * 4, c.total[0]);
    set_shared(scratch + c.w * kHeads * 4 + 32, c.total[1]);
  }
  named_barrier(kConsumerBarrier, kConsumers);
  const int64_t row = whole ? item.row : item.part * p.rows + item.row;
  float* lse = whole ? p.lse : split.partial_lse;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    total[i] = shared_f32(scratch + i * 32) + shared_f32(scratch + kHeads * 4 + i * 32);
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
    mbarrier_wait(c.barriers.item_full(count & 1), count >> 1 & 1);
    const int steps = static_cast<int>(shared_u32(c.barriers.steps(count & 1)));
    __syncwarp();
    if (c.lane == 0) mbarrier_arrive(c.barriers.item_empty(count & 1));
    load_queries(p, item, c);
    c.peak[0] = c.peak[1] = -INFINITY;
    c.total[0] = c.total[1] = 0.0f;
#pragma unroll
    for (int j = 0; j < 64; ++j) c.o[0][j] = c.o[1][j] = 0.0f;
    for (int i = 0; i < steps; ++i) {
      if ((i & 1) == c.w) {
        own_step<kMayMix>(c, i == 0);
      } else if (i == steps - 1) {
        start_other_step<kMayMix>(c);
        wgmma_wait<0>();
        pin(c.o[0]);
        pin(c.o[1]);
        release_other_step(c);
      }
    }
    store_results(p, split, item, c);
  }
}

}  // namespace sm90
}  // namespace sparse_cp_ops
