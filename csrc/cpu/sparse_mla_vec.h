// Vector primitives of sparse_mla_row.h for one instruction set level. Included once a level, inside the namespace of
// that level, with SCO_SPARSE_MLA_LEVEL set to kGeneric 0, kAvx2 1, kAvx512 2 or kAvx512Bf16 3: no include guard.
//
// F is a vector of kWidth floats. Unit is what the QK product steps over: one fp32 value of a key, or, where the CPU
// multiplies bf16 pairs, two bf16 values. A tile is the 128 values that share a scale; the unpack functions give
// e4m3 / kValueUnit, exact, NaN for NaN, and leave the scale to the caller.

#if SCO_SPARSE_MLA_LEVEL >= 2
inline constexpr int64_t kWidth = 16;
inline constexpr int64_t kSumHeads = 8;  // PV keeps 8 heads x 2 vectors in registers
#elif SCO_SPARSE_MLA_LEVEL == 1
inline constexpr int64_t kWidth = 8;
inline constexpr int64_t kSumHeads = 4;  // of 16 registers
#else
inline constexpr int64_t kWidth = 4;
inline constexpr int64_t kSumHeads = 4;
#endif
inline constexpr int64_t kLogitSums = 2 * kSumHeads;  // QK keeps as many vectors
inline constexpr int64_t kPanel = 2 * kWidth;         // values of a key that PV keeps in registers

typedef float F __attribute__((vector_size(kWidth * 4)));
typedef int32_t I __attribute__((vector_size(kWidth * 4)));
typedef float UnalignedF __attribute__((vector_size(kWidth * 4), aligned(4), may_alias));

SCO_INLINE F load(const float* p) { return *reinterpret_cast<const UnalignedF*>(p); }
SCO_INLINE void store(float* p, F x) { *reinterpret_cast<UnalignedF*>(p) = x; }
SCO_INLINE F splat(float x) { return x - F{}; }
SCO_INLINE F larger(F x, F peak) { return x > peak ? x : peak; }  // a NaN in x is passed over

SCO_INLINE F fma(F a, F b, F c) {
#if SCO_SPARSE_MLA_LEVEL >= 2
  return _mm512_fmadd_ps(a, b, c);
#elif SCO_SPARSE_MLA_LEVEL == 1
  return _mm256_fmadd_ps(a, b, c);
#else
  return a * b + c;
#endif
}

// 2^x for x <= 0, 0 below -126, NaN for NaN. x = n + r, |r| <= 1/2: 2^n by exponent bits, 2^r by a polynomial of degree
// 5 fitted for the smallest relative error with 2^0 = 1 exact: 9.2e-8, with its fp32 roundings below 1.7e-7.
SCO_INLINE F exp2_nonpositive(F x) {
  const F magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer in the low mantissa bits
  const F shifted = x + magic;
  const F r = x - (shifted - magic);
  F y = splat(0.001326472614891827f);
  y = fma(y, r, splat(0.009671512991189957f));
  y = fma(y, r, splat(0.05550733581185341f));
  y = fma(y, r, splat(0.24022242426872253f));
  y = fma(y, r, splat(0.6931470036506653f));
  y = fma(y, r, splat(1.0f));
  const I exponent = ((I)shifted - (0x4B400000 - 127)) << 23;
  return x < -126.0f ? F{} : y * (F)exponent;
}

#if SCO_SPARSE_MLA_LEVEL == 3

using Unit = uint32_t;  // two bf16 values
inline constexpr int64_t kUnitValues = 2;
inline constexpr float kValueUnit = 1.0f;

SCO_INLINE F dot(Unit key, F query, F sum) {
  return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(key), (__m512bh)query);
}

// The unpack instructions work inside 128-bit lanes. The bytes are permuted first so that the fp32 values, unpacked
// twice, come out in order; the bf16 pairs, unpacked once, then lie in this order in each group of 64 values.
constexpr int64_t pair_at(int64_t place) {
  return place / 16 * 16 + place % 4 / 2 * 8 + place % 16 / 4 * 2 + place % 2;
}

SCO_INLINE bool unpack_tile(const uint8_t* source, float* panels, int64_t panel_stride, Unit* pairs) {
  const __m512i position = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m512i high0 = _mm512_load_si512(kMagnitudes.high), high1 = _mm512_load_si512(kMagnitudes.high + 64);
  const __m512i low0 = _mm512_load_si512(kMagnitudes.low), low1 = _mm512_load_si512(kMagnitudes.low + 64);
  const __m512i sign = _mm512_set1_epi8(-128), zero = _mm512_setzero_si512();
#pragma GCC unroll 2
  for (int64_t d = 0; d < kScaleTile; d += 64) {
    const __m512i bytes = _mm512_permutexvar_epi32(position, _mm512_loadu_si512(source + d));
    const __m512i magnitude = _mm512_permutex2var_epi8(high0, bytes, high1);
    const __m512i high = _mm512_ternarylogic_epi32(magnitude, bytes, sign, 0xF8);  // magnitude | (bytes & sign)
    const __m512i low = _mm512_permutex2var_epi8(low0, bytes, low1);
    const __m512i pairs0 = _mm512_unpacklo_epi8(low, high), pairs1 = _mm512_unpackhi_epi8(low, high);
    _mm512_storeu_si512(pairs + d / 2, pairs0);
    _mm512_storeu_si512(pairs + d / 2 + 16, pairs1);
    float* panel = panels + d / kPanel * panel_stride;
    _mm512_storeu_si512(panel, _mm512_unpacklo_epi16(zero, pairs0));
    _mm512_storeu_si512(panel + 16, _mm512_unpackhi_epi16(zero, pairs0));
    _mm512_storeu_si512(panel + panel_stride, _mm512_unpacklo_epi16(zero, pairs1));
    _mm512_storeu_si512(panel + panel_stride + 16, _mm512_unpackhi_epi16(zero, pairs1));
  }
  return false;
}

#else

using Unit = float;
inline constexpr int64_t kUnitValues = 1;

SCO_INLINE F dot(Unit key, F query, F sum) { return fma(splat(key), query, sum); }

#endif

#if SCO_SPARSE_MLA_LEVEL == 2

inline constexpr float kValueUnit = 256.0f;  // e4m3 shifted into fp16 is 2^-8 of its value; the conversion is exact

SCO_INLINE bool unpack_tile(const uint8_t* source, float* panels, int64_t panel_stride, Unit*) {
  const __m256i magnitude = _mm256_set1_epi8(0x7F);
  __mmask32 nan = 0;
#pragma GCC unroll 4
  for (int64_t d = 0; d < kScaleTile; d += 32) {
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source + d));
    nan |= _mm256_cmpeq_epi8_mask(_mm256_and_si256(bytes, magnitude), magnitude);
    const __m512i wide = _mm512_cvtepi8_epi16(bytes);  // the sign fills the high byte
    const __m512i half = _mm512_and_si512(_mm512_slli_epi16(wide, 7), _mm512_set1_epi16(0x3F80));
    // half | (wide & sign)
    const __m512i fp16 = _mm512_ternarylogic_epi32(half, wide, _mm512_set1_epi16(-32768), 0xF8);
    float* panel = panels + d / kPanel * panel_stride;
    _mm512_storeu_ps(panel, _mm512_cvtph_ps(_mm512_castsi512_si256(fp16)));
    _mm512_storeu_ps(panel + 16, _mm512_cvtph_ps(_mm512_extracti64x4_epi64(fp16, 1)));
  }
  return nan != 0;
}

#elif SCO_SPARSE_MLA_LEVEL == 1

inline constexpr float kValueUnit = 256.0f;  // e4m3 shifted into fp16 is 2^-8 of its value; the conversion is exact

SCO_INLINE bool unpack_tile(const uint8_t* source, float* panels, int64_t panel_stride, Unit*) {
  const __m256i exponent_and_mantissa = _mm256_set1_epi16(0x3F80), sign = _mm256_set1_epi16(-32768);
  __m256i nan = _mm256_setzero_si256();
#pragma GCC unroll 8
  for (int64_t d = 0; d < kScaleTile; d += 16) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + d));
    const __m256i wide = _mm256_cvtepi8_epi16(bytes);  // the sign fills the high byte
    const __m256i half = _mm256_and_si256(_mm256_slli_epi16(wide, 7), exponent_and_mantissa);
    nan = _mm256_or_si256(nan, _mm256_cmpeq_epi16(half, exponent_and_mantissa));
    const __m256i fp16 = _mm256_or_si256(half, _mm256_and_si256(wide, sign));
    float* panel = panels + d / kPanel * panel_stride;
    _mm256_storeu_ps(panel, _mm256_cvtph_ps(_mm256_castsi256_si128(fp16)));
    _mm256_storeu_ps(panel + 8, _mm256_cvtph_ps(_mm256_extracti128_si256(fp16, 1)));
  }
  return !_mm256_testz_si256(nan, nan);
}

#elif SCO_SPARSE_MLA_LEVEL == 0

inline constexpr float kValueUnit = 1.0f;

inline std::array<float, 256> make_value_table() {
  std::array<float, 256> values;
  for (int i = 0; i < 256; ++i) values[i] = e4m3_to_float(static_cast<uint8_t>(i));
  return values;
}
inline const std::array<float, 256> kValues = make_value_table();

SCO_INLINE bool unpack_tile(const uint8_t* source, float* panels, int64_t panel_stride, Unit*) {
  for (int64_t d = 0; d < kScaleTile; ++d) panels[d / kPanel * panel_stride + d % kPanel] = kValues[source[d]];
  return false;
}

#endif
