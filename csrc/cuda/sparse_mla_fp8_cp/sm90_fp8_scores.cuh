// precision="fp8", the warpgroup that finds scores: logits less running shifts.
#pragma once

#include "../device/bf16.cuh"
#include "../device/f16.cuh"
#include "../device/fp8.cuh"
#include "sm90_fp8.cuh"
#include "sm90_fp8_queries.cuh"

namespace sparse_cp_ops {
namespace fp8_mode {

// e4m3 holds 2^-9 to 448. A shift moves when a logit exceeds it by more than 7.75 (log2 units), to where the largest so
// far is 3 above it; a reference when a scale is above 2 of its units. So weights are below 431, and 2^-13 of the
// largest one is still told from 0. Less room above would move shifts in most steps.
inline constexpr uint32_t kHighestLogit = 0x47c0, kHighestFactor = 0x4000;  // f16
inline constexpr float kMovedTo = 3.0f;
inline constexpr uint32_t kLargestReference = 253;  // biased exponent; 2^(127 - it) must not become 0
inline constexpr int kColumns = kHeads / 4;         // heads of a thread: 8 * j + 2 * (lane % 4) + e at 2 * j + e

struct Scorer {
  uint32_t base;
  int warp, lane;

  __device__ int thread() const { return threadIdx.x % kWarpgroup; }
  __device__ int key() const { return warp * 16 + lane / 4; }  // the first; the second is 8 further
  __device__ uint32_t head_pair(int j) const { return base + kHeadOffset + (j * 4 + lane % 4) * 16; }
  // The heads whose values end in this thread when join_lanes() has joined those of all.
  __device__ int own_heads() const { return 8 * (lane / 16 * 4 + lane / 8 % 2 * 2 + lane / 4 % 2) + lane % 4 * 2; }
  __device__ uint32_t scratch(int of_warp, int head) const {
    return base + kScratchOffset + (of_warp * kHeads + head) * 4;
  }
  __device__ uint32_t reference(int t) const { return base + kReferenceOffset + t * 4; }
  __device__ uint32_t exponents(int of_warp) const { return base + kExponentOffset + of_warp * kLatentTiles * 4; }
};

__device__ __forceinline__ void sync_scorer() { named_barrier(kScoreBarrier, kWarpgroup); }

__device__ __forceinline__ uint32_t element(const uint4& f, int i) {
  return i == 0 ? f.x : i == 1 ? f.y : i == 2 ? f.z : f.w;
}

// Scores of a tile on their way: sums of the scale tiles in f16, a register the pair of heads that column pair j has
// for key i at 2 * j + i, and of the RoPE part, which later hold the whole score.
struct Scores {
  uint32_t latent[kLatentTiles][kColumns];
  float s[32];
};

__device__ __forceinline__ void start_latent(const Scorer& c, int tile, Scores& scores) {
  fence_async_proxy();
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < 4; ++k) {
#pragma unroll
    for (int t = 0; t < kLatentTiles; ++t)
      wgmma_n64_e4m3_f16(scores.latent[t], advance(swizzled_tile(chunk_address(c.base, tile, t)), k * 32),
                         advance(swizzled_tile(c.base + kQueryOffset + t * kChunkBytes), k * 32), k != 0);
  }
  wgmma_commit();
}

__device__ __forceinline__ void start_rope(const Scorer& c, int tile, Scores& scores) {
  const uint64_t keys = swizzled_tile(chunk_address(c.base, tile, kRopeChunk));
  const uint64_t queries = swizzled_tile(c.base + kQueryOffset + kRopeChunk * kChunkBytes);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < 4; ++k) wgmma_n64_bf16(scores.s, advance(keys, k * 32), advance(queries, k * 32), k != 0);
  wgmma_commit();
}

__device__ __forceinline__ void finish_scores(Scores& scores) {
  wgmma_wait<0>();
#pragma unroll
  for (auto& x : scores.latent) pin(x);
  pin(scores.s);
}

// Scales of this thread's keys.
struct KeyScales {
  float4 of[2];

  __device__ bool used(int i) const { return __float_as_uint(of[i].x) != kUnusedScale; }
};

__device__ __forceinline__ KeyScales key_scales(const Scorer& c, int tile) {
  const uint32_t place = c.base + kScaleOffset + (tile * kKeys + c.key()) * 16;
  return {shared_f32x4(place), shared_f32x4(place + 8 * 16)};
}

__device__ __forceinline__ float element(const float4& f, int i) {
  return i == 0 ? f.x : i == 1 ? f.y : i == 2 ? f.z : f.w;
}

// 2^(e + 3), e the exponent of a key's largest scale: scales divided by it are below 1/4, so that the sum of all scale
// tiles has the bound of one.
__device__ __forceinline__ uint32_t key_unit(const float4& scales) {
  const uint32_t bits = __float_as_uint(fmaxf(fmaxf(scales.x, scales.y), fmaxf(scales.z, scales.w)));
  return min((bits & 0x7f800000u) + (3u << 23), 250u << 23);
}

// Sum of the latent parts, each times its scale, in f16 and units of key_unit(), as Scores has them.
__device__ __forceinline__ void join_latent(const KeyScales& scales, const float (&units)[2], const Scores& scores,
                                            uint32_t (&sum)[kColumns]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float inverse = __uint_as_float((254u << 23) - __float_as_uint(units[i]));
#pragma unroll
    for (int t = 0; t < kLatentTiles; ++t) {
      const float ratio = element(scales.of[i], t) * inverse;
      const uint32_t ratios = pack_f16x2(ratio, ratio);
#pragma unroll
      for (int j = i; j < kColumns; j += 2)
        sum[j] = t == 0 ? multiply_f16x2(scores.latent[t][j], ratios) : fma_f16x2(scores.latent[t][j], ratios, sum[j]);
    }
  }
}

// Adds the latent sums to the RoPE part: scores times 2^-k.
__device__ __forceinline__ void join_rope(const float (&units)[2], const uint32_t (&sum)[kColumns], float (&s)[32]) {
#pragma unroll
  for (int j = 0; j < kColumns; ++j) {
    const float2 x = unpack_f16x2(sum[j]);
    s[2 * j] = fmaf(x.x, units[j % 2], s[2 * j]);
    s[2 * j + 1] = fmaf(x.y, units[j % 2], s[2 * j + 1]);
  }
}

struct Largest {
  __device__ float operator()(float x, float y) const { return fmaxf(x, y); }
};

// Joins the values of every head over the warp's keys, in a fixed order: with lanes 16, 8 and 4 apart, half of the
// columns each time. What a thread ends with, two heads, begins at x[0].
template <int kHalf, class T, int kCount, class Join>
__device__ __forceinline__ void join_lanes(int lane, T (&x)[kCount], Join join, int lanes = 16) {
  const bool upper = lane & lanes;
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    const T other = __shfl_xor_sync(~0u, upper ? x[i] : x[i + kHalf], lanes);
    x[i] = join(upper ? x[i + kHalf] : x[i], other);
  }
  if constexpr (kHalf * 8 > kCount) join_lanes<kHalf / 2>(lane, x, join, lanes / 2);
}

// Scores -> logits less the shift of their head, f16 pairs of the two keys of a head, -inf where a key is not used.
__device__ __forceinline__ void find_logits(const Scorer& c, const float (&s)[32], const KeyScales& scales,
                                            uint32_t (&logits)[kColumns]) {
#pragma unroll
  for (int j = 0; j < kHeads / 8; ++j) {
    const float4 head = shared_f32x4(c.head_pair(j));  // factors, shifts
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float factor = e ? head.y : head.x, shift = e ? head.w : head.z;
      logits[2 * j + e] = pack_f16x2(fmaf(s[4 * j + e], factor, -shift), fmaf(s[4 * j + 2 + e], factor, -shift));
    }
  }
  if (!__all_sync(~0u, scales.used(0) && scales.used(1))) {
    const uint32_t mask = (scales.used(0) ? 0xffffu : 0) | (scales.used(1) ? 0xffff0000u : 0);
#pragma unroll
    for (uint32_t& x : logits) x = (x & mask) | (0xfc00fc00u & ~mask);
  }
}

// The scales of this thread's keys as f16 pairs, in units of 2^reference; 0 if unused.
__device__ __forceinline__ void find_factors(const Scorer& c, const KeyScales& scales,
                                             uint32_t (&factors)[kLatentTiles]) {
  const uint4 references = shared_u32x4(c.reference(0));
#pragma unroll
  for (int t = 0; t < kLatentTiles; ++t) {
    const float unit = __uint_as_float((254 - element(references, t)) << 23);
    factors[t] = pack_f16x2(fmaxf(element(scales.of[0], t), 0.0f) * unit, fmaxf(element(scales.of[1], t), 0.0f) * unit);
  }
}

// Whether a logit or a factor is above its limit. NaN is not.
__device__ __forceinline__ bool exceeds(const uint32_t (&logits)[kColumns], const uint32_t (&factors)[kLatentTiles]) {
  uint32_t logit = logits[0], factor = factors[0];
#pragma unroll
  for (uint32_t x : logits) logit = max_f16x2(logit, x);
#pragma unroll
  for (uint32_t x : factors) factor = max_f16x2(factor, x);
  return above_f16x2(logit, kHighestLogit) || above_f16x2(factor, kHighestFactor);
}

__device__ __forceinline__ uint32_t biased_exponent(float scale) {
  const uint32_t exponent = __float_as_uint(scale) >> 23 & 0xff;
  return exponent == 255 ? 0 : min(exponent, kLargestReference);  // NaN moves nothing
}

// Moves shifts and references to the largest so far; leaves in the message what this means for earlier sums.
__device__ __forceinline__ void move_references(const Scorer& c, const Message& message, const float (&s)[32],
                                                const KeyScales& scales) {
  float largest[kColumns];
#pragma unroll
  for (int j = 0; j < kHeads / 8; ++j) {
    const float2 factor = shared_f32x2(c.head_pair(j));
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float f = e ? factor.y : factor.x;
      largest[2 * j + e] =
          fmaxf(scales.used(0) ? s[4 * j + e] * f : -INFINITY, scales.used(1) ? s[4 * j + 2 + e] * f : -INFINITY);
    }
  }
  join_lanes<kColumns / 2>(c.lane, largest, Largest{});
  set_shared(c.scratch(c.warp, c.own_heads()), make_float2(largest[0], largest[1]));
#pragma unroll
  for (int t = 0; t < kLatentTiles; ++t) {
    const uint32_t x = __reduce_max_sync(
        ~0u, max(biased_exponent(element(scales.of[0], t)), biased_exponent(element(scales.of[1], t))));
    if (c.lane == 0) set_shared(c.exponents(c.warp) + t * 4, x);
  }
  sync_scorer();
  if (c.thread() < kHeads) {
    const int head = c.thread();
    const uint32_t place = c.base + kHeadOffset + head / 2 * 16 + head % 2 * 4 + 8;
    const float before = shared_f32(place);
    float shift = before;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) shift = fmaxf(shift, shared_f32(c.scratch(warp, head)) - kMovedTo);
    set_shared(place, shift);
    set_shared(message.factors() + head * 4, fast_exp2(before - shift));
  }
  if (c.thread() < kLatentTiles) {
    const int tile = c.thread(), before = static_cast<int>(shared_u32(c.reference(tile)));
    int reference = before;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp)
      reference = max(reference, static_cast<int>(shared_u32(c.exponents(warp) + tile * 4)));
    set_shared(c.reference(tile), static_cast<uint32_t>(reference));
    set_shared(message.ratios() + tile * 4, static_cast<uint32_t>(max(before - reference + 127, 0)) << 23);
  }
  sync_scorer();
}

// Shifts and references that an item ends with, for the adders.
__device__ __forceinline__ void end_item(const Scorer& c, const Message& message) {
  const int thread = c.thread();
  if (thread < kHeads)
    set_shared(message.shifts() + thread * 4, shared_f32(c.base + kHeadOffset + thread / 2 * 16 + thread % 2 * 4 + 8));
  if (thread < kLatentTiles) set_shared(message.references() + thread * 4, shared_u32(c.reference(thread)) << 23);
}

// One step; its products have been started, and those of the next one are started here as soon as their registers are
// free. Behind the last step they run over whatever lies in the next tile, and nobody reads the result: so no product
// stands under a condition.
__device__ __forceinline__ void score_step(const Scorer& c, const Barriers& barriers, const RingPosition& position,
                                           bool last, Scores& scores) {
  const int tile = __shfl_sync(~0u, position.tile(), 0);  // uniform: descriptors are then made by the uniform units
  const RingPosition next{position.count + 1};
  const int next_tile = __shfl_sync(~0u, next.tile(), 0);
  const Message message{c.base, tile};
  finish_scores(scores);
  const KeyScales scales = key_scales(c, tile);
  const float units[2] = {__uint_as_float(key_unit(scales.of[0])), __uint_as_float(key_unit(scales.of[1]))};
  uint32_t sum[kColumns];
  join_latent(scales, units, scores, sum);
  if (!last) mbarrier_wait(barriers.full(next.tile()), next.parity());
  start_latent(c, next_tile, scores);
  join_rope(units, sum, scores.s);

  uint32_t logits[kColumns], factors[kLatentTiles];
  find_logits(c, scores.s, scales, logits);
  find_factors(c, scales, factors);
  const bool moves = named_barrier_or(kScoreBarrier, kWarpgroup, exceeds(logits, factors));
  if (moves) {
    move_references(c, message, scores.s, scales);
    find_logits(c, scores.s, scales, logits);
    find_factors(c, scales, factors);
  }
  start_rope(c, next_tile, scores);
  if (last) end_item(c, message);
#pragma unroll
  for (int i = 0; i < kColumns / 4; ++i)
    set_shared(message.logits(c.thread(), i),
               make_uint4(logits[4 * i], logits[4 * i + 1], logits[4 * i + 2], logits[4 * i + 3]));
  if (c.lane % 4 == 0) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      set_shared(message.key_factors(c.key() + 8 * i),
                 make_uint2(__byte_perm(factors[0], factors[1], i == 0 ? 0x5410 : 0x7632),
                            __byte_perm(factors[2], factors[3], i == 0 ? 0x5410 : 0x7632)));
  }
  if (c.thread() == 0) set_shared(message.moved(), static_cast<uint32_t>(moves));
  mbarrier_arrive(barriers.message(tile));
}

__device__ __forceinline__ void score(const SparseMlaParams& p, const KeySplit& split, int64_t items, uint32_t base) {
  const Barriers barriers{base + kBarrierOffset};
  Scorer c;
  c.base = base;
  c.warp = __shfl_sync(~0u, threadIdx.x / 32 % kWarps, 0);
  c.lane = threadIdx.x % 32;
  RingPosition position;
  for (uint32_t count = 0; item_number(count) < items; ++count) {
    const Item item = sm90::work_item(p, split, item_number(count));
    load_queries<8>(p, item, base, 0);
    if (c.thread() < kLatentTiles) set_shared(c.reference(c.thread()), 0u);
    sync_queries();
    int steps = wait_for_item(barriers, count);
    Scores scores;
    if (steps > 0) mbarrier_wait(barriers.full(position.tile()), position.parity());
    start_latent(c, position.tile(), scores);
    start_rope(c, position.tile(), scores);
    for (; steps > 0; --steps, ++position.count) score_step(c, barriers, position, steps == 1, scores);
    finish_scores(scores);
    sync_scorer();  // the shifts have been read
  }
}

}  // namespace fp8_mode
}  // namespace sparse_cp_ops
