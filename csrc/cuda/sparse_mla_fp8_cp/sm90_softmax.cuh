// Hopper kernel, consumer warpgroups: their state, and scores -> weights.
#pragma once

#include "sm90_tile.cuh"

namespace sparse_cp_ops {
namespace sm90 {

// A step is uniform if all scales of its records are powers of two; other steps are mixed. How a step is computed
// depends on its records alone, so every kernel gives the same bits.

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

// The parts of a record's last factor 2^E * m; one that marks an unused entry is 0 * 1.
__device__ __forceinline__ float unit_of(float factor) {
  return __uint_as_float(__float_as_uint(factor) & 0x7f800000u);
}
__device__ __forceinline__ float mantissa_of(float factor) {
  return __uint_as_float((__float_as_uint(factor) & 0x007fffffu) | 0x3f800000u);
}
__device__ __forceinline__ float inverse_power(float power) {
  return __uint_as_float((254u << 23) - __float_as_uint(power));
}

// A operand of 16 keys out of packed weights.
__device__ __forceinline__ const uint32_t (&fragment(const uint32_t (&packed)[16], int k))[4] {
  return reinterpret_cast<const uint32_t (&)[4]>(packed[4 * k]);
}

// 2^E of column j of this thread, 0 if it is unused.
template <bool kUniform>
__device__ __forceinline__ float unit(const Consumer& c, int j) {
  const float factor = shared_f32(c.factors(j / 2 * 8 + c.lane % 4 * 2 + j % 2) + 12);
  return kUniform ? factor : unit_of(factor);
}

// E of 2^E without the slow conversion of an integer: a float of exponent 23 holds it in its last bits.
__device__ __forceinline__ float exponent_of(float unit) {
  return __uint_as_float((__float_as_uint(unit) >> 23) + 0x4b000000u) - (0x1p23f + 127.0f);
}

// Units beyond these bring exp2(logit - peak), whose peak is that of logit + E, near the ends of fp32.
inline constexpr float kSmallestUnit = 0x1p-60f, kLargestUnit = 0x1p60f;

// Whether the own step is mixed.
__device__ __forceinline__ bool is_mixed_step(const Consumer& c) {
  return !__all_sync(~0u,
                     is_uniform(shared_f32x4(c.factors(c.lane))) && is_uniform(shared_f32x4(c.factors(c.lane + 32))));
}

// Whether the own step is of the common kind: all keys used, none with an extreme unit, and peaks to compare with.
// `least`, `largest`: units of this lane's share of the keys.
__device__ __forceinline__ bool is_common_step(const Consumer& c, float least, float largest) {
  return __all_sync(
      ~0u, least >= kSmallestUnit && largest <= kLargestUnit && c.peak[0] != -INFINITY && c.peak[1] != -INFINITY);
}
__device__ __forceinline__ bool has_extreme_units(const Consumer& c) {
  bool extreme = false;
  for (int key = c.lane; key < kKeys; key += 32) {
    const float u = unit_of(shared_f32(c.factors(key) + 12));
    extreme |= u != 0.0f && (u < kSmallestUnit || u > kLargestUnit);
  }
  return __any_sync(~0u, extreme) != 0;
}

// Moves the peaks to the largest logit + exponent of the own step where that exceeds them by the slack; `factor` is
// what this means for earlier results.
template <bool kUniform>
__device__ __forceinline__ void move_peaks(Consumer& c, const float (&s)[32], float (&factor)[2]) {
  float peak[2] = {-INFINITY, -INFINITY};
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    const float u = unit<kUniform>(c, j), exponent = exponent_of(u);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float x = s[j / 2 * 4 + j % 2 + 2 * i] * (c.query_factor[i] * u) + exponent;
      peak[i] = fmaxf(peak[i], u == 0.0f ? -INFINITY : x);
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

// exp2(logit - peak) of a score, and the weight, which has the unit 2^E of the values in it: exp2(logit + E - peak).
// That is a product, except where E is extreme.
struct Weight {
  float power, weight;
};
template <bool kCommon>
__device__ __forceinline__ Weight weigh(float score, float query_factor, float u, float shift, bool extreme) {
  const float x = score * u;
  float power = fast_exp2(x * query_factor - shift), weight = power * u;
  if (!kCommon) {
    if (extreme) {
      weight = fast_exp2(x * query_factor + (exponent_of(u) - shift));
      power = weight * inverse_power(u);
    }
    if (u == 0.0f) power = weight = 0.0f;
  }
  return {power, weight};
}

__device__ __forceinline__ float shift_of(float peak) {
  return peak == -INFINITY ? 0.0f : peak;  // only -inf so far: weights are 0
}

// Weights as f16 pairs in fragment order, [8 keys][row, row + 8], and the sums of exp2(logit - peak); whether all
// weights are small enough for the present peaks.
template <bool kCommon>
__device__ __forceinline__ bool find_weights(const Consumer& c, const float (&s)[32], const float (&units)[16],
                                             bool extreme, uint32_t (&packed)[16], float (&total)[2]) {
  constexpr float kLargest = 0x1p14f;  // twice that still fits f16
  const float shift[2] = {shift_of(c.peak[0]), shift_of(c.peak[1])};
  total[0] = total[1] = 0.0f;
  uint32_t largest = 0;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    float w[2][2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float u = units[2 * j + e];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const Weight x = weigh<kCommon>(s[4 * j + e + 2 * i], c.query_factor[i], u, shift[i], extreme);
        w[i][e] = x.weight;
        total[i] += x.power;
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      packed[2 * j + i] = pack_f16x2(w[i][0], w[i][1]);
      largest = max_f16x2(largest, packed[2 * j + i]);
    }
  }
  const float2 x = unpack_f16x2(largest);
  return fmaxf(x.x, x.y) <= kLargest;
}

// Scores -> weights. A step of the common kind without a logit far above the peaks needs no maximum.
__device__ __forceinline__ void softmax(Consumer& c, bool common, const float (&s)[32], const float (&units)[16],
                                        uint32_t (&packed)[16], float (&factor)[2]) {
  float total[2];
  factor[0] = factor[1] = 1.0f;
  if (common) common = __all_sync(~0u, find_weights<true>(c, s, units, false, packed, total)) != 0;
  if (!common) {
    const bool extreme = has_extreme_units(c);
    move_peaks<true>(c, s, factor);
    find_weights<false>(c, s, units, extreme, packed, total);
  }
  c.total[0] = c.total[0] * factor[0] + total[0];
  c.total[1] = c.total[1] * factor[1] + total[1];
}

// Weights of 16 keys, a quarter of a step, into a swizzled chunk.
__device__ __forceinline__ void store_quarter(const Consumer& c, uint32_t chunk, int quarter, const uint32_t (&w)[4]) {
  const int row = c.warp * 16 + c.lane / 8 % 2 * 8 + c.lane % 8;
  stmatrix_x4(chunk + swizzled(row, 2 * quarter + c.lane / 16), w[0], w[1], w[2], w[3]);
}

__device__ __forceinline__ uint32_t published_weights(const Consumer& c) {
  return c.tile(c.w) + kRopeChunk * kChunkBytes;
}

// Weights of a mixed step, times the mantissas of the scales of each tile, rounded once: those of the other consumer's
// two tiles go to shared memory, the own ones stay, in the place of the scores.
template <bool kCommon>
__device__ __forceinline__ void find_mixed_weights(const Consumer& c, const float (&s)[32], bool extreme,
                                                   uint32_t (&own)[2][16], float (&total)[2]) {
  const float shift[2] = {shift_of(c.peak[0]), shift_of(c.peak[1])};
  total[0] = total[1] = 0.0f;
#pragma unroll
  for (int quarter = 0; quarter < 4; ++quarter) {
    uint32_t others[2][4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int j = 2 * quarter + half;
      float w[2][2], first[2], second[2];  // [row][key]; of keys: mantissas of tiles 0 | 1, 2 | 3 in turn
      float4 m[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float4 factors = shared_f32x4(c.factors(j * 8 + c.lane % 4 * 2 + e));
        const float u = unit_of(factors.w);
        m[e].w = mantissa_of(factors.w);
        m[e].z = factors.z * m[e].w;
        m[e].y = factors.y * m[e].z;
        m[e].x = factors.x * m[e].y;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const Weight x = weigh<kCommon>(s[4 * j + e + 2 * i], c.query_factor[i], u, shift[i], extreme);
          w[i][e] = x.weight;
          total[i] += x.power;
        }
      }
#pragma unroll
      for (int t = 0; t < 2; ++t) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float low = t == 0 ? m[e].x : m[e].y, high = t == 0 ? m[e].z : m[e].w;
          first[e] = c.w == 0 ? low : high;
          second[e] = c.w == 0 ? high : low;
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          own[t][2 * j + i] = pack_f16x2(w[i][0] * first[0], w[i][1] * first[1]);
          others[t][2 * half + i] = pack_f16x2(w[i][0] * second[0], w[i][1] * second[1]);
        }
      }
    }
    store_quarter(c, published_weights(c), quarter, others[0]);
    store_quarter(c, c.base + kWeightsOffset, quarter, others[1]);
  }
}

}  // namespace sm90
}  // namespace sparse_cp_ops
