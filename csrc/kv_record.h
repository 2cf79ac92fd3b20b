// Byte layouts of the two FP8 paged caches. The one place in C++ that knows them (docs/kv_record.md draws them).
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define SCO_HOST_DEVICE __host__ __device__
#else
#define SCO_HOST_DEVICE
#endif

namespace sparse_cp_ops {

// MLA record: 512 x e4m3fn | 4 x fp32 scale, one per 128 values | 64 x bf16 RoPE part.
inline constexpr int64_t kLatentDim = 512;
inline constexpr int64_t kRopeDim = 64;
inline constexpr int64_t kQkDim = kLatentDim + kRopeDim;
inline constexpr int64_t kScaleTile = 128;
inline constexpr int64_t kLatentTiles = kLatentDim / kScaleTile;
inline constexpr int64_t kMlaScaleOffset = kLatentDim;
inline constexpr int64_t kMlaRopeOffset = kLatentDim + kLatentTiles * 4;
inline constexpr int64_t kMlaRecordBytes = kMlaRopeOffset + kRopeDim * 2;
inline constexpr int64_t kMlaRecordAlignment = 16;  // 656 = 41 * 16: rows are moved in 16-byte pieces

// Indexer record: 128 x e4m3fn | fp32 scale. In a page the values of all tokens come first, then all scales.
inline constexpr int64_t kIndexDim = 128;
inline constexpr int64_t kIndexRecordBytes = kIndexDim + 4;
inline constexpr int64_t kIndexRecordAlignment = 4;

inline constexpr float kFp8Max = 448.0f;
inline constexpr float kAmaxFloor = 1e-4f;
inline constexpr float kHadamardScale = 0.08838834764831845f;  // 128^-0.5

static_assert(kMlaRecordBytes == 656 && kIndexRecordBytes == 132);

// Where the values and the scale of one token of an indexer page start.
SCO_HOST_DEVICE constexpr int64_t index_values_offset(int64_t offset_in_page) { return offset_in_page * kIndexDim; }
SCO_HOST_DEVICE constexpr int64_t index_scale_offset(int64_t page_size, int64_t offset_in_page) {
  return page_size * kIndexDim + offset_in_page * 4;
}

constexpr bool is_supported_page_size(int64_t n) { return n == 16 || n == 32 || n == 64 || n == 128; }

// page_size = 1 << page_shift_of(page_size)
constexpr int page_shift_of(int64_t page_size) {
  return page_size == 16 ? 4 : page_size == 32 ? 5 : page_size == 64 ? 6 : 7;
}

}  // namespace sparse_cp_ops
