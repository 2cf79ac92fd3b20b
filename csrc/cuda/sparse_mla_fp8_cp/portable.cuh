// Portable sparse MLA (sm_80 and newer): one block of 256 threads per row, head group and part of the row's list.
//
// A loop step handles kKeys keys in four phases between barriers:
//   convert  raw records (brought by cp.async during the step before) -> 16-bit tile, a warp per record
//   scores   q . k by mma.sync; the 576 dimensions are divided between warps, each scale tile stays within one warp
//   softmax  sum of the warps' parts, mask, online softmax; weights as f16 over the scores' own memory
//   values   weights . values; warp w owns dimensions [64 w, 64 w + 64) of all heads, accumulators in registers
#pragma once

#include <type_traits>

#include "portable_tile.cuh"

namespace sparse_cp_ops {
namespace portable {

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
          *reinterpret_cast<uint32_t*>(&s.tile[h * kOutPitch + d]) = float_to_bf16x2(x, y);
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
