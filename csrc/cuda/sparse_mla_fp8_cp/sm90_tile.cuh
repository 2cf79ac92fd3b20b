// Hopper kernel: sizes, shared memory and work items that its roles share. Picture: docs/kernels/sparse_mla.md.
#pragma once

#include <climits>

#include "../device/mma_sync.cuh"
#include "../device/shared_access.cuh"
#include "../device/sm90.cuh"
#include "../device/wgmma.cuh"
#include "kernels.h"
#include "mla_record.cuh"
#include "sm90_items.cuh"

namespace sparse_cp_ops {
namespace sm90 {

// Two consumer warpgroups and one or two that produce. A Hopper SM has 504 registers for three warpgroups, in steps of
// 8, and 512 for four.
inline constexpr int kConsumers = 2 * kWarpgroup;
inline constexpr int kConsumerRegisters = 216;
template <int kProducers>
inline constexpr int kProducerRegisters = kProducers == kWarpgroup ? 72 : 40;

inline constexpr int kChunkDims = 64;  // 128 bytes: width of a swizzled tile
inline constexpr int kLatentChunks = kLatentDim / kChunkDims, kChunks = kQkDim / kChunkDims;
inline constexpr int kRopeChunk = kLatentChunks;
inline constexpr uint32_t kTileBytes = kChunks * kChunkBytes;

// Shared memory, bytes from a base that is aligned to 1024.
inline constexpr uint32_t kQueryOffset = 0;
inline constexpr uint32_t kKeyOffset = kTileBytes;  // two steps' tiles; consumer w owns tile w
// Weights of an owned step for the other consumer lie in the tile's RoPE chunk, which is dead by then. With scales that
// are no powers of two they differ between the other's two scale tiles; the second set lies here.
inline constexpr uint32_t kWeightsOffset = 3 * kTileBytes;
inline constexpr uint32_t kFactorOffset = kWeightsOffset + kChunkBytes;         // float4 [2][64], see Workspace
inline constexpr uint32_t kQueryFactorOffset = kFactorOffset + 2 * kKeys * 16;  // float [64], comes with the queries
inline constexpr uint32_t kPeakOffset = kQueryFactorOffset + kHeads * 4;        // float [64]
inline constexpr uint32_t kTotalOffset = kPeakOffset + kHeads * 4;              // float [64]
inline constexpr uint32_t kBarrierOffset = kTotalOffset + kHeads * 4;
inline constexpr uint32_t kSharedBytes = kBarrierOffset + 240;
static_assert(kSharedBytes <= 227 * 1024);

// A tile is filled and freed in two parts: 0, the half of the latent dimensions whose values its owner adds, and 1, the
// other half with the RoPE chunk, whose values the other consumer adds. A part is freed by 16 keys at a time.
inline constexpr int kQuarters = 4;
struct Barriers {
  uint32_t base;
  __device__ uint32_t full(int tile, int part) const { return base + 8 * (2 * tile + part); }
  __device__ uint32_t empty(int tile, int part, int quarter) const {
    return base + 32 + 8 * (kQuarters * (2 * tile + part) + quarter);
  }
  __device__ uint32_t weights(int tile) const { return base + 160 + 8 * tile; }  // its owner has written the weights
  __device__ uint32_t item_full() const { return base + 176; }
  __device__ uint32_t item_empty() const { return base + 184; }                // all its scores exist
  __device__ uint32_t steps() const { return base + 192; }                     // int: steps of the item
  __device__ uint32_t mixed(int tile) const { return base + 196 + 4 * tile; }  // whether its step is a mixed one
  __device__ uint32_t scan(int warp) const { return base + 204 + 4 * warp; }   // int: scratch of the producer's warps
};
inline constexpr int kConsumerBarrier = 1;

// What the four scales of a record turn into. Values: e4m3 * multiplier in units of 2^E * m, with a mantissa m of each
// scale. Factors: m0 / m1, m1 / m2, m2 / m3, which take the sum of products over one scale tile into the unit of the
// next, and 2^E * m3, which is never 0, so that 0 marks an unused entry. Zero and subnormal scales count as 0, NaN and
// infinite ones as NaN.
inline constexpr uint32_t kExponentBits = 0x7f800000u, kFractionBits = 0x007fffffu;

// The largest of these is that of the record.
__device__ __forceinline__ uint32_t finite_power(uint32_t scale) {
  const uint32_t power = scale & kExponentBits;
  return power == kExponentBits ? 0 : power;
}
__device__ __forceinline__ int exponent_of(uint32_t largest) {
  return largest == 0 ? 0 : record_exponent(static_cast<int>(largest >> 23) - 127);
}
// inverse: 2^-E.
__device__ __forceinline__ float multiplier_of(uint32_t scale, float inverse) {
  const float ratio = __uint_as_float(scale & kExponentBits) * inverse;
  return fmaf(ratio, 0.0f, ratio);
}
__device__ __forceinline__ float mantissa_of_scale(uint32_t scale) {
  const uint32_t power = finite_power(scale);
  return __uint_as_float((power == 0 ? 0 : scale & kFractionBits) | 0x3f800000u);
}
__device__ __forceinline__ float last_factor(float mantissa, int exponent) {
  return __uint_as_float(__float_as_uint(mantissa) + (static_cast<uint32_t>(exponent) << 23));
}
__device__ __forceinline__ uint32_t rope_multiplier_of(float inverse) {  // two bf16
  return __byte_perm(__float_as_uint(inverse), 0, 0x3232);
}

struct RecordScales {
  uint32_t multipliers[kLatentTiles];  // two f16 each
  float4 factors;
  uint32_t rope_multiplier;
};

__device__ __forceinline__ RecordScales record_scales(const uint4& scales) {
  const uint32_t largest =
      max(max(finite_power(scales.x), finite_power(scales.y)), max(finite_power(scales.z), finite_power(scales.w)));
  const int exponent = exponent_of(largest);
  const float inverse = power_of_two(-exponent);
  RecordScales result;
  float mantissas[kLatentTiles];
  int t = 0;
#pragma unroll
  for (uint32_t scale : {scales.x, scales.y, scales.z, scales.w}) {
    const float multiplier = multiplier_of(scale, inverse);
    result.multipliers[t] = pack_f16x2(multiplier, multiplier);
    mantissas[t++] = mantissa_of_scale(scale);
  }
  result.factors = make_float4(__fdividef(mantissas[0], mantissas[1]), __fdividef(mantissas[1], mantissas[2]),
                               __fdividef(mantissas[2], mantissas[3]), last_factor(mantissas[3], exponent));
  result.rope_multiplier = rope_multiplier_of(inverse);
  return result;
}

// Whether the four scales are the same but for powers of two, which are in the multipliers.
__device__ __forceinline__ bool is_uniform(const float4& f) {
  return f.w == 0.0f || (f.x == 1.0f && f.y == 1.0f && f.z == 1.0f && (__float_as_uint(f.w) & 0x007fffffu) == 0);
}

__device__ __forceinline__ uint4 convert_latent(uint2 bytes, uint32_t multiplier) {
  return make_uint4(e4m3x2_to_f16x2(bytes.x, false, multiplier), e4m3x2_to_f16x2(bytes.x, true, multiplier),
                    e4m3x2_to_f16x2(bytes.y, false, multiplier), e4m3x2_to_f16x2(bytes.y, true, multiplier));
}

__device__ __forceinline__ uint4 convert_rope(uint4 x, uint32_t multiplier) {
  return make_uint4(multiply_bf16x2(x.x, multiplier), multiply_bf16x2(x.y, multiplier),
                    multiply_bf16x2(x.z, multiplier), multiply_bf16x2(x.w, multiplier));
}

}  // namespace sm90
}  // namespace sparse_cp_ops
