// The scoring kernels of all instruction levels, compiled from one source.
#include "indexer_scoring.h"

#include <array>
#include <bit>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace sparse_cp_ops {
namespace {

constexpr std::array<uint32_t, 256> make_float_of_e4m3() {
  std::array<uint32_t, 256> table{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    const uint32_t exponent = byte >> 3 & 15, mantissa = byte & 7;
    const float subnormal = static_cast<float>(mantissa) * 0x1p-9f;
    uint32_t bits = (exponent + 120) << 23 | mantissa << 20;
    if (exponent == 0) bits = std::bit_cast<uint32_t>(subnormal);
    if ((byte & 0x7F) == 0x7F) bits = 0x7FC00000u;
    table[byte] = bits | (byte & 0x80) << 24;
  }
  return table;
}
constexpr std::array<uint32_t, 256> kFloatOfE4m3 = make_float_of_e4m3();

namespace generic {
constexpr int64_t kLanes = 4;
constexpr int kHeadBlock = 4;
typedef float FloatVec __attribute__((vector_size(4 * kLanes)));
typedef uint32_t WordVec __attribute__((vector_size(4 * kLanes)));
typedef int32_t IntVec __attribute__((vector_size(4 * kLanes)));
inline FloatVec multiply_add(FloatVec sum, WordVec q, WordVec k) { return sum + (FloatVec)q * (FloatVec)k; }
inline int64_t store_where(IntVec keep, IntVec orders, IntVec positions, int32_t* to_orders, int32_t* to_positions) {
  int64_t n = 0;
  for (int i = 0; i < kLanes; ++i) {
    to_orders[n] = orders[i];
    to_positions[n] = positions[i];
    n -= keep[i];
  }
  return n;
}
#include "indexer_scoring_fp32.h"
#include "indexer_scoring_kernel.h"
#include "topk_candidates_kernel.h"
constexpr IndexerKernel kKernel{kSteps, decode_query, decode_keys, score_tile, append_candidates, keep_best};
}  // namespace generic

#if SCO_HAS_X86_LEVELS

SCO_BEGIN_AVX2
namespace avx2 {
constexpr int64_t kLanes = 8;
constexpr int kHeadBlock = 4;
typedef float FloatVec __attribute__((vector_size(4 * kLanes)));
typedef uint32_t WordVec __attribute__((vector_size(4 * kLanes)));
typedef int32_t IntVec __attribute__((vector_size(4 * kLanes)));
// The product is exact, so a fused sum rounds like a separate one.
inline FloatVec multiply_add(FloatVec sum, WordVec q, WordVec k) { return _mm256_fmadd_ps((__m256)q, (__m256)k, sum); }
inline int64_t store_where(IntVec keep, IntVec orders, IntVec positions, int32_t* to_orders, int32_t* to_positions) {
  int64_t n = 0;
  for (int i = 0; i < kLanes; ++i) {
    to_orders[n] = orders[i];
    to_positions[n] = positions[i];
    n -= keep[i];
  }
  return n;
}
#include "indexer_scoring_fp32.h"
#include "indexer_scoring_kernel.h"
#include "topk_candidates_kernel.h"
constexpr IndexerKernel kKernel{kSteps, decode_query, decode_keys, score_tile, append_candidates, keep_best};
}  // namespace avx2
SCO_END_TARGET

SCO_BEGIN_AVX512
namespace avx512 {
constexpr int64_t kLanes = 16;
constexpr int kHeadBlock = 8;
typedef float FloatVec __attribute__((vector_size(4 * kLanes)));
typedef uint32_t WordVec __attribute__((vector_size(4 * kLanes)));
typedef int32_t IntVec __attribute__((vector_size(4 * kLanes)));
inline FloatVec multiply_add(FloatVec sum, WordVec q, WordVec k) { return _mm512_fmadd_ps((__m512)q, (__m512)k, sum); }
inline int64_t store_where(IntVec keep, IntVec orders, IntVec positions, int32_t* to_orders, int32_t* to_positions) {
  const __mmask16 mask = _mm512_movepi32_mask((__m512i)keep);
  _mm512_storeu_si512(to_orders, _mm512_maskz_compress_epi32(mask, (__m512i)orders));
  _mm512_storeu_si512(to_positions, _mm512_maskz_compress_epi32(mask, (__m512i)positions));
  return __builtin_popcount(mask);
}
#include "indexer_scoring_fp32.h"
#include "indexer_scoring_kernel.h"
#include "topk_candidates_kernel.h"
constexpr IndexerKernel kKernel{kSteps, decode_query, decode_keys, score_tile, append_candidates, keep_best};
}  // namespace avx512
SCO_END_TARGET

SCO_BEGIN_AVX512_BF16
namespace avx512_bf16 {
constexpr int64_t kLanes = 16;
constexpr int64_t kSteps = kIndexDim / 2;
constexpr int kHeadBlock = 8;
typedef float FloatVec __attribute__((vector_size(4 * kLanes)));
typedef uint32_t WordVec __attribute__((vector_size(4 * kLanes)));
typedef int32_t IntVec __attribute__((vector_size(4 * kLanes)));

inline FloatVec multiply_add(FloatVec sum, WordVec q, WordVec k) {
  return _mm512_dpbf16_ps(sum, (__m512bh)q, (__m512bh)k);
}

inline uint32_t query_word(const uint8_t* q8, int64_t step) {
  return kFloatOfE4m3[q8[2 * step]] >> 16 | (kFloatOfE4m3[q8[2 * step + 1]] & 0xFFFF0000u);
}

// Byte tables for vpermi2b: the two bytes of the bf16 of a magnitude, and the order of bytes in the words of a lane.
struct DecodeTables {
  alignas(64) uint8_t low[128], high[128], order[2][64];
};
constexpr DecodeTables make_decode_tables() {
  DecodeTables tables{};
  for (int byte = 0; byte < 128; ++byte) {
    tables.low[byte] = kFloatOfE4m3[byte] >> 16 & 0xFF;
    tables.high[byte] = kFloatOfE4m3[byte] >> 24;
  }
  for (int word = 0; word < 2; ++word)
    for (int byte = 0; byte < 64; ++byte)
      tables.order[word][byte] = byte / 4 * 4 + word * 2 + byte % 4 / 2 + (byte % 2) * 64;
  return tables;
}
constexpr DecodeTables kDecode = make_decode_tables();

inline void decode(WordVec bytes, uint32_t* words) {
  const __m512i index = (__m512i)bytes;  // the permutation ignores the sign bit
  const __m512i low =
      _mm512_permutex2var_epi8(_mm512_load_si512(kDecode.low), index, _mm512_load_si512(kDecode.low + 64));
  const __m512i magnitude =
      _mm512_permutex2var_epi8(_mm512_load_si512(kDecode.high), index, _mm512_load_si512(kDecode.high + 64));
  const __m512i high = _mm512_or_si512(magnitude, _mm512_and_si512(index, _mm512_set1_epi8(-128)));
  for (int word = 0; word < 2; ++word)
    _mm512_storeu_si512(words + word * kKeyTile,
                        _mm512_permutex2var_epi8(low, _mm512_load_si512(kDecode.order[word]), high));
}

inline int64_t store_where(IntVec keep, IntVec orders, IntVec positions, int32_t* to_orders, int32_t* to_positions) {
  const __mmask16 mask = _mm512_movepi32_mask((__m512i)keep);
  _mm512_storeu_si512(to_orders, _mm512_maskz_compress_epi32(mask, (__m512i)orders));
  _mm512_storeu_si512(to_positions, _mm512_maskz_compress_epi32(mask, (__m512i)positions));
  return __builtin_popcount(mask);
}
#include "indexer_scoring_kernel.h"
#include "topk_candidates_kernel.h"
constexpr IndexerKernel kKernel{kSteps, decode_query, decode_keys, score_tile, append_candidates, keep_best};
}  // namespace avx512_bf16
SCO_END_TARGET

#endif

}  // namespace

const IndexerKernel& indexer_kernel(Isa isa) {
#if SCO_HAS_X86_LEVELS
  if (isa == Isa::kAvx512Bf16) return avx512_bf16::kKernel;
  if (isa == Isa::kAvx512) return avx512::kKernel;
  if (isa == Isa::kAvx2) return avx2::kKernel;
#endif
  return generic::kKernel;
}

}  // namespace sparse_cp_ops
