// Hopper kernel, consumer warpgroups. Both hold the output of all 64 heads: consumer w dimensions [256 w, 256 w + 256).
// Steps alternate: the owner of a step computes its scores and weights, both add weights . values, step after step.
// While an owner's softmax runs on the ordinary units, the tensor core does its addition of the step before, and
// everything of the other consumer.
#pragma once

#include "sm90_tile.cuh"

namespace sparse_cp_ops {
namespace sm90 {

// kUniform: the four factors of every record are the same power of two, as with power-of-two scales. The general case
// gives the same bits for such records, at a lower speed.

// The running maximum moves only when a logit exceeds it by this much (log2 units), so most steps rescale nothing; f16
// weights up to 2^8 are as exact as weights up to 1.
inline constexpr float kSlack = 8.0f;

struct Consumer {
  float o[2][64];  // output, two scale tiles of 128 dimensions: rows lane / 4 and + 8 of the warp's 16 heads
  float peak[2];   // running maximum of logit + exponent of these two heads, log2
  float total[2];  // sum of weights of the own steps, this thread's columns
  float query_factor[2];
  uint32_t base;
  Barriers barriers;
  int w, warp, lane, row;
  uint32_t own_parity, other_parity;  // of the barriers of the two tiles

  __device__ uint32_t tile(int owner) const { return base + kKeyOffset + owner * kTileBytes; }
  __device__ uint32_t factors(int key) const { return base + kFactorOffset + (w * kKeys + key) * 16; }
};

// 2^E of a record's factors: the exponent of the largest.
__device__ __forceinline__ float unit_of(const float4& f) {
  const float largest = fmaxf(fmaxf(f.x, f.y), fmaxf(f.z, f.w));
  return __uint_as_float(__float_as_uint(largest) & 0x7f800000u);
}
__device__ __forceinline__ float inverse_power(float power) {
  return __uint_as_float((254u << 23) - __float_as_uint(power));
}
__device__ __forceinline__ float element(const float4& f, int i) {
  return i == 0 ? f.x : i == 1 ? f.y : i == 2 ? f.z : f.w;
}

// Queries of 64 heads into the swizzled tile; one warp a head at a time.
__device__ __forceinline__ void load_queries(const SparseMlaParams& p, const Item& item, Consumer& c) {
  constexpr int kPieces = kQkDim / 8, kLatentPieces = kLatentDim / 8, kPerLane = (kPieces + 31) / 32;
  const bool vectors =
      reinterpret_cast<uintptr_t>(p.q) % 16 == 0 && p.q_row_stride % 8 == 0 && p.q_head_stride % 8 == 0;
  const auto* q = static_cast<const uint16_t*>(p.q) + item.row * p.q_row_stride + item.head0 * p.q_head_stride;
#pragma unroll 4
  for (int head = threadIdx.x / 32; head < kHeads; head += kConsumers / 32) {
    uint4 pieces[kPerLane] = {};
    float peak = 0.0f;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int piece = i * 32 + c.lane;
      if (piece >= kPieces) continue;
      const uint16_t* source = q + head * p.q_head_stride + piece * 8;
      if (vectors) {
        pieces[i] = *reinterpret_cast<const uint4*>(source);
      } else {
        pieces[i] = make_uint4(source[0] | source[1] << 16, source[2] | source[3] << 16, source[4] | source[5] << 16,
                               source[6] | source[7] << 16);
      }
      if (piece >= kLatentPieces) continue;
      peak = query_peak(pieces[i], peak);
    }
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, lanes));
    const int exponent = query_exponent(peak);
    const float factor = power_of_two(-exponent);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int piece = i * 32 + c.lane;
      if (piece >= kPieces) continue;
      uint32_t pairs[4] = {pieces[i].x, pieces[i].y, pieces[i].z, pieces[i].w};
#pragma unroll
      for (uint32_t& pair : pairs) pair = scaled_query(pair, piece < kLatentPieces, factor);
      set_shared(c.base + kQueryOffset + piece / 8 * kChunkBytes + swizzled(head, piece % 8),
                 make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]));
    }
    if (c.lane == 0) store_shared(c.base + kPeakOffset + head * 4, power_of_two(exponent) * (p.softmax_scale * kLog2e));
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

// Starts the scores of the own tile, its own half first: it arrives first.
__device__ __forceinline__ void start_scores(const Consumer& c, float (&s)[32]) {
  wait_part(c, 0);
  wgmma_fence();
#pragma unroll
  for (int j = 0; j < kLatentChunks / 2; ++j) start_chunk(c, s, c.w * (kLatentChunks / 2) + j, false, j != 0);
  wait_part(c, 1);
#pragma unroll
  for (int j = 0; j < kLatentChunks / 2; ++j) start_chunk(c, s, (c.w ^ 1) * (kLatentChunks / 2) + j, false, true);
  start_chunk(c, s, kRopeChunk, true, true);
  wgmma_commit();
}

// The same with factors that differ between the scale tiles: behind each the sum turns into the next one's unit.
__device__ __forceinline__ void scaled_scores(const Consumer& c, float (&s)[32]) {
#pragma unroll
  for (int j = 0; j < kLatentTiles; ++j) {
    const int t = j ^ (2 * c.w);
    if (j % 2 == 0) wait_part(c, j / 2);
    wgmma_fence();
    start_chunk(c, s, 2 * t, false, j != 0);
    start_chunk(c, s, 2 * t + 1, false, true);
    wgmma_commit();
    wgmma_wait<0>();
    pin(s);
#pragma unroll
    for (int k = 0; k < 16; ++k) {
      const float4 f = shared_f32x4(c.factors(k / 2 * 8 + c.lane % 4 * 2 + k % 2));
      const float next = j + 1 < kLatentTiles ? element(f, (j + 1) % 4 ^ (2 * c.w)) : unit_of(f);
      const float ratio = next == 0.0f ? 0.0f : element(f, t) / next;
      s[k / 2 * 4 + k % 2] *= ratio;
      s[k / 2 * 4 + k % 2 + 2] *= ratio;
    }
  }
  wgmma_fence();
  start_chunk(c, s, kRopeChunk, true, true);
  wgmma_commit();
  wgmma_wait<0>();
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

// A operand of 16 keys out of packed weights.
__device__ __forceinline__ const uint32_t (&fragment(const uint32_t (&packed)[16], int k))[4] {
  return reinterpret_cast<const uint32_t (&)[4]>(packed[4 * k]);
}

// Starts the addition of a step that the other consumer owns.
template <bool kUniform>
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
  wgmma_fence();
  if constexpr (kUniform) {
#pragma unroll
    for (int k = 0; k < 4; ++k) wgmma_n256_f16_transposed(c.o, advance(weights, k * 32), advance(v, k * 2048), true);
  } else {
    const uint64_t second = swizzled_tile(c.base + kWeightsOffset);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      wgmma_n128_f16_transposed(c.o[0], advance(weights, k * 32), advance(v, k * 2048), true);
      wgmma_n128_f16_transposed(c.o[1], advance(second, k * 32), advance(v, 2 * kChunkBytes + k * 2048), true);
    }
  }
  wgmma_commit();
}

// Ends the addition of the other consumer's step, if there was one; the wait is for all, or ptxas serialises.
__device__ __forceinline__ void finish_other_step(Consumer& c, bool started) {
  wgmma_wait<0>();
  pin(c.o[0]);
  pin(c.o[1]);
  if (!started) return;
  c.other_parity ^= 1;
  __syncwarp();
  if (c.lane == 0) mbarrier_arrive(c.barriers.empty(c.w ^ 1, 1));
}

// 2^E of column j of this thread, 0 if it is unused.
template <bool kUniform>
__device__ __forceinline__ float unit(const Consumer& c, int j) {
  const uint32_t address = c.factors(j / 2 * 8 + c.lane % 4 * 2 + j % 2);
  return kUniform ? shared_f32(address) : unit_of(shared_f32x4(address));
}

// s: sums -> logits + exponents. Moves the peaks if necessary; `factor` is what this means for earlier results.
template <bool kUniform>
__device__ __forceinline__ void find_logits(Consumer& c, float (&s)[32], float (&factor)[2]) {
  float peak[2] = {-INFINITY, -INFINITY};
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    const float u = unit<kUniform>(c, j);
    const float exponent = static_cast<float>(static_cast<int>(__float_as_uint(u) >> 23) - 127);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float& x = s[j / 2 * 4 + j % 2 + 2 * i];
      x = u == 0.0f ? -INFINITY : x * (c.query_factor[i] * u) + exponent;
      peak[i] = fmaxf(peak[i], x);
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    peak[i] = fmaxf(peak[i], __shfl_xor_sync(~0u, peak[i], 1));
    peak[i] = fmaxf(peak[i], __shfl_xor_sync(~0u, peak[i], 2));
    const bool moves = peak[i] > c.peak[i] + kSlack;  // from -inf at once
    factor[i] = moves ? fast_exp2(c.peak[i] - peak[i]) : 1.0f;
    if (moves) c.peak[i] = peak[i];
  }
}

// s: logits -> weights.
template <bool kUniform>
__device__ __forceinline__ void find_weights(Consumer& c, float (&s)[32], const float (&factor)[2]) {
  float shift[2], total[2] = {};
#pragma unroll
  for (int i = 0; i < 2; ++i) shift[i] = c.peak[i] == -INFINITY ? 0.0f : c.peak[i];  // only -inf so far: weights are 0
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    const float inverse = inverse_power(unit<kUniform>(c, j));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float& x = s[j / 2 * 4 + j % 2 + 2 * i];
      x = fast_exp2(x - shift[i]);
      total[i] += x * inverse;
    }
  }
  c.total[0] = c.total[0] * factor[0] + total[0];
  c.total[1] = c.total[1] * factor[1] + total[1];
}

// Weights as f16 pairs for the values of scale tile t, in fragment order: [8 keys][row, row + 8].
template <bool kUniform>
__device__ __forceinline__ void pack_weights(const Consumer& c, int t, const float (&s)[32], uint32_t (&packed)[16]) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    float m0 = 1.0f, m1 = 1.0f;
    if constexpr (!kUniform) {
      const float4 f0 = shared_f32x4(c.factors(j * 8 + c.lane % 4 * 2));
      const float4 f1 = shared_f32x4(c.factors(j * 8 + c.lane % 4 * 2 + 1));
      m0 = element(f0, t) * inverse_power(unit_of(f0));
      m1 = element(f1, t) * inverse_power(unit_of(f1));
    }
    packed[2 * j] = pack_f16x2(s[4 * j] * m0, s[4 * j + 1] * m1);
    packed[2 * j + 1] = pack_f16x2(s[4 * j + 2] * m0, s[4 * j + 3] * m1);
  }
}

__device__ __forceinline__ void store_weights(const Consumer& c, uint32_t chunk, const uint32_t (&packed)[16]) {
  const int row = c.warp * 16 + c.lane / 8 % 2 * 8 + c.lane % 8;
#pragma unroll
  for (int j = 0; j < 8; j += 2)
    stmatrix_x4(chunk + swizzled(row, j + c.lane / 16), packed[2 * j], packed[2 * j + 1], packed[2 * j + 2],
                packed[2 * j + 3]);
}

// Weights for the other consumer's two scale tiles, peaks and factors; then lets it go on.
template <bool kUniform>
__device__ __forceinline__ void publish(Consumer& c, const float (&s)[32], const float (&factor)[2],
                                        uint32_t (&packed)[16]) {
  const uint32_t rope = c.tile(c.w) + kRopeChunk * kChunkBytes;
  if constexpr (kUniform) {
    pack_weights<kUniform>(c, 0, s, packed);
    store_weights(c, rope, packed);
  } else {
    pack_weights<kUniform>(c, 2 * (c.w ^ 1), s, packed);
    store_weights(c, rope, packed);
    pack_weights<kUniform>(c, 2 * (c.w ^ 1) + 1, s, packed);
    store_weights(c, c.base + kWeightsOffset, packed);
  }
  if (c.lane % 4 == 0) {
    const uint32_t scratch = c.base + kScratchOffset + (c.w * kHeads + c.row) * 4, peaks = c.base + kPeakOffset;
    store_shared(scratch, factor[0]);
    store_shared(scratch + 32, factor[1]);
    store_shared(peaks + c.row * 4, c.peak[0]);
    store_shared(peaks + (c.row + 8) * 4, c.peak[1]);
  }
  fence_async_proxy();
  mbarrier_arrive(c.barriers.weights(c.w));
}

template <bool kUniform>
__device__ __forceinline__ void add_own_step(Consumer& c, const float (&s)[32], uint32_t (&packed)[16]) {
  const uint64_t v = values(c, c.w);
  if constexpr (kUniform) {
    mbarrier_wait(c.barriers.weights(c.w), c.own_parity);  // all four warps have written theirs
    const uint64_t weights = swizzled_tile(c.tile(c.w) + kRopeChunk * kChunkBytes);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) wgmma_n256_f16_transposed(c.o, advance(weights, k * 32), advance(v, k * 2048), true);
    wgmma_commit();
    wgmma_wait<0>();
  } else {
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      pack_weights<kUniform>(c, 2 * c.w + t, s, packed);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; ++k)
        wgmma_n128_f16_transposed(c.o[t], fragment(packed, k), advance(v, t * 2 * kChunkBytes + k * 2048), true);
      wgmma_commit();
      wgmma_wait<0>();
    }
  }
  pin(c.o[0]);
  pin(c.o[1]);
}

template <bool kUniform>
__device__ __forceinline__ void own_step(Consumer& c, bool first) {
  float s[32], factor[2];
  asm volatile("" : "+r"(c.base));  // keeps ptxas from holding every descriptor in registers across steps
  if constexpr (kUniform) start_scores(c, s);
  else scaled_scores(c, s);
  if (first) {
    wgmma_wait<0>();
  } else {
    start_other_step<kUniform>(c);
    wgmma_wait<1>();  // the scores
  }
  pin(s);
  find_logits<kUniform>(c, s, factor);
  finish_other_step(c, !first);
  find_weights<kUniform>(c, s, factor);
  uint32_t packed[16];
  publish<kUniform>(c, s, factor, packed);
  rescale(c, factor);
  add_own_step<kUniform>(c, s, packed);
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
    store_shared(scratch + c.w * kHeads * 4, c.total[0]);
    store_shared(scratch + c.w * kHeads * 4 + 32, c.total[1]);
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

template <bool kUniform>
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
        own_step<kUniform>(c, i == 0);
      } else if (i == steps - 1) {
        start_other_step<kUniform>(c);
        finish_other_step(c, true);
      }
    }
    store_results(p, split, item, c);
  }
}

}  // namespace sm90
}  // namespace sparse_cp_ops
