// Few heads, a scorer: queries to shared memory, then step by step scores and weights.
#pragma once

#include "sm90_few_heads.cuh"

namespace sparse_cp_ops {
namespace few_heads {

// A head's peak moves only when a logit exceeds it by this much (log2 units), a scale tile's reference when an exponent
// does. Weights stay below 2^(8 + 4 + 1), and are as exact in f16 as below 1.
inline constexpr float kPeakSlack = 8.0f;
inline constexpr int kReferenceSlack = 4;
inline constexpr int kLargestReference = 253;  // biased exponent; 2^(127 - it) must not become 0
inline constexpr float kNoPeak = -3.0e38f;     // before the first logit: finite, so that differences are no NaN

// Peaks of a thread's columns when it last looked. Read and written only where they move, so they stay in local memory.
template <class S>
using KnownPeaks = volatile float[S::kColumns];

template <class S>
struct Scorer {
  float total[S::kColumns];  // sums of exp2(logit - peak) over this thread's keys; head column(j) + e at 2 * j + e
  uint32_t version;
  uint32_t base, state;  // state: base of the item's, which has one of two places
  int w, warp, lane;

  __device__ int thread() const { return threadIdx.x % kWarpgroup; }
  // Row lane / 4 of the warp's scores is this key of its quarter, row lane / 4 + 8 the key 8 further: with this order
  // the loads of K and those of V touch every bank once.
  __device__ int key() const { return lane / 4 % 4 * 2 | lane / 16; }
  __device__ uint32_t scratch(int of_warp, int head) const {
    return base + S::kScratchOffset + ((w * 4 + of_warp) * S::kHeads + head) * 4;
  }
  __device__ uint32_t warp_reference(int of_warp) const {
    return base + S::kReferenceOffset + (w * 4 + of_warp) * kLatentTiles * 4;
  }
  __device__ int column(int j) const { return 8 * j + 2 * (lane % 4); }  // the first of two
};

__device__ __forceinline__ uint32_t word(const uint4& x, int i) {
  return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w;
}

// Queries of a block's heads, from the ring to where q.k reads them: the latent part f16, the RoPE part bf16, both
// times 2^-k; within a chunk in the order in which registers hold the bytes of a record. Short loops, because this is
// code that no instruction cache remembers from the last item.
template <class S>
__device__ __forceinline__ void load_queries(const SparseMlaParams& p, RingPosition<S> position, uint32_t base) {
  constexpr int kThreads = 2 * kWarpgroup / S::kHeads, kRows = kThreads / 8;  // of a head; a row of eight takes a chunk
  static_assert(2 * kWarpgroup <= S::kScorerThreads && kThreads <= 32);
  const int head = threadIdx.x / kThreads, row = threadIdx.x % kThreads / 8, part = threadIdx.x % 8;
  if (head < S::kHeads) {
    const RingPosition<S> mine = position + head / kSlotHeads;
    mbarrier_wait(S::full(base, mine.slot()), mine.parity());
    const uint32_t raw = S::quarter(base, mine.slot()) + head % kSlotHeads * (kQkDim * 2) + part * 16;
    float peak = 0.0f;
#pragma unroll 1
    for (int i = row; i < kRopeChunk; i += kRows) peak = query_peak(shared_u32x4(raw + i * (kChunkDims * 2)), peak);
#pragma unroll
    for (int lanes = 1; lanes < kThreads; lanes *= 2) peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, lanes));
    const int exponent = query_exponent(peak);
    const float factor = power_of_two(-exponent);
    const uint32_t target = base + S::kQueryOffset + head * 128;
#pragma unroll 1
    for (int i = row; i < kChunks; i += kRows) {
      const uint4 piece = shared_u32x4(raw + i * (kChunkDims * 2));
      const bool rope = i == kRopeChunk;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        // Lane c of a quad loads bytes 8 c .. 8 c + 7 of 32 at a time: two products of 16 latent dimensions, or one of
        // the RoPE part; pair j of a product is its half j % 2.
        const int product = rope ? part / 2 : part / 4 * 2 + j / 2, lane = rope ? part % 2 * 2 + j / 2 : part % 4;
        set_shared(target + i * S::kChunkBytes + ((2 * product + j % 2) ^ (head & 7)) * 16 + lane * 4,
                   scaled_query(word(piece, j), !rope, factor));
      }
    }
    if (threadIdx.x % kThreads == 0)
      set_shared(base + S::kQueryFactorOffset + head * 4, power_of_two(exponent) * (p.softmax_scale * kLog2e));
  }
  fence_async_proxy();
}

// The lower or upper two e4m3 of a word as f16, exactly.
__device__ __forceinline__ uint32_t latent_pair(uint32_t bytes, bool high) {
  uint32_t pair;
  if (high) {
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.rn.f16x2.e4m3x2 %0, high;\n}"
        : "=r"(pair)
        : "r"(bytes));
  } else {
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.rn.f16x2.e4m3x2 %0, low;\n}" : "=r"(pair) : "r"(bytes));
  }
  return pair;
}

// s = K . q^T of the step in log2 units; `record`: this thread's first key, whose scales and its second's come back. A
// scale tile has a sum of its own, which joins s in fp32 one tile later, when it is certainly finished. Everything is
// read long before it is used: shared memory is busy, and a warp that waits for it is alone in its scheduler.
// `meanwhile` runs before the last products are waited for.
template <class S, class F>
__device__ __forceinline__ void find_scores(const Scorer<S>& c, uint32_t record, float (&s)[S::kAccumulators],
                                            float4 (&scales)[2], F meanwhile) {
  constexpr uint32_t kSecond = 8 * kRecord;
  constexpr int kGroups = kLatentDim / 32, kTileGroups = kGroups / kLatentTiles;  // of two products
  const uint32_t piece = record + c.lane % 4 * 8;
  uint64_t queries = swizzled_tile(c.base + S::kQueryOffset);  // of the first product; the others are a sum away
  asm("" : "+l"(queries));                                     // a sum, not what the compiler knows of its parts
  uint2 rope[4][2], bytes[S::kAhead][2];
#pragma unroll
  for (int k = 0; k < 4; ++k)
#pragma unroll
    for (int i = 0; i < 2; ++i) rope[k][i] = shared_u32x2(piece + kMlaRopeOffset + k * 32 + i * kSecond);
  auto load = [&](int group) {
#pragma unroll
    for (int i = 0; i < 2; ++i) bytes[group % S::kAhead][i] = shared_u32x2(piece + group * 32 + i * kSecond);
  };
#pragma unroll
  for (int group = 0; group < S::kAhead; ++group) load(group);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const uint32_t a[4] = {rope[k][0].x, rope[k][1].x, rope[k][0].y, rope[k][1].y};
    wgmma_registers_bf16(s, a, advance(queries, kRopeChunk * S::kChunkBytes + k * 32), k != 0);
  }
  wgmma_commit();
  float sums[S::kSums][S::kAccumulators], factors[2];  // of a thread's two keys
  auto join = [&](int tile) {
    pin(sums[tile % S::kSums]);
    pin(s);
#pragma unroll
    for (int i = 0; i < S::kAccumulators; ++i) s[i] = fmaf(sums[tile % S::kSums][i], factors[i / 2 % 2], s[i]);
  };
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    const int tile = group / kTileGroups, place = group % kTileGroups;
    wgmma_wait<1>();
    if (S::kSums == 2 && place == 1 && tile > 0) join(tile - 1);
    uint32_t a[2][4];
#pragma unroll
    for (int k = 0; k < 2; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint2& pair = bytes[group % S::kAhead][i % 2];
        a[k][i] = latent_pair(k == 0 ? pair.x : pair.y, i / 2);
      }
    if (group + S::kAhead < kGroups) load(group + S::kAhead);
    if (place == kTileGroups - 1 && tile + 1 < kLatentTiles) {
#pragma unroll
      for (int i = 0; i < 2; ++i) factors[i] = shared_f32(record + kMlaScaleOffset + tile * 4 + i * kSecond);
    }
    if (S::kSums == 1 && place == 0 && tile > 0) {
      wgmma_wait<0>();
      join(tile - 1);
    }
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 2; ++k)
      wgmma_registers_f16(sums[tile % S::kSums], a[k],
                          advance(queries, group / 2 * S::kChunkBytes + (group % 2 * 2 + k) * 32), place + k != 0);
    wgmma_commit();
  }
  float2 heads[S::kHeads / 8];
#pragma unroll
  for (int i = 0; i < 2; ++i) scales[i] = shared_f32x4(record + kMlaScaleOffset + i * kSecond);
#pragma unroll
  for (int j = 0; j < S::kHeads / 8; ++j) heads[j] = shared_f32x2(c.base + S::kQueryFactorOffset + c.column(j) * 4);
  meanwhile();
  wgmma_wait<0>();
  factors[0] = scales[0].w, factors[1] = scales[1].w;
  join(kLatentTiles - 1);
#pragma unroll
  for (int i = 0; i < S::kAccumulators; ++i) s[i] *= i & 1 ? heads[i / 4].y : heads[i / 4].x;
}

__device__ __forceinline__ int biased_exponent(float scale) { return __float_as_uint(scale) >> 23 & 0xff; }
__device__ __forceinline__ float element(const float4& f, int i) {
  return i == 0 ? f.x : i == 1 ? f.y : i == 2 ? f.z : f.w;
}
// Biased exponent of the larger of two scales; of NaN and infinite ones none.
__device__ __forceinline__ int largest_exponent(float a, float b) {
  const int x = biased_exponent(a), y = biased_exponent(b);
  return min(max(x < 255 ? x : 0, y < 255 ? y : 0), kLargestReference);
}
// 2^(a - b) of biased exponents, a <= b.
__device__ __forceinline__ float power_ratio(int a, int b) {
  return __uint_as_float(static_cast<uint32_t>(max(a - b + 127, 0)) << 23);
}

// Peaks as they are now; the thread's totals follow them.
template <class S>
__device__ __forceinline__ void follow_peaks(Scorer<S>& c, KnownPeaks<S>& known, float (&peaks)[S::kColumns]) {
#pragma unroll
  for (int j = 0; j < S::kHeads / 8; ++j) {
    const float2 peak = shared_f32x2(S::peak(c.state, c.column(j)));
    peaks[2 * j] = peak.x, peaks[2 * j + 1] = peak.y;
  }
  const uint32_t version = shared_u32(S::version(c.state));
  if (version == c.version) return;
  c.version = version;
#pragma unroll
  for (int i = 0; i < S::kColumns; ++i) {
    c.total[i] *= fast_exp2(known[i] - peaks[i]);
    known[i] = peaks[i];
  }
}

// Moves peaks and references to the largest so far.
template <class S>
__device__ __forceinline__ void move_state(Scorer<S>& c, const float (&logits)[S::kAccumulators],
                                           const float4 (&scales)[2], KnownPeaks<S>& known, float (&peaks)[S::kColumns],
                                           int (&references)[kLatentTiles]) {
#pragma unroll
  for (int i = 0; i < S::kColumns; ++i) {
    const int k = i / 2 * 4 + i % 2, head = c.column(i / 2) + i % 2;
    float x = fmaxf(logits[k], logits[k + 2]);
#pragma unroll
    for (int lanes = 4; lanes < 32; lanes *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, lanes));
    if (c.lane < 4) set_shared(c.scratch(c.warp, head), x);
  }
#pragma unroll
  for (int t = 0; t < kLatentTiles; ++t) {
    const int x = __reduce_max_sync(~0u, largest_exponent(element(scales[0], t), element(scales[1], t)));
    if (c.lane == 0) set_shared(c.warp_reference(c.warp) + t * 4, static_cast<uint32_t>(x));
  }
  named_barrier(kScorerBarrier + c.w, kWarpgroup);
  const bool writes = c.warp == 0 && c.lane < 4;
#pragma unroll
  for (int i = 0; i < S::kColumns; ++i) {
    const int head = c.column(i / 2) + i % 2;
    float peak = peaks[i];
#pragma unroll
    for (int warp = 0; warp < 4; ++warp) peak = fmaxf(peak, shared_f32(c.scratch(warp, head)));
    const float factor = fast_exp2(peaks[i] - peak);
    c.total[i] *= factor;
    peaks[i] = known[i] = peak;
    if (writes) {
      set_shared(S::peak(c.state, head), peak);
      set_shared(S::move_factor(c.base, c.w, head), factor);
    }
  }
#pragma unroll
  for (int t = 0; t < kLatentTiles; ++t) {
    int reference = references[t];
#pragma unroll
    for (int warp = 0; warp < 4; ++warp)
      reference = max(reference, static_cast<int>(shared_u32(c.warp_reference(warp) + t * 4)));
    if (c.thread() == 0) {
      set_shared(S::reference(c.state) + t * 4, static_cast<uint32_t>(reference));
      set_shared(S::move_ratio(c.base, c.w) + t * 4, power_ratio(references[t], reference));
    }
    references[t] = reference;
  }
  ++c.version;
  if (c.thread() == 0) set_shared(S::version(c.state), c.version);
  named_barrier(kScorerBarrier + c.w, kWarpgroup);
}

// The steps before this one have settled their references.
template <class S>
__device__ __forceinline__ void wait_for_state(const Scorer<S>& c, uint32_t number) {
  const StepNumber<S> before{number - 1};
  if (number > 0) mbarrier_wait(S::settled(c.base, before.scorer()), before.parity());
}

// Weights of the step into the scorer's buffer. `used`: bits of the thread's two keys, which have these scales.
template <class S>
__device__ __forceinline__ void find_weights(Scorer<S>& c, float4 (&scales)[2], uint32_t used, uint32_t number,
                                             KnownPeaks<S>& known, float (&peaks)[S::kColumns],
                                             int (&references)[kLatentTiles], float (&s)[S::kAccumulators]) {
  if (used != 3) {  // whatever is in the ring there
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (used >> half & 1) continue;
      scales[half] = make_float4(0, 0, 0, 0);
#pragma unroll
      for (int j = 0; j < S::kHeads / 8; ++j) s[4 * j + 2 * half] = s[4 * j + 2 * half + 1] = -INFINITY;
    }
  }
  float units[2][kLatentTiles];
  bool exceeds = false;
  auto find_units = [&] {
#pragma unroll
    for (int t = 0; t < kLatentTiles; ++t) {
      const float unit = __uint_as_float(static_cast<uint32_t>(254 - references[t]) << 23);
#pragma unroll
      for (int half = 0; half < 2; ++half) units[half][t] = element(scales[half], t) * unit;
    }
  };
  find_units();
#pragma unroll
  for (int i = 0; i < S::kColumns; ++i) {
    const int k = i / 2 * 4 + i % 2;
    exceeds |= fmaxf(s[k], s[k + 2]) > peaks[i] + kPeakSlack;
  }
#pragma unroll
  for (int t = 0; t < kLatentTiles; ++t) exceeds |= fmaxf(units[0][t], units[1][t]) >= 2 << kReferenceSlack;
  // The buffer is free: the adders are through with this scorer's last step.
  const StepNumber<S> step{number};
  mbarrier_wait(S::weights_empty(c.base, c.w), step.parity() ^ 1);
  const bool moves = named_barrier_or(kScorerBarrier + c.w, kWarpgroup, exceeds);
  if (moves) {
    move_state(c, s, scales, known, peaks, references);
    find_units();
  }
  if (c.thread() == 0) {
    mbarrier_arrive(S::settled(c.base, c.w));
    set_shared(S::event(c.base, c.w), static_cast<uint32_t>(moves ? kMoveAndAdd : kAdd));
  }
#pragma unroll
  for (int i = 0; i < S::kColumns; ++i) {
    const int k = i / 2 * 4 + i % 2;
    s[k] = fast_exp2(s[k] - peaks[i]);
    s[k + 2] = fast_exp2(s[k + 2] - peaks[i]);
    c.total[i] += s[k] + s[k + 2];
  }
  // Weights are rounded once, behind the scales; by a power of two an f16 pair is scaled exactly.
  uint32_t bits = 0;
#pragma unroll
  for (int i = 0; i < 2 * kLatentTiles; ++i) bits |= __float_as_uint(units[i / kLatentTiles][i % kLatentTiles]);
  const bool powers = __all_sync(~0u, (bits & 0x7fffff) == 0);
  // Row r of an 8x8 matrix of 8 heads x 8 keys: a head, 16 bytes of keys.
  constexpr int kPairs = S::kAccumulators / 2;
  const int half = c.lane / 8 % 2, row = c.lane % 8;
  const uint32_t target =
      S::weights(c.base, c.w, 0) + row * 128 + ((2 * c.warp + half) ^ row) * 16 + c.lane / 16 * 1024;
  auto store = [&](int t, const uint32_t (&x)[kPairs]) {
    if constexpr (S::kHeads == 8) {
      stmatrix_x2_transposed(target + t * S::kChunkBytes, x[0], x[1]);
    } else {
#pragma unroll
      for (int i = 0; i < kPairs; i += 4)
        stmatrix_x4_transposed(target + t * S::kChunkBytes + i * 512, x[i], x[i + 1], x[i + 2], x[i + 3]);
    }
  };
  if (powers) {
    uint32_t packed[kPairs];
#pragma unroll
    for (int i = 0; i < kPairs; ++i) packed[i] = pack_f16x2(s[2 * i], s[2 * i + 1]);
#pragma unroll
    for (int t = 0; t < kLatentTiles; ++t) {
      const uint32_t factors[2] = {pack_f16x2(units[0][t], units[0][t]), pack_f16x2(units[1][t], units[1][t])};
      uint32_t scaled[kPairs];
#pragma unroll
      for (int i = 0; i < kPairs; ++i) scaled[i] = multiply_f16x2(packed[i], factors[i % 2]);
      store(t, scaled);
    }
  } else {
#pragma unroll
    for (int t = 0; t < kLatentTiles; ++t) {
      uint32_t scaled[kPairs];
#pragma unroll
      for (int i = 0; i < kPairs; ++i)
        scaled[i] = pack_f16x2(s[2 * i] * units[i % 2][t], s[2 * i + 1] * units[i % 2][t]);
      store(t, scaled);
    }
  }
  fence_async_proxy();
  __syncwarp();
  if (c.lane == 0) mbarrier_arrive(S::weights_full(c.base, c.w));
}

// Values of an empty quarter: weights of 0 don't cover NaN that other rows left there.
__device__ __forceinline__ void clear_values(uint32_t quarter, int lane) {
#pragma unroll 1
  for (int key = 0; key < kQuarter; ++key) set_shared(quarter + key * kRecord + lane * 16, make_float4(0, 0, 0, 0));
}

template <class S>
__device__ __forceinline__ void take_step(Scorer<S>& c, uint32_t number, uint32_t item_count, KnownPeaks<S>& known) {
  const RingPosition<S> position = keys_position<S>(number, item_count);
  // Lane i % 4 looks after quarter i.
  const RingPosition<S> mine = position + c.lane % 4;
  mbarrier_wait(S::full(c.base, mine.slot()), mine.parity());
  __syncwarp();
  const uint32_t masks = polled_u32(S::mask(c.base, mine.slot()));
  if (__all_sync(~0u, masks == 0)) {
    wait_for_state(c, number);
    mbarrier_wait(S::weights_empty(c.base, c.w), StepNumber<S>{number}.parity() ^ 1);
    named_barrier(kScorerBarrier + c.w, kWarpgroup);
    if (c.thread() == 0) {
      mbarrier_arrive(S::settled(c.base, c.w));
      set_shared(S::event(c.base, c.w), static_cast<uint32_t>(kSkip));
    }
    __syncwarp();
    if (c.lane == 0) mbarrier_arrive(S::weights_full(c.base, c.w));
    return;
  }
  const uint32_t mask = __shfl_sync(~0u, masks, c.warp);
  const uint32_t quarter = S::quarter(c.base, (position + c.warp).slot());
  const uint32_t record = quarter + c.key() * kRecord;
  if (mask == 0) clear_values(quarter, c.lane);
  const uint32_t used = (mask >> c.key() & 1) | (mask >> (c.key() + 8) & 1) << 1;
  float s[S::kAccumulators];
  float4 scales[2];
  float peaks[S::kColumns];
  int references[kLatentTiles];
  find_scores(c, record, s, scales, [&] {
    wait_for_state(c, number);
    __syncwarp();
    follow_peaks(c, known, peaks);
    const uint4 four = shared_u32x4(S::reference(c.state));
#pragma unroll
    for (int t = 0; t < kLatentTiles; ++t) references[t] = static_cast<int>(word(four, t));
  });
  find_weights(c, scales, used, number, known, peaks, references, s);
}

// The state of an item before its first step.
template <class S>
__device__ __forceinline__ void reset_state(uint32_t state) {
  if (threadIdx.x < S::kHeads) set_shared(S::peak(state, threadIdx.x), kNoPeak);
  if (threadIdx.x < kLatentTiles) set_shared(S::reference(state) + threadIdx.x * 4, 0u);
  if (threadIdx.x == 0) set_shared(S::version(state), 0u);
}

// Peaks, totals and references of the item, for the adders.
template <class S>
__device__ __forceinline__ void publish_state(const Scorer<S>& c, uint32_t first_step, uint32_t item_count) {
  mbarrier_wait(S::final_empty(c.base), item_count & 1 ^ 1);
  if (c.lane < S::kHeads) {
    // From the scorer of the item's first step on, so that the order is the item's, not the block's.
    float total = 0.0f;
    for (int i = 0; i < S::kScorers; ++i) {
      const int w = (first_step + i) % S::kScorers;
      float sum = 0.0f;
#pragma unroll
      for (int warp = 0; warp < 4; ++warp) sum += shared_f32(S::totals(c.base, w, warp) + c.lane * 4);
      total += sum;
    }
    set_shared(S::final_peak(c.base, c.lane), shared_f32(S::peak(c.state, c.lane)));
    set_shared(S::final_total(c.base, c.lane), total);
  }
  if (c.lane < kLatentTiles)
    set_shared(S::final_reference(c.base, c.lane), shared_u32(S::reference(c.state) + c.lane * 4));
  __syncwarp();
  if (c.lane == 0) mbarrier_arrive(S::final_full(c.base));
}

template <class S>
__device__ __forceinline__ void score(const SparseMlaParams& p, const KeySplit& split, int64_t items, uint32_t base) {
  Scorer<S> c;
  c.base = base;
  c.w = __shfl_sync(~0u, threadIdx.x / kWarpgroup, 0);
  c.warp = __shfl_sync(~0u, threadIdx.x / 32 % 4, 0);
  c.lane = threadIdx.x % 32;
  KnownPeaks<S> known;
  uint32_t first_step = 0, item_count = 0;
  reset_state<S>(base);
  load_queries<S>(p, queries_position<S>(0, 0), base);
  named_barrier(kScorersBarrier, S::kScorerThreads);
  for (int64_t number = blockIdx.x; number < items; number += gridDim.x, ++item_count) {
    const int steps = work_item<S>(p, split, number).steps;
    c.state = base + item_count % 2 * S::kStateBytes;
    c.version = 0;
#pragma unroll
    for (int i = 0; i < S::kColumns; ++i) known[i] = kNoPeak, c.total[i] = 0.0f;
    const int skipped = (c.w + S::kScorers - first_step % S::kScorers) % S::kScorers;
    for (int step = skipped; step < steps; step += S::kScorers) take_step(c, first_step + step, item_count, known);
    named_barrier(kScorersBarrier, S::kScorerThreads);  // all steps are settled, and all queries have been used
    float peaks[S::kColumns];
    follow_peaks(c, known, peaks);
#pragma unroll
    for (int i = 0; i < S::kColumns; ++i) {
#pragma unroll
      for (int lanes = 4; lanes < 32; lanes *= 2) c.total[i] += __shfl_xor_sync(~0u, c.total[i], lanes);
      if (c.lane < 4) set_shared(S::totals(base, c.w, c.warp) + (c.column(i / 2) + i % 2) * 4, c.total[i]);
    }
    if (number + gridDim.x < items) {
      reset_state<S>(base + (item_count + 1) % 2 * S::kStateBytes);
      load_queries<S>(p, queries_position<S>(first_step + steps, item_count + 1), base);
    }
    named_barrier(kScorersBarrier, S::kScorerThreads);
    // The scorer of the item's last step is the last one to be needed for the next item.
    const uint32_t next_step = first_step + steps;
    if (c.warp == 0 && c.w == (next_step + S::kScorers - 1) % S::kScorers) publish_state(c, first_step, item_count);
    first_step = next_step;
  }
}

}  // namespace few_heads
}  // namespace sparse_cp_ops
