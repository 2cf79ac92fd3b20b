// The scoring kernels and candidate lists of all instruction levels, compiled from one source.
#include "indexer_scoring.h"

#include <bit>
#include <cstring>

#include "e4m3_tables.h"
#include "numeric.h"

#if SCO_HAS_X86_LEVELS
#include <immintrin.h>
#endif

namespace sparse_cp_ops {
namespace {

template <int64_t kLanes>
struct Vectors {
  typedef float Floats __attribute__((vector_size(4 * kLanes)));
  typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
  typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
};

// store_where() of the levels that cannot compress a vector.
template <int64_t kLanes, class IntVec>
SCO_INLINE int64_t store_lanes_where(const IntVec& keep, const IntVec& orders, const IntVec& positions,
                                     int32_t* to_orders, int32_t* to_positions) {
  int64_t n = 0;
  for (int64_t i = 0; i < kLanes; ++i) {
    to_orders[n] = orders[i];
    to_positions[n] = positions[i];
    n -= keep[i];
  }
  return n;
}

namespace generic {

constexpr int64_t kLanes = 4;
constexpr int kHeadBlock = 4;
using FloatVec = Vectors<kLanes>::Floats;
using IntVec = Vectors<kLanes>::Ints;
using WordVec = Vectors<kLanes>::Words;

inline FloatVec multiply_add(FloatVec sum, WordVec q, WordVec k) { return sum + (FloatVec)q * (FloatVec)k; }
inline int64_t store_where(IntVec keep, IntVec orders, IntVec positions, int32_t* to_orders, int32_t* to_positions) {
  return store_lanes_where<kLanes>(keep, orders, positions, to_orders, to_positions);
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
using FloatVec = Vectors<kLanes>::Floats;
using IntVec = Vectors<kLanes>::Ints;
using WordVec = Vectors<kLanes>::Words;

// The product is exact, so a fused sum rounds like a separate one.
inline FloatVec multiply_add(FloatVec sum, WordVec q, WordVec k) { return _mm256_fmadd_ps((__m256)q, (__m256)k, sum); }
inline int64_t store_where(IntVec keep, IntVec orders, IntVec positions, int32_t* to_orders, int32_t* to_positions) {
  return store_lanes_where<kLanes>(keep, orders, positions, to_orders, to_positions);
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
using FloatVec = Vectors<kLanes>::Floats;
using IntVec = Vectors<kLanes>::Ints;
using WordVec = Vectors<kLanes>::Words;

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
using FloatVec = Vectors<kLanes>::Floats;
using IntVec = Vectors<kLanes>::Ints;
using WordVec = Vectors<kLanes>::Words;

inline FloatVec multiply_add(FloatVec sum, WordVec q, WordVec k) {
  return _mm512_dpbf16_ps(sum, (__m512bh)q, (__m512bh)k);
}
using avx512::store_where;

inline uint32_t bf16_bits(uint8_t e4m3) { return std::bit_cast<uint32_t>(e4m3_to_float(e4m3)) >> 16; }
inline uint32_t query_word(const uint8_t* q8, int64_t step) {
  return bf16_bits(q8[2 * step]) | bf16_bits(q8[2 * step + 1]) << 16;
}

// The bytes of words 0 and 1 of each lane, from its four low bytes (index 0..63) and its four high ones (64..127).
struct WordOrder {
  alignas(64) uint8_t bytes[2][64];
};
constexpr WordOrder make_word_order() {
  WordOrder order{};
  for (int word = 0; word < 2; ++word)
    for (int i = 0; i < 64; ++i) order.bytes[word][i] = i / 4 * 4 + word * 2 + i % 4 / 2 + i % 2 * 64;
  return order;
}
constexpr WordOrder kWordOrder = make_word_order();

inline void decode(WordVec bytes, uint32_t* words) {
  const auto lookup = [&](const uint8_t* table) {  // ignores the sign bit of a byte
    return _mm512_permutex2var_epi8(_mm512_load_si512(table), (__m512i)bytes, _mm512_load_si512(table + 64));
  };
  const __m512i low = lookup(kMagnitudes.low);
  const __m512i high = _mm512_or_si512(lookup(kMagnitudes.high), (__m512i)(bytes & 0x80808080u));
  for (int word = 0; word < 2; ++word)
    _mm512_storeu_si512(words + word * kKeyTile,
                        _mm512_permutex2var_epi8(low, _mm512_load_si512(kWordOrder.bytes[word]), high));
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
