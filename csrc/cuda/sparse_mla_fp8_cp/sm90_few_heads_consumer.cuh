// Few heads, a worker: queries to shared memory, then step by step scores, weights, and weights times values.
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

template <class S>
struct Worker {
  // out^T: [scale tile][even or odd pair of dimensions]; in an accumulator 4 * j + 2 * half + e, head 8 * j + 2 * (lane
  // % 4) + e, dimension 128 * tile + dims() + 2 * pair + half.
  float o[kLatentTiles][2][S::kAccumulators];
  float total[S::kColumns];     // sums of exp2(logit - peak) over this thread's keys
  int reference[kLatentTiles];  // biased exponents
  uint32_t base;
  int w, warp, lane;

  __device__ int thread() const { return threadIdx.x % kWarpgroup; }
  // First of the four neighbouring dimensions of a scale tile that this thread holds: words 0-3 of a warp and 16
  // further.
  __device__ int dims() const { return 4 * (lane / 4 % 4 + lane / 16 * 16 + warp * 4); }
  // Row lane / 4 of the warp's scores is this key of its quarter, row lane / 4 + 8 the key 8 further: with this order
  // the loads of K and those of V touch every bank once.
  __device__ int key() const { return lane / 8 | (lane / 4 & 1) << 2; }
  __device__ uint32_t weights(int tile) const {
    return base + S::kWeightsOffset + w * S::kWeightsBytes + tile * S::kChunkBytes;
  }
  __device__ uint32_t peak(int head) const { return base + S::kPeakOffset + (w * S::kHeads + head) * 4; }
  __device__ uint32_t scratch(int of_warp, int head) const {
    return base + S::kScratchOffset + ((w * 4 + of_warp) * S::kHeads + head) * 4;
  }
  __device__ uint32_t warp_reference(int of_warp) const {
    return base + S::kReferenceOffset + (w * 4 + of_warp) * kLatentTiles * 4;
  }
  __device__ int column(int j) const { return 8 * j + 2 * (lane % 4); }  // the first of two
};

// Queries of a block's heads: the latent part f16, the RoPE part bf16, both times 2^-k; within a chunk in the order in
// which registers hold the bytes of a record. Eight threads a head.
template <class S>
__device__ __forceinline__ void load_queries(const SparseMlaParams& p, const Item& item, uint32_t base) {
  const int head = threadIdx.x / 8, part = threadIdx.x % 8;
  if (head < S::kHeads) {
    const bool vectors =
        reinterpret_cast<uintptr_t>(p.q) % 16 == 0 && p.q_row_stride % 8 == 0 && p.q_head_stride % 8 == 0;
    const auto* q = static_cast<const uint16_t*>(p.q) + item.row * p.q_row_stride +
                    (item.head0 + head) * p.q_head_stride + part * 8;
    uint4 pieces[kChunks];
    float peak = 0.0f;
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const uint16_t* x = q + i * kChunkDims;
      pieces[i] = vectors ? *reinterpret_cast<const uint4*>(x)
                          : make_uint4(x[0] | x[1] << 16, x[2] | x[3] << 16, x[4] | x[5] << 16, x[6] | x[7] << 16);
      if (i == kRopeChunk) continue;
      peak = query_peak(pieces[i], peak);
    }
#pragma unroll
    for (int lanes = 1; lanes < 8; lanes *= 2) peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, lanes));
    const int exponent = query_exponent(peak);
    const float factor = power_of_two(-exponent);
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const uint32_t pairs[4] = {pieces[i].x, pieces[i].y, pieces[i].z, pieces[i].w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const bool rope = i == kRopeChunk;
        // Lane c of a quad loads bytes 16 c .. 16 c + 15 of a latent chunk, or of each half of the RoPE chunk; pair j
        // of a 16-dimension product is its half j % 2.
        const int product = rope ? part / 4 * 2 + j / 2 : part % 2 * 2 + j / 2, lane = rope ? part % 4 : part / 2;
        set_shared(base + S::kQueryOffset + i * S::kChunkBytes + head * 128 +
                       ((2 * product + j % 2) ^ (head & 7)) * 16 + lane * 4,
                   scaled_query(pairs[j], !rope, factor));
      }
    }
    if (part == 0)
      set_shared(base + S::kQueryFactorOffset + head * 4, power_of_two(exponent) * (p.softmax_scale * kLog2e));
  }
  fence_async_proxy();
  named_barrier(kConsumerBarrier, S::kConsumers);
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

__device__ __forceinline__ uint32_t word(const uint4& x, int i) {
  return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w;
}

// s = K . q^T of the step; `record`: this thread's first key. A scale tile has a sum of its own, which joins s in fp32
// one tile later, when it is certainly finished.
template <class S>
__device__ __forceinline__ void find_scores(const Worker<S>& c, uint32_t record, float (&s)[S::kAccumulators]) {
  constexpr uint32_t kSecond = 8 * kRecord;
  const uint32_t piece = record + c.lane % 4 * 16, query = c.base + S::kQueryOffset;
  float sums[2][S::kAccumulators];
  uint4 rope[2][2];
#pragma unroll
  for (int i = 0; i < 4; ++i) rope[i / 2][i % 2] = shared_u32x4(piece + kMlaRopeOffset + i / 2 * 64 + i % 2 * kSecond);
  uint4 next[2] = {shared_u32x4(piece), shared_u32x4(piece + kSecond)};
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const uint4 &x = rope[k / 2][0], &y = rope[k / 2][1];
    const uint32_t a[4] = {word(x, k % 2 * 2), word(y, k % 2 * 2), word(x, k % 2 * 2 + 1), word(y, k % 2 * 2 + 1)};
    wgmma_registers_bf16(s, a, advance(swizzled_tile(query + kRopeChunk * S::kChunkBytes), k * 32), k != 0);
  }
  wgmma_commit();
  auto join = [&](int tile) {
    pin(sums[tile & 1]);
    pin(s);
    const float first = shared_f32(record + kMlaScaleOffset + tile * 4),
                second = shared_f32(record + kSecond + kMlaScaleOffset + tile * 4);
#pragma unroll
    for (int i = 0; i < S::kAccumulators; ++i) s[i] = fmaf(sums[tile & 1][i], i & 2 ? second : first, s[i]);
  };
#pragma unroll
  for (int chunk = 0; chunk < kRopeChunk; ++chunk) {
    const int tile = chunk / 2;
    const uint4 x[2] = {next[0], next[1]};
#pragma unroll
    for (int first = 0; first < 4; first += S::kProducts) {
      wgmma_wait<1>();
      if (chunk % 2 * 4 + first == S::kProducts && tile > 0) join(tile - 1);  // the tile's second group
      uint32_t a[S::kProducts][4];
#pragma unroll
      for (int k = 0; k < S::kProducts; ++k)
#pragma unroll
        for (int i = 0; i < 4; ++i) a[k][i] = latent_pair(word(x[i % 2], first + k), i / 2);
      if (first + S::kProducts == 4 && chunk + 1 < kRopeChunk) {
        next[0] = shared_u32x4(piece + (chunk + 1) * 64);
        next[1] = shared_u32x4(piece + (chunk + 1) * 64 + kSecond);
      }
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < S::kProducts; ++k)
        wgmma_registers_f16(sums[tile & 1], a[k],
                            advance(swizzled_tile(query + chunk * S::kChunkBytes), (first + k) * 32),
                            chunk % 2 + first + k != 0);
      wgmma_commit();
    }
  }
  wgmma_wait<0>();
  join(kLatentTiles - 1);
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

// Moves the reference of scale tile t, and its sums with it, which also get the factors of their heads.
template <class S>
__device__ __forceinline__ void move_reference(Worker<S>& c, int t, int reference,
                                               const float (&factors)[S::kColumns]) {
  const float ratio = power_ratio(c.reference[t], reference);
  c.reference[t] = reference;
#pragma unroll
  for (int i = 0; i < 2 * S::kAccumulators; ++i) {
    const int k = i % S::kAccumulators;
    c.o[t][i / S::kAccumulators][k] *= factors[k / 4 * 2 + k % 2] * ratio;
  }
}

// Moves peaks and references to the largest so far, and what has been added with them.
template <class S>
__device__ __forceinline__ void move_references(Worker<S>& c, const float (&logits)[S::kAccumulators],
                                                const float4 (&scales)[2]) {
  float peaks[S::kColumns];
#pragma unroll
  for (int i = 0; i < S::kColumns; ++i) {
    const int k = i / 2 * 4 + i % 2, head = c.column(i / 2) + i % 2;
    peaks[i] = shared_f32(c.peak(head));
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
  named_barrier(kWorkerBarrier + c.w, kWarpgroup);
  float factors[S::kColumns];
#pragma unroll
  for (int i = 0; i < S::kColumns; ++i) {
    const int head = c.column(i / 2) + i % 2;
    float peak = peaks[i];
#pragma unroll
    for (int warp = 0; warp < 4; ++warp) peak = fmaxf(peak, shared_f32(c.scratch(warp, head)));
    factors[i] = fast_exp2(peaks[i] - peak);
    c.total[i] *= factors[i];
    if (c.warp == 0 && c.lane < 4) set_shared(c.peak(head), peak);
  }
#pragma unroll
  for (int t = 0; t < kLatentTiles; ++t) {
    int reference = c.reference[t];
#pragma unroll
    for (int warp = 0; warp < 4; ++warp)
      reference = max(reference, static_cast<int>(shared_u32(c.warp_reference(warp) + t * 4)));
    move_reference(c, t, reference, factors);
  }
  named_barrier(kWorkerBarrier + c.w, kWarpgroup);  // the new peaks can be read
}

// Scores -> weights in shared memory, for each scale tile with its scales. `used`: bits of this thread's two keys.
template <class S>
__device__ __forceinline__ void find_weights(Worker<S>& c, uint32_t record, uint32_t used,
                                             float (&s)[S::kAccumulators]) {
  float4 scales[2] = {shared_f32x4(record + kMlaScaleOffset), shared_f32x4(record + 8 * kRecord + kMlaScaleOffset)};
#pragma unroll
  for (int j = 0; j < S::kHeads / 8; ++j) {
    const float2 factor = shared_f32x2(c.base + S::kQueryFactorOffset + c.column(j) * 4);
#pragma unroll
    for (int i = 0; i < 4; ++i) s[4 * j + i] *= i & 1 ? factor.y : factor.x;
  }
  if (used != 3) {  // whatever is in the ring there
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (used >> half & 1) continue;
      scales[half] = make_float4(0, 0, 0, 0);
#pragma unroll
      for (int j = 0; j < S::kHeads / 8; ++j) s[4 * j + 2 * half] = s[4 * j + 2 * half + 1] = -INFINITY;
    }
  }
  float peaks[S::kColumns], units[2][kLatentTiles];
  bool exceeds = false;
  auto apply_references = [&] {
#pragma unroll
    for (int j = 0; j < S::kHeads / 8; ++j) {
      const float2 peak = shared_f32x2(c.peak(c.column(j)));
      peaks[2 * j] = peak.x, peaks[2 * j + 1] = peak.y;
    }
#pragma unroll
    for (int t = 0; t < kLatentTiles; ++t) {
      const float unit = __uint_as_float(static_cast<uint32_t>(254 - c.reference[t]) << 23);
#pragma unroll
      for (int half = 0; half < 2; ++half) units[half][t] = element(scales[half], t) * unit;
    }
  };
  apply_references();
#pragma unroll
  for (int i = 0; i < S::kColumns; ++i) {
    const int k = i / 2 * 4 + i % 2;
    exceeds |= fmaxf(s[k], s[k + 2]) > peaks[i] + kPeakSlack;
  }
#pragma unroll
  for (int t = 0; t < kLatentTiles; ++t) exceeds |= fmaxf(units[0][t], units[1][t]) >= 2 << kReferenceSlack;
  if (named_barrier_or(kWorkerBarrier + c.w, kWarpgroup, exceeds)) {
    move_references(c, s, scales);
    apply_references();
  }
#pragma unroll
  for (int i = 0; i < S::kColumns; ++i) {
    const int k = i / 2 * 4 + i % 2;
    s[k] = fast_exp2(s[k] - peaks[i]);
    s[k + 2] = fast_exp2(s[k + 2] - peaks[i]);
    c.total[i] += s[k] + s[k + 2];
  }
  // Weights are rounded once, behind the scales; by a power of two an f16 pair is scaled exactly.
  uint32_t fractions = 0;
#pragma unroll
  for (int i = 0; i < 2 * kLatentTiles; ++i)
    fractions |= __float_as_uint(units[i / kLatentTiles][i % kLatentTiles]) << 9;
  const bool powers = __all_sync(~0u, fractions == 0);
  uint32_t packed[S::kAccumulators / 2];
  if (powers) {
#pragma unroll
    for (int i = 0; i < S::kAccumulators / 2; ++i) packed[i] = pack_f16x2(s[2 * i], s[2 * i + 1]);
  }
  // Row r of an 8x8 matrix of 8 heads x 8 keys: a head, 16 bytes of keys.
  const int half = c.lane / 8 % 2, row = c.lane % 8;
  const uint32_t target = c.weights(0) + row * 128 + ((2 * c.warp + half) ^ row) * 16 + c.lane / 16 * 1024;
#pragma unroll
  for (int t = 0; t < kLatentTiles; ++t) {
    uint32_t scaled[S::kAccumulators / 2];
    if (powers) {
      const uint32_t factors[2] = {pack_f16x2(units[0][t], units[0][t]), pack_f16x2(units[1][t], units[1][t])};
#pragma unroll
      for (int i = 0; i < S::kAccumulators / 2; ++i) scaled[i] = multiply_f16x2(packed[i], factors[i % 2]);
    } else {
#pragma unroll
      for (int i = 0; i < S::kAccumulators / 2; ++i)
        scaled[i] = pack_f16x2(s[2 * i] * units[i % 2][t], s[2 * i + 1] * units[i % 2][t]);
    }
    if constexpr (S::kHeads == 8) {
      stmatrix_x2_transposed(target + t * S::kChunkBytes, scaled[0], scaled[1]);
    } else {
#pragma unroll
      for (int i = 0; i < S::kAccumulators / 2; i += 4)
        stmatrix_x4_transposed(target + t * S::kChunkBytes + i * 512, scaled[i], scaled[i + 1], scaled[i + 2],
                               scaled[i + 3]);
    }
  }
  fence_async_proxy();
  named_barrier(kWorkerBarrier + c.w, kWarpgroup);
}

// out^T += V^T . weights^T. Frees the quarters one after the other.
template <class S>
__device__ __forceinline__ void add_values(Worker<S>& c, const RingPosition<S>& position) {
  constexpr int kGroups = 4 * kLatentTiles;
  const uint32_t place = c.lane % 4 * kRecord + c.dims();
  uint32_t words[2][4];
  int slot = position.slot();
  uint32_t address = S::quarter(c.base, slot) + place;
  auto load = [&](int group) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      words[group & 1][i] = shared_u32(address + group % kLatentTiles * kScaleTile + i * 4 * kRecord);
  };
  load(0);
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    const int product = group / kLatentTiles, tile = group % kLatentTiles;
    const uint32_t empty = S::empty(c.base, slot);
    if (tile == kLatentTiles - 1 && product < 3) {
      slot = (position + (product + 1)).slot();
      address = S::quarter(c.base, slot) + place;
    }
    if (group + 1 < kGroups) load(group + 1);
    const uint32_t (&x)[4] = words[group & 1];
    wgmma_wait<1>();
    uint32_t a[2][4];
#pragma unroll
    for (int pair = 0; pair < 2; ++pair)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t keys = __byte_perm(x[2 * i], x[2 * i + 1], pair ? 0x7362 : 0x5140);
        a[pair][2 * i] = latent_pair(keys, false);
        a[pair][2 * i + 1] = latent_pair(keys, true);
      }
    wgmma_fence();
#pragma unroll
    for (int pair = 0; pair < 2; ++pair)
      wgmma_registers_f16(c.o[tile][pair], a[pair], advance(swizzled_tile(c.weights(tile)), product * 32), true);
    wgmma_commit();
    if (tile == kLatentTiles - 1) {
      __syncwarp();
      if (c.lane == 0) mbarrier_arrive(empty);
    }
  }
  wgmma_wait<0>();
#pragma unroll
  for (int i = 0; i < 2 * kLatentTiles; ++i) pin(c.o[i / 2][i % 2]);
}

// Values of an empty quarter: weights of 0 don't cover NaN that other rows left there.
__device__ __forceinline__ void clear_values(uint32_t quarter, int lane) {
#pragma unroll 1
  for (int key = 0; key < kQuarter; ++key) set_shared(quarter + key * kRecord + lane * 16, make_float4(0, 0, 0, 0));
}

template <class S>
__device__ __forceinline__ void take_step(Worker<S>& c, const RingPosition<S>& position) {
  // Lane i % 4 looks after quarter i.
  const RingPosition<S> mine = position + c.lane % 4;
  // A worker that met steps without keys can be here while a slot still fills for another worker's step, a round of
  // the ring ago; the barrier's parity alone would take that round for this one. The producer writes the tag when the
  // last round is over.
  uint32_t masks;
  do masks = polled_u32(S::mask(c.base, mine.slot()));
  while (masks >> kTagShift != mine.tag());
  __syncwarp();
  mbarrier_wait(S::full(c.base, mine.slot()), mine.parity());
  __syncwarp();
  masks &= 0xffff;
  if (__all_sync(~0u, masks == 0)) {
    if (c.lane < 4) mbarrier_arrive(S::empty(c.base, mine.slot()));
    return;
  }
  const uint32_t mask = __shfl_sync(~0u, masks, c.warp);
  const uint32_t quarter = S::quarter(c.base, (position + c.warp).slot());
  const uint32_t record = quarter + c.key() * kRecord;
  if (mask == 0) clear_values(quarter, c.lane);
  const uint32_t used = (mask >> c.key() & 1) | (mask >> (c.key() + 8) & 1) << 1;
  float s[S::kAccumulators];
  find_scores(c, record, s);
  find_weights(c, record, used, s);
  add_values(c, position);
}

}  // namespace few_heads
}  // namespace sparse_cp_ops
