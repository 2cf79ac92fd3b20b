// The bytes of 16 tokens, of which every page size is a multiple, from page to page: 656 vectors of MLA records and 132
// of the indexer page, in three rounds of 9 warps.
#pragma once

#include "../../ops/cache_store.h"

namespace sparse_cp_ops {

inline constexpr int kPieceTokens = 16;
inline constexpr int kMlaVectors = kPieceTokens * kMlaRecordBytes / kPageVectorBytes;
inline constexpr int kIndexerVectors = kPieceTokens * kIndexRecordBytes / kPageVectorBytes;
inline constexpr int kCopyThreads = 288;
inline constexpr int kCopyRounds = 3;
static_assert(kCopyThreads * kCopyRounds >= kMlaVectors + kIndexerVectors);

// log2 of the pieces of a page
inline int piece_shift_of(int64_t page_size) { return page_shift_of(page_size) - page_shift_of(kPieceTokens); }

// Copies piece `index` of a page of each cache, by a block of kCopyThreads; the indexer's source is nullptr if there is
// none.
__device__ __forceinline__ void copy_piece(const uint8_t* mla_from, const uint8_t* indexer_from, uint8_t* mla_to,
                                           uint8_t* indexer_to, int index) {
  const int vectors = indexer_from != nullptr ? kMlaVectors + kIndexerVectors : kMlaVectors;
  const auto* mla_source = reinterpret_cast<const int4*>(mla_from) + index * kMlaVectors;
  const auto* indexer_source = reinterpret_cast<const int4*>(indexer_from) + index * kIndexerVectors;
  auto* mla_target = reinterpret_cast<int4*>(mla_to) + index * kMlaVectors;
  auto* indexer_target = reinterpret_cast<int4*>(indexer_to) + index * kIndexerVectors;
  int4 values[kCopyRounds];
#pragma unroll
  for (int round = 0; round < kCopyRounds; ++round) {
    const int i = threadIdx.x + round * kCopyThreads;
    if (i < vectors) values[round] = __ldcs(i < kMlaVectors ? mla_source + i : indexer_source + (i - kMlaVectors));
  }
#pragma unroll
  for (int round = 0; round < kCopyRounds; ++round) {
    const int i = threadIdx.x + round * kCopyThreads;
    if (i < vectors) __stcs(i < kMlaVectors ? mla_target + i : indexer_target + (i - kMlaVectors), values[round]);
  }
}

}  // namespace sparse_cp_ops
