// precision="fp8", queries: bf16 -> e4m3 and a power of two a head. All consumer warpgroups share this work.
#pragma once

#include "../device/bf16.cuh"
#include "../device/fp8.cuh"
#include "sm90_fp8.cuh"

namespace sparse_cp_ops {
namespace fp8_mode {

inline constexpr float kNoShift = -0x1p126f;  // of a head without a finite logit so far

// k of a head whose largest mean magnitude over a scale tile is `mean`: mean * 2^-k lies in (1/2, 1] where the limits
// allow it, so that a product with 128 bytes of a key, at most 448 each, stays below 128 * (1 + 2^-4) * 448 < 65504,
// the largest f16. The limits keep 2^-k times a RoPE part, and sums of its products, within fp32.
__device__ __forceinline__ int query_exponent_e4m3(float mean) {
  const uint32_t bits = __float_as_uint(mean);
  const int exponent = static_cast<int>(bits >> 23 & 0xff) - 127;
  return min(max(exponent + ((bits & 0x7fffff) != 0 ? 1 : 0), -60), 125);
}

// A lane's share of a head: 16 latent dimensions and 2 of the RoPE part.
struct Query {
  uint4 latent[2];
  uint32_t rope;
};

// A lane's part of the mean magnitude of its scale tile.
__device__ __forceinline__ float mean_latent(const Query& query) {
  float x[16], sum = 0.0f;
  unpack_bf16x8(query.latent[0], x);
  unpack_bf16x8(query.latent[1], x + 8);
#pragma unroll
  for (float value : x) sum += fabsf(value) * (1.0f / kScaleTile);
  return sum;
}

// One head, with scale and the start of its shift, into shared memory; a whole warp. `mean`: largest mean magnitude of
// a scale tile.
__device__ __forceinline__ void store_query(const SparseMlaParams& p, uint32_t base, int head, const Query& query,
                                            float mean) {
  const int lane = threadIdx.x % 32;
  float x[16];
  unpack_bf16x8(query.latent[0], x);
  unpack_bf16x8(query.latent[1], x + 8);
  const int exponent = query_exponent_e4m3(mean);
  const float factor = mean < INFINITY ? power_of_two(-exponent) : NAN;  // the conversion would make 448 of it
  uint32_t bytes[4];
#pragma unroll
  for (int j = 0; j < 4; ++j)
    bytes[j] =
        floats_to_e4m3x4<true>(x[4 * j] * factor, x[4 * j + 1] * factor, x[4 * j + 2] * factor, x[4 * j + 3] * factor);
  const uint32_t queries = base + kQueryOffset;
  set_shared(queries + lane / 8 * kChunkBytes + swizzled(head, lane % 8),
             make_uint4(bytes[0], bytes[1], bytes[2], bytes[3]));
  set_shared(queries + kRopeChunk * kChunkBytes + swizzled(head, lane / 4) + lane % 4 * 4,
             float_to_bf16x2(bf16_low(query.rope) * factor, bf16_high(query.rope) * factor));
  if (lane == 0) {
    const uint32_t place = base + kHeadOffset + head / 2 * 16 + head % 2 * 4;
    set_shared(place, power_of_two(exponent) * (p.softmax_scale * kLog2e));
    set_shared(place + 8, kNoShift);
  }
}

// Queries of the heads from `first` on, kCount a warp, by a warpgroup.
template <int kCount>
__device__ __forceinline__ void load_queries(const SparseMlaParams& p, const Item& item, uint32_t base, int first) {
  const int lane = threadIdx.x % 32, head = first + threadIdx.x % kWarpgroup / 32 * kCount;
  const bool vectors =
      reinterpret_cast<uintptr_t>(p.q) % 16 == 0 && p.q_row_stride % 8 == 0 && p.q_head_stride % 8 == 0;
  const auto* q = static_cast<const uint16_t*>(p.q) + item.row * p.q_row_stride + (item.head0 + head) * p.q_head_stride;
  Query x[kCount];
  auto load = [&](bool in_vectors) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const uint16_t* latent = q + i * p.q_head_stride + lane * 16;
      const uint16_t* rope = q + i * p.q_head_stride + kLatentDim + lane * 2;
      x[i].latent[0] = load_bf16x8(latent, in_vectors);
      x[i].latent[1] = load_bf16x8(latent + 8, in_vectors);
      x[i].rope = in_vectors ? *reinterpret_cast<const uint32_t*>(rope) : rope[0] | uint32_t{rope[1]} << 16;
    }
  };
  if (vectors) load(true);
  else load(false);
  float means[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) means[i] = mean_latent(x[i]);
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2)
#pragma unroll
    for (float& mean : means) {
      const float other = __shfl_xor_sync(~0u, mean, lanes);
      mean = lanes < 8 ? mean + other : fmaxf(mean, other);
    }
#pragma unroll
  for (int i = 0; i < kCount; ++i) store_query(p, base, head + i, x[i], means[i]);
  fence_async_proxy();
}

// The queries of an item are there; those of the item before are not needed any more when its last message has come.
__device__ __forceinline__ void sync_queries() { named_barrier(kQueryBarrier, 3 * kWarpgroup); }

}  // namespace fp8_mode
}  // namespace sparse_cp_ops
