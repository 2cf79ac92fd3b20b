// Portable sparse MLA: sizes and shared memory of a block, and what brings queries and records into it.
#pragma once

#include "../device/cp_async.cuh"
#include "../device/mma_sync.cuh"
#include "kernels.h"
#include "mla_record.cuh"
#include "row_keys.cuh"

namespace sparse_cp_ops {
namespace portable {

inline constexpr int kWarps = 8, kThreads = kWarps * 32;
inline constexpr int kTilePadding = 8,
                     kTilePitch =
                         kQkDim + kTilePadding;  // elements; 73 * 16 bytes: ldmatrix rows fall into different banks
inline constexpr int kOutPitch = kLatentDim + 8;
inline constexpr int kPiecesPerRecord = kMlaRecordBytes / 16;
inline constexpr int kUnused = -128;
inline constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

// kHeads x kKeys scores of a step. The warps form a grid: kSplits groups divide the dimensions, and each group covers
// the scores with warp tiles of kWarpHeads x kWarpKeys.
template <int kHeads_, int kKeys_>
struct Tile {
  static constexpr int kHeads = kHeads_, kKeys = kKeys_;
  static constexpr int kWarpHeads = kHeads < 32 ? kHeads : 32;
  static constexpr int kWarpKeys = kKeys / 2;
  static constexpr int kHeadWarps = kHeads / kWarpHeads, kKeyWarps = kKeys / kWarpKeys;
  static constexpr int kSplits = kWarps / (kHeadWarps * kKeyWarps);
  static constexpr int kTilesPerSplit = kLatentTiles / kSplits;
  static constexpr int kRopePerSplit = kRopeDim / kSplits;
  static constexpr int kScorePitch = kKeys + 4;  // floats
  static constexpr int kThreadsPerHead = kThreads / kHeads;
  static constexpr int kKeysPerThread = kKeys / kThreadsPerHead;
  static_assert(kTilesPerSplit >= 1 && kRopePerSplit % 16 == 0 && kWarpKeys % 16 == 0);
  static_assert(kThreadsPerHead <= 32 && kKeysPerThread % 2 == 0 && kSplits >= kLatentTiles / 2);

  struct Shared {
    alignas(16) uint16_t q[kHeads * kTilePitch - kTilePadding];    // latent part f16, RoPE part bf16
    alignas(16) uint16_t tile[kKeys * kTilePitch - kTilePadding];  // of keys, likewise; at the end the bf16 results
    alignas(16) uint8_t raw[kKeys * kMlaRecordBytes];
    alignas(16) float scores[kSplits * kHeads *
                             kScorePitch];  // later the weights: tile t of a head in the row of part t / 2
    int64_t offsets[2][kKeys];              // of the records, -1 for an unused entry
    alignas(16) float score_factor[kLatentTiles][kKeys];  // applied to the sum of a warp behind each scale tile
    alignas(16) int8_t exponent[kKeys];                   // of the records, kUnused for an unused entry
    float query_factor[kHeads];
    float rescale[kHeads];
  };
  static_assert(kHeads * kOutPitch <= kKeys * kTilePitch - kTilePadding);
};

// One warp a head; a lane holds up to three pieces of 8 values.
template <class T>
__device__ void load_queries(const SparseMlaParams& p, int64_t row, int64_t head0, typename T::Shared& s) {
  constexpr int kPieces = kQkDim / 8, kLatentPieces = kLatentDim / 8, kPerLane = (kPieces + 31) / 32;
  const bool vectors =
      reinterpret_cast<uintptr_t>(p.q) % 16 == 0 && p.q_row_stride % 8 == 0 && p.q_head_stride % 8 == 0;
  const int lane = threadIdx.x % 32;
  for (int head = threadIdx.x / 32; head < T::kHeads; head += kWarps) {
    const auto* q = static_cast<const uint16_t*>(p.q) + row * p.q_row_stride + (head0 + head) * p.q_head_stride;
    uint4 pieces[kPerLane] = {};
    float peak = 0.0f;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int piece = i * 32 + lane;
      if (piece >= kPieces || head0 + head >= p.heads) continue;
      if (vectors) {
        pieces[i] = *reinterpret_cast<const uint4*>(q + piece * 8);
      } else {
        auto* values = reinterpret_cast<uint16_t*>(&pieces[i]);
#pragma unroll
        for (int j = 0; j < 8; ++j) values[j] = q[piece * 8 + j];
      }
      if (piece >= kLatentPieces) continue;
      peak = query_peak(pieces[i], peak);
    }
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, lanes));
    const int exponent = query_exponent(peak);
    const float factor = power_of_two(-exponent);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int piece = i * 32 + lane;
      if (piece >= kPieces) continue;
      uint32_t pairs[4] = {pieces[i].x, pieces[i].y, pieces[i].z, pieces[i].w};
#pragma unroll
      for (uint32_t& pair : pairs) pair = scaled_query(pair, piece < kLatentPieces, factor);
      *reinterpret_cast<uint4*>(&s.q[head * kTilePitch + piece * 8]) =
          make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    }
    if (lane == 0) s.query_factor[head] = power_of_two(exponent) * (p.softmax_scale * kLog2e);
  }
}

// Entry `entry` of the list, by the thread that finds its record one step later; behind the end -1.
template <class T>
__device__ __forceinline__ int32_t load_entry(const RowKeys& keys, int64_t entry, int64_t end) {
  return threadIdx.x < T::kKeys && entry < end ? keys.list[entry] : -1;
}

// Record offsets of one step, by the first kKeys threads.
template <class T>
__device__ __forceinline__ void find_records(const SparseMlaParams& p, const RowKeys& keys, int32_t index,
                                             int64_t (&offsets)[T::kKeys]) {
  if (threadIdx.x < T::kKeys) offsets[threadIdx.x] = mla_record_offset(p, index, keys.kv_len, keys.table);
}

// One warp a record: 32 pieces of 16 bytes, then the other 9.
template <class T>
__device__ __forceinline__ void start_gather(const SparseMlaParams& p, const int64_t (&offsets)[T::kKeys],
                                             uint32_t raw) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int i = 0; i < T::kKeys / kWarps; ++i) {
    const int key = i * kWarps + warp;
    const int64_t offset = offsets[key];
    const bool used = offset >= 0;
    const uint8_t* source = p.kv_cache + (used ? offset : 0) + lane * 16;
    const uint32_t target = raw + key * static_cast<uint32_t>(kMlaRecordBytes) + lane * 16;
    cp_async_16(target, source, used);
    if (lane < kPiecesPerRecord - 32) cp_async_16(target + 512, source + 512, used);
  }
  cp_async_commit();
}

// Factor of the record's values of one scale tile: four keys' side by side in the padding of a row of scores.
template <class T>
__device__ __forceinline__ float* value_factors(typename T::Shared& s, int tile, int key) {
  static_assert(T::kScorePitch == T::kKeys + 4 && T::kSplits * T::kHeads >= kLatentTiles * T::kKeys / 4);
  return s.scores + (tile * T::kKeys + key) / 4 * T::kScorePitch + T::kKeys + key % 4;
}

// One warp a record; before that, one lane a (record, scale tile) of the warp's records. Returns whether a value factor
// of these lanes is not 1, that is, a scale no power of two.
template <class T>
__device__ __forceinline__ bool convert_records(typename T::Shared& s, const int64_t (&offsets)[T::kKeys]) {
  constexpr int kRecords = T::kKeys / kWarps;  // of a warp, consecutive
  const int lane = threadIdx.x % 32, key0 = threadIdx.x / 32 * kRecords;
  uint32_t multiplier;
  bool scaled;
  {
    const int key = key0 + lane / 4 % kRecords, tile = lane % 4;
    const bool used = offsets[key] >= 0;
    const float scale = *reinterpret_cast<const float*>(s.raw + key * kMlaRecordBytes + kMlaScaleOffset + tile * 4);
    const SplitScale split = split_scale(used ? scale : 1.0f);
    int exponent = max(split.exponent, __shfl_xor_sync(~0u, split.exponent, 1));
    exponent = record_exponent(max(exponent, __shfl_xor_sync(~0u, exponent, 2)));
    multiplier = latent_multiplier(split.exponent - exponent);
    // A warp that goes on to the next scale tile turns its sum into that tile's unit; behind its last tile into 1,
    // which is the RoPE part's unit.
    const float next = __shfl_down_sync(~0u, split.rest, 1);
    const bool last_of_split = (tile + 1) % T::kTilesPerSplit == 0;
    s.score_factor[tile][key] = last_of_split ? split.rest * power_of_two(exponent) : split.rest / next;
    *value_factors<T>(s, tile, key) = split.rest;
    scaled = split.rest != 1.0f;
    s.exponent[key] = used ? exponent : kUnused;
    __syncwarp();
  }
#pragma unroll
  for (int first = 0; first < kRecords; first += 4) {
    uint2 bytes[4][2];  // loads of four records before the first store: the compiler must not assume that they differ
#pragma unroll
    for (int i = 0; i < 8; ++i)
      bytes[i / 2][i % 2] =
          *reinterpret_cast<const uint2*>(s.raw + (key0 + first + i / 2) * kMlaRecordBytes + i % 2 * 256 + lane * 8);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int key = first + i / 2, half = i % 2;  // 256 values each
      const uint2 x = bytes[i / 2][half];
      const uint32_t m = __shfl_sync(~0u, multiplier, key * 4 + half * 2 + lane / 16);
      *reinterpret_cast<uint4*>(s.tile + (key0 + key) * kTilePitch + half * 256 + lane * 8) =
          make_uint4(e4m3x2_to_f16x2(x.x, false, m), e4m3x2_to_f16x2(x.x, true, m), e4m3x2_to_f16x2(x.y, false, m),
                     e4m3x2_to_f16x2(x.y, true, m));
      if constexpr (!kHardwareE4m3)
        if ((e4m3_nan_bits(x.x) | e4m3_nan_bits(x.y)) & kNanBits)
          s.score_factor[half * 2 + lane / 16][key0 + key] = NAN;
    }
  }
#pragma unroll
  for (int i = 0; i < kRecords / 4; ++i) {
    const int key = key0 + i * 4 + lane / 8, piece = lane % 8;
    *reinterpret_cast<uint4*>(s.tile + key * kTilePitch + kLatentDim + piece * 8) =
        *reinterpret_cast<const uint4*>(s.raw + key * kMlaRecordBytes + kMlaRopeOffset + piece * 16);
  }
  return scaled;
}

}  // namespace portable
}  // namespace sparse_cp_ops
