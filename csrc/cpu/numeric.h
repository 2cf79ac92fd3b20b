// Scalar conversions of the CPU kernels, free of branches so that loops over them vectorise.
// They define the bytes of the records together with cuda/device/fp8.cuh and cuda/device/rope.cuh.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

#include "../kv_record.h"
#include "../ops/rope_table.h"

#define SCO_INLINE [[gnu::always_inline]] inline  // so that a row loop compiled for AVX2 contains them

namespace sparse_cp_ops {

// What the GPU's own conversions and arithmetic return for NaN.
inline constexpr uint32_t kFloatNan = 0x7FFFFFFF;
inline constexpr uint16_t kBf16Nan = 0x7FFF;
inline constexpr uint8_t kFp8Nan = 0x7F;

// A mask instead of ?: because GCC does not vectorise a choice between floating-point results (they may trap).
SCO_INLINE uint32_t select(bool condition, uint32_t yes, uint32_t no) {
  const uint32_t mask = -static_cast<uint32_t>(condition);
  return (yes & mask) | (no & ~mask);
}

SCO_INLINE float bf16_to_float(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

// Round to nearest even; every NaN becomes kBf16Nan.
SCO_INLINE uint16_t float_to_bf16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  return static_cast<uint16_t>(select((bits & 0x7FFFFFFF) > 0x7F800000, kBf16Nan, rounded));
}

SCO_INLINE float canonical_nan(float x) { return x == x ? x : std::bit_cast<float>(kFloatNan); }

// e4m3fn by its bits: exponent and mantissa moved into place, denormals (multiples of 2^-9) by integer conversion.
SCO_INLINE float e4m3_to_float(uint8_t bits) {
  const uint32_t magnitude = bits & 0x7F;
  const float normal = std::bit_cast<float>((magnitude << 20) + (120u << 23));
  const float denormal = static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-9f;
  const uint32_t value = select(magnitude < 8, std::bit_cast<uint32_t>(denormal), std::bit_cast<uint32_t>(normal));
  const uint32_t finite_or_nan = select(magnitude == kFp8Nan, kFloatNan, value);
  return std::bit_cast<float>(finite_or_nan | static_cast<uint32_t>(bits & 0x80) << 24);
}

// Round to nearest even, saturate to +-448; x must not be NaN.
SCO_INLINE uint8_t float_to_e4m3(float x) {
  const uint32_t sign = std::bit_cast<uint32_t>(x) >> 24 & 0x80;
  const uint32_t absolute = std::bit_cast<uint32_t>(x) & 0x7FFFFFFF;
  const uint32_t limit = std::bit_cast<uint32_t>(kFp8Max);
  const uint32_t bits = absolute < limit ? absolute : limit;
  const uint32_t normal = (bits + 0x7FFFF + ((bits >> 20) & 1) - (120u << 23)) >> 20;
  // Below 2^-6 the spacing is 2^-9, the spacing of floats at 2^14: the addition rounds.
  const uint32_t denormal = std::bit_cast<uint32_t>(std::bit_cast<float>(bits) + 0x1p14f) & 0xF;
  return static_cast<uint8_t>(sign | select(bits < std::bit_cast<uint32_t>(0x1p-6f), denormal, normal));
}

// The smallest power of two >= a positive normal scale.
SCO_INLINE float round_up_to_power_of_two(float scale) {
  const uint32_t bits = std::bit_cast<uint32_t>(scale);
  return std::bit_cast<float>((bits + 0x7FFFFF) & 0x7F800000);
}

// Scale of an FP8 tile of n values; 0 when the tile holds NaN or inf, or its scale would be inf.
SCO_INLINE float fp8_tile_scale(const float* x, int64_t n, float absmax, bool ue8m0) {
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
SCO_INLINE float encode_fp8_tile(const float* x, int64_t n, float absmax, bool ue8m0, uint8_t* out) {
  const float scale = fp8_tile_scale(x, n, absmax, ue8m0);
  if (scale == 0.0f) {
    for (int64_t i = 0; i < n; ++i) out[i] = kFp8Nan;
    return 1.0f;
  }
  for (int64_t i = 0; i < n; ++i) out[i] = float_to_e4m3(x[i] / scale);
  return scale;
}

// Cosines and sines of a row; nullptr when its position is outside the table.
SCO_INLINE const float* cos_sin_row(const RopeTable& table, int64_t row) {
  const int64_t position = table.positions[row];
  return position >= 0 && position < table.max_positions ? table.cos_sin + position * table.dim : nullptr;
}

// The RoPE of the package: the first `dim` values rotated in place; cos_sin nullptr (a position outside the table)
// gives NaN. Interleaved pairs are (2i, 2i + 1), the others (i, i + dim / 2).
SCO_INLINE void rope_in_place(float* x, const float* cos_sin, int64_t dim, bool interleaved) {
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

using Float4 = float __attribute__((vector_size(16)));

// Walsh-Hadamard transform of 128 values in Sylvester order, strides 1 to 64, then 128^-0.5.
SCO_INLINE void hadamard_in_place(float* x) {
  constexpr int64_t kVectors = kIndexDim / 4;
  Float4 v[kVectors];
  std::memcpy(v, x, sizeof(v));
  for (int64_t i = 0; i < kVectors; ++i) {  // strides 1 and 2: a + b in the places of a, a - b in those of b
    Float4 a = __builtin_shufflevector(v[i], v[i], 0, 0, 2, 2);
    Float4 b = __builtin_shufflevector(v[i], v[i], 1, 1, 3, 3);
    v[i] = __builtin_shufflevector(a + b, a - b, 0, 5, 2, 7);
    a = __builtin_shufflevector(v[i], v[i], 0, 1, 0, 1);
    b = __builtin_shufflevector(v[i], v[i], 2, 3, 2, 3);
    v[i] = __builtin_shufflevector(a + b, a - b, 0, 1, 6, 7);
  }
  for (int64_t stride = 1; stride < kVectors; stride *= 2)
    for (int64_t start = 0; start < kVectors; start += 2 * stride)
      for (int64_t i = start; i < start + stride; ++i) {
        const Float4 a = v[i], b = v[i + stride];
        v[i] = a + b;
        v[i + stride] = a - b;
      }
  for (int64_t i = 0; i < kVectors; ++i) v[i] *= kHadamardScale;
  std::memcpy(x, v, sizeof(v));
}

}  // namespace sparse_cp_ops
