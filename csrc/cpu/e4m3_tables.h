// e4m3 -> bf16 by two byte tables over the magnitude, for vpermi2b; the sign bit is copied.
#pragma once

#include <cstdint>

namespace sparse_cp_ops {

struct MagnitudeTables {
  alignas(64) uint8_t high[128];
  alignas(64) uint8_t low[128];
};

constexpr MagnitudeTables make_magnitude_tables() {
  MagnitudeTables tables{};
  for (int i = 0; i < 128; ++i) {
    const int mantissa = i & 7, exponent = i >> 3;
    int bits = 0;
    if (i == 127) {
      bits = 0x7FC0;
    } else if (exponent > 0) {
      bits = (exponent - 7 + 127) << 7 | mantissa << 4;
    } else if (mantissa > 0) {  // subnormal: mantissa * 2^-9
      const int top = mantissa >= 4 ? 2 : mantissa >= 2 ? 1 : 0;
      bits = (top - 9 + 127) << 7 | (mantissa << (7 - top) & 0x7F);
    }
    tables.high[i] = static_cast<uint8_t>(bits >> 8);
    tables.low[i] = static_cast<uint8_t>(bits & 0xFF);
  }
  return tables;
}
inline constexpr MagnitudeTables kMagnitudes = make_magnitude_tables();

}  // namespace sparse_cp_ops
