// Scalar conversions of the CPU kernels, free of branches so that loops over them vectorise.
// They define the bytes of the records together with cuda/device/fp8.cuh and cuda/device/rope.cuh.
#pragma once

#include <bit>
#include <cstdint>

#include "../kv_record.h"

// Loops over rows are compiled for AVX2 too and chosen when the library loads; the bytes are the same.
#if defined(__x86_64__) && defined(__gnu_linux__)
#define SCO_VECTOR_CLONES __attribute__((target_clones("avx2", "default")))
#else
#define SCO_VECTOR_CLONES
#endif

namespace sparse_cp_ops {

// What the GPU's own conversions and arithmetic return for NaN.
inline constexpr uint32_t kFloatNan = 0x7FFFFFFF;
inline constexpr uint16_t kBf16Nan = 0x7FFF;
inline constexpr uint8_t kFp8Nan = 0x7F;

inline float bf16_to_float(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

// Round to nearest even; every NaN becomes kBf16Nan.
inline uint16_t float_to_bf16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  return static_cast<uint16_t>((bits & 0x7FFFFFFF) > 0x7F800000 ? kBf16Nan : rounded);
}

inline float canonical_nan(float x) { return x == x ? x : std::bit_cast<float>(kFloatNan); }

// e4m3fn by its bits: exponent and mantissa moved into place, denormals (multiples of 2^-9) by integer conversion.
inline float e4m3_to_float(uint8_t bits) {
  const uint32_t magnitude = bits & 0x7F;
  const float normal = std::bit_cast<float>((magnitude << 20) + (120u << 23));
  const float denormal = static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-9f;
  const uint32_t value = std::bit_cast<uint32_t>(magnitude < 8 ? denormal : normal);
  const uint32_t finite_or_nan = magnitude == kFp8Nan ? kFloatNan : value;
  return std::bit_cast<float>(finite_or_nan | static_cast<uint32_t>(bits & 0x80) << 24);
}

// Round to nearest even, saturate to +-448; x must not be NaN.
inline uint8_t float_to_e4m3(float x) {
  const uint32_t sign = std::bit_cast<uint32_t>(x) >> 24 & 0x80;
  const uint32_t absolute = std::bit_cast<uint32_t>(x) & 0x7FFFFFFF;
  const uint32_t limit = std::bit_cast<uint32_t>(kFp8Max);
  const uint32_t bits = absolute < limit ? absolute : limit;
  const uint32_t normal = (bits + 0x7FFFF + ((bits >> 20) & 1) - (120u << 23)) >> 20;
  // Below 2^-6 the spacing is 2^-9, the spacing of floats at 2^14: the addition rounds.
  const uint32_t denormal = std::bit_cast<uint32_t>(std::bit_cast<float>(bits) + 0x1p14f) & 0xF;
  return static_cast<uint8_t>(sign | (bits < std::bit_cast<uint32_t>(0x1p-6f) ? denormal : normal));
}

// The smallest power of two >= a positive normal scale.
inline float round_up_to_power_of_two(float scale) {
  const uint32_t bits = std::bit_cast<uint32_t>(scale);
  return std::bit_cast<float>((bits + 0x7FFFFF) & 0x7F800000);
}

// Scale of an FP8 tile of n values; 0 when the tile holds NaN or inf, or its scale would be inf.
inline float fp8_tile_scale(const float* x, int64_t n, float absmax, bool ue8m0) {
  uint32_t peak = 0;  // magnitudes as integers: NaN > inf > every number
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t magnitude = std::bit_cast<uint32_t>(x[i]) & 0x7FFFFFFF;
    peak = magnitude > peak ? magnitude : peak;
  }
  constexpr uint32_t kInfinity = 0x7F800000;
  if (peak >= kInfinity) return 0.0f;
  const float amax = std::bit_cast<float>(peak);
  float scale = (amax > kAmaxFloor ? amax : kAmaxFloor) / absmax;
  if (ue8m0) scale = round_up_to_power_of_two(scale);
  return std::bit_cast<uint32_t>(scale) >= kInfinity ? 0.0f : scale;
}

// Encodes a tile and returns the scale to store: 1, with NaN bytes, for a tile that has none of its own.
inline float encode_fp8_tile(const float* x, int64_t n, float absmax, bool ue8m0, uint8_t* out) {
  const float scale = fp8_tile_scale(x, n, absmax, ue8m0);
  if (scale == 0.0f) {
    for (int64_t i = 0; i < n; ++i) out[i] = kFp8Nan;
    return 1.0f;
  }
  for (int64_t i = 0; i < n; ++i) out[i] = float_to_e4m3(x[i] / scale);
  return scale;
}

// The RoPE of the package: the first `dim` values rotated in place; cos_sin nullptr (a position outside the table)
// gives NaN. Interleaved pairs are (2i, 2i + 1), the others (i, i + dim / 2).
inline void rope_in_place(float* x, const float* cos_sin, int64_t dim, bool interleaved) {
  if (cos_sin == nullptr) {
    for (int64_t i = 0; i < dim; ++i) x[i] = std::bit_cast<float>(kFloatNan);
    return;
  }
  const int64_t half = dim / 2;
  const float *cosines = cos_sin, *sines = cos_sin + half;
  if (interleaved) {
    for (int64_t i = 0; i < half; ++i) {
      const float a = x[2 * i], b = x[2 * i + 1];
      x[2 * i] = a * cosines[i] - b * sines[i];
      x[2 * i + 1] = b * cosines[i] + a * sines[i];
    }
  } else {
    for (int64_t i = 0; i < half; ++i) {
      const float a = x[i], b = x[i + half];
      x[i] = a * cosines[i] - b * sines[i];
      x[i + half] = b * cosines[i] + a * sines[i];
    }
  }
}

// Walsh-Hadamard transform of 128 values in Sylvester order, strides 1 to 64, then 128^-0.5.
inline void hadamard_in_place(float* x) {
  for (int64_t stride = 1; stride < kIndexDim; stride *= 2)
    for (int64_t start = 0; start < kIndexDim; start += 2 * stride)
      for (int64_t i = start; i < start + stride; ++i) {
        const float a = x[i], b = x[i + stride];
        x[i] = a + b;
        x[i + stride] = a - b;
      }
  for (int64_t i = 0; i < kIndexDim; ++i) x[i] *= kHadamardScale;
}

}  // namespace sparse_cp_ops
