// Portable sparse MLA (sm_80 and newer): one block of 256 threads per row, head group and part of the row's list.
//
// A loop step handles kKeys keys in four phases between barriers:
//   convert  raw records (brought by cp.async during the step before) -> 16-bit tile, a warp per record
//   scores   q . k by mma.sync; the 576 dimensions are divided between warps, each scale tile stays within one warp
//   softmax  sum of the warps' parts, mask, online softmax; weights as f16 over the scores' own memory
//   values   weights . values; warp w owns dimensions [64 w, 64 w + 64) of all heads, accumulators in registers
#pragma once

#include <type_traits>

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
      for (uint32_t pair : {pieces[i].x, pieces[i].y, pieces[i].z, pieces[i].w}) {
        const float2 v = unpack_bf16x2(pair);
        peak = fmaxf(peak, fmaxf(fabsf(v.x), fabsf(v.y)));
      }
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
      for (uint32_t& pair : pairs) {
        const float2 v = unpack_bf16x2(pair);
        pair = piece < kLatentPieces ? pack_f16x2(v.x * factor, v.y * factor) : pack_bf16x2(v.x * factor, v.y * factor);
      }
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

// Head of row 0 to 7 of an mma tile of scores: rows 0 to 3, which are stored together, go to different banks.
__device__ __forceinline__ int head_of_tile_row(int row) { return row % 4 * 2 + row / 4; }

template <class T>
__device__ __forceinline__ void compute_scores(typename T::Shared& s) {
  constexpr int kMs = T::kWarpHeads / 16, kNs = T::kWarpKeys / 8;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int split = warp / (T::kHeadWarps * T::kKeyWarps), place = warp % (T::kHeadWarps * T::kKeyWarps);
  const int head0 = place / T::kKeyWarps * T::kWarpHeads, key0 = place % T::kKeyWarps * T::kWarpKeys;
  // Fragment addresses: A rows are lane % 16, its second 8 dimensions in lanes 16-31; B rows are keys, two sets of 8.
  const int a_head = head0 + lane / 8 % 2 * 8 + head_of_tile_row(lane % 8);
  const uint32_t a0 = shared_address(&s.q[a_head * kTilePitch + lane / 16 * 8]);
  const uint32_t b0 = shared_address(&s.tile[(key0 + lane / 16 * 8 + lane % 8) * kTilePitch + lane / 8 % 2 * 8]);
  float sum[kMs][kNs][4] = {};
  auto step = [&](int d, bool latent) {
    uint32_t a[kMs][4];
#pragma unroll
    for (int m = 0; m < kMs; ++m) ldmatrix_x4(a[m], a0 + (m * 16 * kTilePitch + d) * 2);
#pragma unroll
    for (int n = 0; n < kNs; n += 2) {
      uint32_t b[4];
      ldmatrix_x4(b, b0 + (n * 8 * kTilePitch + d) * 2);
#pragma unroll
      for (int m = 0; m < kMs; ++m) {
        if (latent) {
          mma_m16n8k16_f16(sum[m][n], a[m], b[0], b[1]);
          mma_m16n8k16_f16(sum[m][n + 1], a[m], b[2], b[3]);
        } else {
          mma_m16n8k16_bf16(sum[m][n], a[m], b[0], b[1]);
          mma_m16n8k16_bf16(sum[m][n + 1], a[m], b[2], b[3]);
        }
      }
    }
  };
#pragma unroll
  for (int t = 0; t < T::kTilesPerSplit; ++t) {
    const int tile = split * T::kTilesPerSplit + t;
#pragma unroll
    for (int d = 0; d < kScaleTile; d += 16) step(tile * static_cast<int>(kScaleTile) + d, true);
#pragma unroll
    for (int n = 0; n < kNs; ++n) {
      const float2 f = *reinterpret_cast<const float2*>(&s.score_factor[tile][key0 + n * 8 + lane % 4 * 2]);
#pragma unroll
      for (int m = 0; m < kMs; ++m) {
        sum[m][n][0] *= f.x, sum[m][n][2] *= f.x;
        sum[m][n][1] *= f.y, sum[m][n][3] *= f.y;
      }
    }
  }
#pragma unroll
  for (int d = 0; d < T::kRopePerSplit; d += 16)
    step(static_cast<int>(kLatentDim) + split * T::kRopePerSplit + d, false);

  const int out_head = head0 + head_of_tile_row(lane / 4);
  float* target = s.scores + (split * T::kHeads + out_head) * T::kScorePitch + key0 + lane % 4 * 2;
#pragma unroll
  for (int m = 0; m < kMs; ++m)
#pragma unroll
    for (int n = 0; n < kNs; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        *reinterpret_cast<float2*>(target + (m * 16 + half * 8) * T::kScorePitch + n * 8) =
            make_float2(sum[m][n][2 * half], sum[m][n][2 * half + 1]);
}

// Head whose softmax this thread computes with the kThreadsPerHead - 1 threads beside it. The bits of the place in the
// warp are reversed: heads that are read or written together are then far enough apart to fall into different banks.
template <class T>
__device__ __forceinline__ int softmax_head() {
  constexpr int kHeadsPerWarp = 32 / T::kThreadsPerHead;
  const int place = threadIdx.x % 32 / T::kThreadsPerHead;
  return threadIdx.x / 32 * kHeadsPerWarp + static_cast<int>(__brev(place) / (UINT32_MAX / kHeadsPerWarp + 1u));
}

// Running state of a head.
struct HeadState {
  float peak = -INFINITY;  // of logit + exponent of the record so far, in units of log2
  float total = 0.0f;      // this thread's part of the sum of weights
};

// f16 weights of a head for the values of one scale tile: rows kScorePitch floats apart, two tiles side by side.
// Without value factors those of tile 0 serve all tiles.
template <class T>
__device__ __forceinline__ __half* weights(typename T::Shared& s, int tile, int head) {
  return reinterpret_cast<__half*>(s.scores + (tile / 2 * T::kHeads + head) * T::kScorePitch) + tile % 2 * T::kKeys;
}

// scaled: some value factor of the step is not 1. Returns whether the accumulators of this thread's head have to be
// rescaled.
template <class T>
__device__ __forceinline__ bool update_softmax(typename T::Shared& s, HeadState& state, bool scaled) {
  constexpr int kVector = T::kKeysPerThread < 4 ? 2 : 4, kVectors = T::kKeysPerThread / kVector;
  using Vector = std::conditional_t<kVector == 2, float2, float4>;
  using ByteVector = std::conditional_t<kVector == 2, uint16_t, uint32_t>;
  const int head = softmax_head<T>(), part = threadIdx.x % T::kThreadsPerHead;
  const float query_factor = s.query_factor[head];
  float logits[T::kKeysPerThread], record_factors[T::kKeysPerThread];
  float peak = state.peak;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int key = (v * T::kThreadsPerHead + part) * kVector;
    float sums[kVector] = {};
#pragma unroll
    for (int split = 0; split < T::kSplits; ++split) {
      const auto x = *reinterpret_cast<const Vector*>(s.scores + (split * T::kHeads + head) * T::kScorePitch + key);
#pragma unroll
      for (int j = 0; j < kVector; ++j) sums[j] += reinterpret_cast<const float*>(&x)[j];
    }
    const auto exponents = *reinterpret_cast<const ByteVector*>(s.exponent + key);
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      const int exponent = static_cast<int8_t>(exponents >> (8 * j));
      const bool used = exponent != kUnused;
      const float logit = used ? sums[j] * query_factor + static_cast<float>(exponent) : -INFINITY;
      logits[v * kVector + j] = logit;
      record_factors[v * kVector + j] = used ? power_of_two(-exponent) : 0.0f;
      peak = fmaxf(peak, logit);
    }
  }
#pragma unroll
  for (int lanes = 1; lanes < T::kThreadsPerHead; lanes *= 2) peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, lanes));
  const float shift = peak == -INFINITY ? 0.0f : peak;  // nothing but -inf so far: all weights are 0
  const float rescale = fast_exp2(state.peak - shift);
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < T::kKeysPerThread; ++i) {
    logits[i] = fast_exp2(logits[i] - shift);
    total += logits[i] * record_factors[i];
  }
  __syncwarp();  // all threads of a head sit in one warp and have read its scores
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int key = (v * T::kThreadsPerHead + part) * kVector;
    const auto store_weights = [&](int tile, const Vector& factors) {
      const float* factor = reinterpret_cast<const float*>(&factors);
      uint32_t packed[kVector / 2];
#pragma unroll
      for (int j = 0; j < kVector; j += 2)
        packed[j / 2] = pack_f16x2(logits[v * kVector + j] * factor[j], logits[v * kVector + j + 1] * factor[j + 1]);
      __half* target = weights<T>(s, tile, head) + key;
      if constexpr (kVector == 4) *reinterpret_cast<uint2*>(target) = make_uint2(packed[0], packed[1]);
      else *reinterpret_cast<uint32_t*>(target) = packed[0];
    };
    if (!scaled) {
      if constexpr (kVector == 4) store_weights(0, make_float4(1.0f, 1.0f, 1.0f, 1.0f));
      else store_weights(0, make_float2(1.0f, 1.0f));
    } else {
#pragma unroll
      for (int tile = 0; tile < kLatentTiles; ++tile)
        store_weights(tile, *reinterpret_cast<const Vector*>(value_factors<T>(s, tile, key)));
    }
  }
  state.total = state.total * rescale + total;
  const bool changed = peak != state.peak;
  state.peak = peak;
  if (part == 0) s.rescale[head] = rescale;
  return changed;
}

template <class T>
using Accumulators = float[T::kHeads / 16][8][4];

template <class T>
__device__ __forceinline__ void add_values(typename T::Shared& s, Accumulators<T>& acc, bool rescale, bool scaled) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (rescale)
#pragma unroll
    for (int m = 0; m < T::kHeads / 16; ++m) {
      const float f0 = s.rescale[m * 16 + lane / 4], f1 = s.rescale[m * 16 + lane / 4 + 8];
#pragma unroll
      for (int n = 0; n < 8; ++n) acc[m][n][0] *= f0, acc[m][n][1] *= f0, acc[m][n][2] *= f1, acc[m][n][3] *= f1;
    }
  const uint32_t a0 = shared_address(weights<T>(s, scaled ? warp / 2 : 0, lane % 16)) + lane / 16 * 16;
  const uint32_t b0 = shared_address(&s.tile[lane % 16 * kTilePitch + warp * 64 + lane / 16 * 8]);
#pragma unroll
  for (int k = 0; k < T::kKeys; k += 16) {
    uint32_t a[T::kHeads / 16][4];
#pragma unroll
    for (int m = 0; m < T::kHeads / 16; ++m) ldmatrix_x4(a[m], a0 + m * 16 * T::kScorePitch * 4 + k * 2);
#pragma unroll
    for (int n = 0; n < 8; n += 2) {
      uint32_t b[4];
      ldmatrix_x4_transposed(b, b0 + (k * kTilePitch + n * 8) * 2);
#pragma unroll
      for (int m = 0; m < T::kHeads / 16; ++m) {
        mma_m16n8k16_f16(acc[m][n], a[m], b[0], b[1]);
        mma_m16n8k16_f16(acc[m][n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

template <class T>
__device__ void store_results(const SparseMlaParams& p, const KeySplit& split, int64_t row, int64_t head0, int64_t part,
                              typename T::Shared& s, Accumulators<T>& acc, const HeadState& state) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float total = state.total;
#pragma unroll
  for (int lanes = 1; lanes < T::kThreadsPerHead; lanes *= 2) total += __shfl_xor_sync(~0u, total, lanes);
  const int head = softmax_head<T>();
  const bool whole = split.parts == 1;
  if (threadIdx.x % T::kThreadsPerHead == 0) {
    s.rescale[head] = total == 0.0f ? 0.0f : 1.0f / total;
    float* lse = whole ? p.lse : split.partial_lse + part * p.rows * p.heads;
    if (head0 + head < p.heads)
      lse[row * p.heads + head0 + head] = total == 0.0f ? -INFINITY : state.peak * kLn2 + logf(total);
  }
  __syncthreads();
#pragma unroll
  for (int m = 0; m < T::kHeads / 16; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int h = m * 16 + half * 8 + lane / 4;
      const float f = s.rescale[h];
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const int d = warp * 64 + n * 8 + lane % 4 * 2;
        const float x = acc[m][n][2 * half] * f, y = acc[m][n][2 * half + 1] * f;
        if (whole) {
          *reinterpret_cast<uint32_t*>(&s.tile[h * kOutPitch + d]) = pack_bf16x2(x, y);
        } else if (head0 + h < p.heads) {
          float* target = split.partial_out + (((part * p.rows + row) * p.heads) + head0 + h) * kLatentDim + d;
          *reinterpret_cast<float2*>(target) = make_float2(x, y);
        }
      }
    }
  if (!whole) return;
  __syncthreads();
  auto* out = static_cast<__nv_bfloat16*>(p.out) + (row * p.heads + head0) * kLatentDim;
  const int heads = static_cast<int>(min(static_cast<int64_t>(T::kHeads), p.heads - head0));
  for (int i = threadIdx.x; i < heads * (kLatentDim / 8); i += kThreads) {
    const int h = i / (kLatentDim / 8), d = i % (kLatentDim / 8) * 8;
    *reinterpret_cast<uint4*>(out + h * kLatentDim + d) = *reinterpret_cast<const uint4*>(&s.tile[h * kOutPitch + d]);
  }
}

// Entries of [begin, end) up to the last one that may be used: trailing holes cost nothing.
template <class T>
__device__ int64_t used_end(const RowKeys& keys, const SparseMlaParams& p, int64_t begin, int64_t end,
                            typename T::Shared& s) {
  int& last_used = reinterpret_cast<int&>(s.scores[0]);  // free memory as long as no step runs
  if (threadIdx.x == 0) last_used = -1;
  __syncthreads();
  int last = -1;
  for (int64_t i = begin + threadIdx.x; i < end; i += kThreads)
    if (keys.may_use(p, keys.list[i])) last = static_cast<int>(i - begin);
  last = __reduce_max_sync(~0u, last);
  if (threadIdx.x % 32 == 0 && last >= 0) atomicMax(&last_used, last);
  __syncthreads();
  return begin + last_used + 1;
}

template <class T>
__global__ __launch_bounds__(kThreads, T::kHeads == 64 ? 1 : 2) void attend(SparseMlaParams p, KeySplit split) {
  extern __shared__ __align__(16) uint8_t memory[];
  auto& s = *reinterpret_cast<typename T::Shared*>(memory);
  const int64_t groups = (p.heads + T::kHeads - 1) / T::kHeads;
  const int64_t head0 = blockIdx.x % groups * T::kHeads;
  const int64_t part = blockIdx.x / groups % split.parts;
  const int64_t row = blockIdx.x / (groups * split.parts);
  const RowKeys keys = row_keys(p, row);
  const int64_t begin = part * split.width;
  const int64_t end = used_end<T>(keys, p, begin, min(begin + split.width, p.topk), s);
  const uint32_t raw = shared_address(s.raw);

  Accumulators<T> acc = {};
  HeadState state;
  int32_t index = load_entry<T>(keys, begin + threadIdx.x, end);
  if (begin < end) {
    find_records<T>(p, keys, index, s.offsets[0]);
    index = load_entry<T>(keys, begin + T::kKeys + threadIdx.x, end);
    load_queries<T>(p, row, head0, s);
    __syncthreads();
    start_gather<T>(p, s.offsets[0], raw);
    find_records<T>(p, keys, index, s.offsets[1]);
    index = load_entry<T>(keys, begin + 2 * T::kKeys + threadIdx.x, end);
  }
  int step = 0;
  for (int64_t entry = begin; entry < end; entry += T::kKeys, step ^= 1) {
    cp_async_wait<0>();
    __syncthreads();  // records and the next offsets are there, the tile is free
    const bool scaled = __syncthreads_or(convert_records<T>(s, s.offsets[step]));
    if (entry + T::kKeys < end) {
      start_gather<T>(p, s.offsets[step ^ 1], raw);
      find_records<T>(p, keys, index, s.offsets[step]);
      index = load_entry<T>(keys, entry + 3 * T::kKeys + threadIdx.x, end);
    }
    compute_scores<T>(s);
    __syncthreads();
    const bool rescale = __syncthreads_or(update_softmax<T>(s, state, scaled));
    add_values<T>(s, acc, rescale, scaled);
  }
  __syncthreads();
  store_results<T>(p, split, row, head0, part, s, acc, state);
}

template <class T>
void launch(const SparseMlaParams& p, const KeySplit& split, int32_t device_index, cudaStream_t stream) {
  constexpr int kBytes = sizeof(typename T::Shared);
  allow_shared_bytes<attend<T>>(device_index, kBytes);
  const int64_t blocks = p.rows * split.parts * ((p.heads + T::kHeads - 1) / T::kHeads);
  attend<T><<<static_cast<unsigned>(blocks), kThreads, kBytes, stream>>>(p, split);
  check_launch("sparse_mla_fp8_cp");
}

}  // namespace portable
}  // namespace sparse_cp_ops
