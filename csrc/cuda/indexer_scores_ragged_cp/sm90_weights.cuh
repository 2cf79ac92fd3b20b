// Relu, weights and the sum over heads of a tile's products, for the two keys of a lane. One precision, one class.
//
// The sum of 64 heads is that of the first 32 plus that of the last 32, so that a row scores the same bits whether one
// lane holds all its heads (four rows a product) or two lanes hold a half each (two rows a product).
#pragma once

#include <cuda_fp16.h>

#include "sm90_mma.cuh"

namespace sparse_cp_ops {

inline constexpr int kHalfHeads = 32;

template <int HEADS>
struct WeightsF32 {
  using Half = WeightsF32<kHalfHeads>;
  static constexpr int kHeads = HEADS;
  static constexpr int kProducts = HEADS / kHalfHeads;  // of 128 columns
  static constexpr bool kDeferred = false;              // measured slower here
  float w[HEADS];
  float sums[kProducts][2];

  // This lane's part of its row, in shared memory, 16-byte aligned; a product has ROWS rows, four or two.
  template <int ROWS>
  __device__ __forceinline__ void load(const float* weights) {
#pragma unroll
    for (int h = 0; h < HEADS; h += 4) {
      const float4 four = *reinterpret_cast<const float4*>(weights + h);
      w[h] = four.x, w[h + 1] = four.y, w[h + 2] = four.z, w[h + 3] = four.w;
    }
  }
  template <int PRODUCT>
  static __device__ __forceinline__ void multiply(uint64_t keys, uint64_t queries) {
    product_n128_f32(keys, queries + PRODUCT * 128 * kOperandRow);
  }
  template <int PRODUCT>
  __device__ __forceinline__ void add() {
    sums[PRODUCT][0] = sums[PRODUCT][1] = 0.0f;
    unrolled<kHalfHeads / 2>([&](auto group) {
      constexpr int kGroup = decltype(group)::value, kHead = PRODUCT * kHalfHeads + 2 * kGroup;
      sums[PRODUCT][0] = fmaf(relu_f32<4 * kGroup>(), w[kHead], sums[PRODUCT][0]);
      sums[PRODUCT][1] = fmaf(relu_f32<4 * kGroup + 2>(), w[kHead], sums[PRODUCT][1]);
      sums[PRODUCT][0] = fmaf(relu_f32<4 * kGroup + 1>(), w[kHead + 1], sums[PRODUCT][0]);
      sums[PRODUCT][1] = fmaf(relu_f32<4 * kGroup + 3>(), w[kHead + 1], sums[PRODUCT][1]);
    });
  }
  __device__ __forceinline__ float sum(int key) const {
    return kProducts == 1 ? sums[0][key] : sums[0][key] + sums[kProducts - 1][key];
  }
  __device__ __forceinline__ float scaled(float sum) const { return sum; }
};

// Half-precision products and sums of eight heads, then fp32. Weights are brought to at most 1/8 by a power of two, so
// that with |q| <= 0.875 no partial sum passes 8 * (128 * 0.875 * 448) / 8 = 50176 < 65504.
template <int HEADS>
struct WeightsF16 {
  using Half = WeightsF16<kHalfHeads>;
  static constexpr int kHeads = HEADS;
  static constexpr int kProducts = 1;  // of 4 * HEADS columns
  static constexpr bool kDeferred = true;
  static constexpr int kHalves = HEADS / kHalfHeads;
  __half2 w[HEADS / 2];
  float power;
  float sums[kHalves][2][2];  // half of the heads, key, heads of even or odd number

  template <int ROWS>
  __device__ __forceinline__ void load(const float* weights) {
    float peak = 0.0f;
    const auto for_each_four = [&](const auto& body) {
#pragma unroll
      for (int h = 0; h < HEADS; h += 4) body(h, *reinterpret_cast<const float4*>(weights + h));
    };
    const auto size = [](float weight) { return fabsf(weight) < INFINITY ? fabsf(weight) : 0.0f; };
    for_each_four([&](int, const float4& four) {
      peak = fmaxf(fmaxf(peak, fmaxf(size(four.x), size(four.y))), fmaxf(size(four.z), size(four.w)));
    });
    // Of all the row's heads: with two rows a product another lane has the other half.
    if constexpr (ROWS < 4) peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, ROWS));
    const int exponent = max(-126, min(127, ilogbf(fmaxf(peak, 1e-30f)) + 4));  // peak < 2^(exponent - 3)
    power = ldexpf(1.0f, exponent);
    const float inverse = ldexpf(1.0f, -exponent);
    for_each_four([&](int h, const float4& four) {
      w[h / 2] = __floats2half2_rn(four.x * inverse, four.y * inverse);
      w[h / 2 + 1] = __floats2half2_rn(four.z * inverse, four.w * inverse);
    });
  }
  template <int PRODUCT>
  static __device__ __forceinline__ void multiply(uint64_t keys, uint64_t queries) {
    if constexpr (HEADS == 64) product_n256_f16(keys, queries);
    else product_n128_f16(keys, queries);
  }
  template <int PRODUCT>
  __device__ __forceinline__ void add() {
    unrolled<kHalves>([&](auto half) {
      constexpr int kHalf = decltype(half)::value;
      unrolled<kHalfHeads / 16>([&](auto part) {
        constexpr int kPart = decltype(part)::value;
        __half2 partial[2];
        unrolled<8>([&](auto in_part) {
          constexpr int kGroup = (kHalf * (kHalfHeads / 16) + kPart) * 8 + decltype(in_part)::value;
          const uint32_t low = relu_f16x2<2 * kGroup>(), high = relu_f16x2<2 * kGroup + 1>();
          const __half2 key0 = reinterpret_cast<const __half2&>(low), key1 = reinterpret_cast<const __half2&>(high);
          if constexpr (decltype(in_part)::value == 0) {
            partial[0] = __hmul2(key0, w[kGroup]), partial[1] = __hmul2(key1, w[kGroup]);
          } else {
            partial[0] = __hfma2(key0, w[kGroup], partial[0]), partial[1] = __hfma2(key1, w[kGroup], partial[1]);
          }
        });
#pragma unroll
        for (int key = 0; key < 2; ++key) {
          const float2 pair = __half22float2(partial[key]);
          float (&s)[2] = sums[kHalf][key];
          s[0] = kPart == 0 ? pair.x : s[0] + pair.x;
          s[1] = kPart == 0 ? pair.y : s[1] + pair.y;
        }
      });
    });
  }
  __device__ __forceinline__ float sum(int key) const {
    const float first = sums[0][key][0] + sums[0][key][1];
    return kHalves == 1 ? first : first + (sums[kHalves - 1][key][0] + sums[kHalves - 1][key][1]);
  }
  __device__ __forceinline__ float scaled(float sum) const { return sum * power; }
};

}  // namespace sparse_cp_ops
