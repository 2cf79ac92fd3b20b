// Hopper kernel: queries of 64 heads into the swizzled tile, as f16 times a power of two a head.
#pragma once

#include "../device/cp_async.cuh"
#include "sm90_tile.cuh"

namespace sparse_cp_ops {
namespace sm90 {

// 16 bytes of queries, whatever their alignment.
__device__ __forceinline__ uint4 load_query_piece(const uint16_t* source, bool vectors) {
  if (vectors) return *reinterpret_cast<const uint4*>(source);
  return make_uint4(source[0] | source[1] << 16, source[2] | source[3] << 16, source[4] | source[5] << 16,
                    source[6] | source[7] << 16);
}

// The larger magnitudes of two pairs of bf16; a number rather than NaN.
__device__ __forceinline__ uint32_t max_magnitudes(uint32_t a, uint32_t b) {
  const __nv_bfloat162 larger =
      __hmax2(__habs2(reinterpret_cast<const __nv_bfloat162&>(a)), __habs2(reinterpret_cast<const __nv_bfloat162&>(b)));
  return reinterpret_cast<const uint32_t&>(larger);
}

// Producers copy the next item's queries while the consumers are still busy with the last weights and the results of
// this one, and convert them in place: each lane what it has copied itself. Warp w of n has heads w, w + n, ...: of a
// head, a lane has two latent pieces of 16 bytes, 256 dimensions apart, and of the RoPE parts of four heads one piece.
template <int kProducers>
struct QueryLoader {
  static constexpr int kWarps = kProducers / 32, kHeadsPerWarp = kHeads / kWarps, kRopeHeads = 4;
  static constexpr uint32_t kHalf = kLatentChunks / 2 * kChunkBytes;
  const SparseMlaParams& p;
  uint32_t base;
  int warp, lane;

  __device__ QueryLoader(const SparseMlaParams& params, uint32_t shared)
      : p(params), base(shared), warp((threadIdx.x - kConsumers) / 32), lane(threadIdx.x % 32) {}

  __device__ uint32_t latent() const { return base + kQueryOffset + lane / 8 * kChunkBytes + swizzled(warp, lane % 8); }
  // Of its h-th head, seen from the first: rows of 128 bytes whose pieces are exchanged by row % 8.
  static_assert(kWarps == 4 || kWarps == 8);
  __device__ static uint32_t of_head(uint32_t first, int h) {
    return (kWarps == 4 && h % 2 ? first ^ 4 << 4 : first) + h * kWarps * 128;
  }
  __device__ int rope_head() const { return warp + lane / 8 * kWarps; }  // of the first four
  __device__ uint32_t rope() const {
    return base + kQueryOffset + kRopeChunk * kChunkBytes + swizzled(rope_head(), lane % 8);
  }

  __device__ void copy(const Item& item) const {
    const auto* q = static_cast<const uint16_t*>(p.q) + item.row * p.q_row_stride + item.head0 * p.q_head_stride;
    const uint16_t* source = q + warp * p.q_head_stride + lane * 8;
    const uint16_t* rope_source = q + rope_head() * p.q_head_stride + kLatentDim + lane % 8 * 8;
    const int64_t step = kWarps * p.q_head_stride;
    if (reinterpret_cast<uintptr_t>(p.q) % 16 == 0 && p.q_row_stride % 8 == 0 && p.q_head_stride % 8 == 0) {
#pragma unroll
      for (int h = 0; h < kHeadsPerWarp; ++h) {
        cp_async_16(of_head(latent(), h), source, true);
        cp_async_16(of_head(latent(), h) + kHalf, source + kLatentDim / 2, true);
        source += step;
      }
#pragma unroll
      for (int h = 0; h < kHeadsPerWarp; h += kRopeHeads) {
        cp_async_16(rope() + h * kWarps * 128, rope_source, true);
        rope_source += kRopeHeads * step;
      }
    } else {
#pragma unroll 1
      for (int h = 0; h < kHeadsPerWarp; ++h) {
        set_shared(of_head(latent(), h), load_query_piece(source, false));
        set_shared(of_head(latent(), h) + kHalf, load_query_piece(source + kLatentDim / 2, false));
        source += step;
        if (h % kRopeHeads != 0) continue;
        set_shared(rope() + h * kWarps * 128, load_query_piece(rope_source, false));
        rope_source += kRopeHeads * step;
      }
    }
    cp_async_commit();
  }

  __device__ static void convert_piece(uint32_t place, const uint4& x, bool latent, float factor) {
    set_shared(place, make_uint4(scaled_query(x.x, latent, factor), scaled_query(x.y, latent, factor),
                                 scaled_query(x.z, latent, factor), scaled_query(x.w, latent, factor)));
  }
  // Two heads at a time, side by side: each alone would wait for every one of its steps. Then arrives at `full`.
  __device__ void convert(uint32_t full) const {
    constexpr int kTogether = kWarps == 4 ? 2 : 1;  // as registers allow
    cp_async_wait<0>();
    float rope_factor = 0.0f;
#pragma unroll 2
    for (int first = 0; first < kHeadsPerWarp; first += kTogether) {
      const uint32_t place = latent() + first * kWarps * 128;
      uint4 x[kTogether][2];
      uint32_t largest[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        x[i][0] = shared_u32x4(of_head(place, i));
        x[i][1] = shared_u32x4(of_head(place, i) + kHalf);
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const auto& [a, b] = x[i];
        const uint32_t pair = max_magnitudes(max_magnitudes(max_magnitudes(a.x, a.y), max_magnitudes(a.z, a.w)),
                                             max_magnitudes(max_magnitudes(b.x, b.y), max_magnitudes(b.z, b.w)));
        largest[i] = __reduce_max_sync(~0u, max(pair << 16, pair & 0xffff0000u));  // ordered like the numbers
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const int h = first + i, exponent = query_exponent(__uint_as_float(largest[i]));
        const float factor = power_of_two(-exponent);
        convert_piece(of_head(place, i), x[i][0], true, factor);
        convert_piece(of_head(place, i) + kHalf, x[i][1], true, factor);
        if (lane == 0)
          set_shared(base + kQueryFactorOffset + (warp + h * kWarps) * 4,
                     power_of_two(exponent) * (p.softmax_scale * kLog2e));
        if (h % kRopeHeads == lane / 8) rope_factor = factor;
      }
      if (first % kRopeHeads == kRopeHeads - kTogether) {
        const uint32_t rope_place = rope() + (first / kRopeHeads) * kRopeHeads * kWarps * 128;
        convert_piece(rope_place, shared_u32x4(rope_place), false, rope_factor);
      }
    }
    fence_async_proxy();
    mbarrier_arrive(full);
  }
};

}  // namespace sm90
}  // namespace sparse_cp_ops
