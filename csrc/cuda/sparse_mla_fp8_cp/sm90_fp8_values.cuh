// precision="fp8", the two warpgroups that add weights times values. Warpgroup w holds dimensions [256 w, 256 w + 256)
// of all 64 heads.
#pragma once

#include "../device/bf16.cuh"
#include "../device/f16.cuh"
#include "../device/fp8.cuh"
#include "../device/mma_sync.cuh"
#include "sm90_fp8.cuh"
#include "sm90_fp8_queries.cuh"

namespace sparse_cp_ops {
namespace fp8_mode {

inline constexpr int kBlocks = 4;  // of 64 dimensions: two a scale tile

struct Adder {
  // out^T, [block]: element 4 * j + 2 * half + e is head 8 * j + 2 * (lane % 4) + e, dimension dim(block) + half.
  float o[kBlocks][32];
  float total[2];  // sums of weights over this warp's 16 keys of each step, of heads own_heads() and + 1
  uint32_t base;
  int w, warp, lane;

  __device__ int thread() const { return threadIdx.x % kWarpgroup; }
  __device__ int own_heads() const { return 32 * w + lane / 8 * 8 + lane % 4 * 2; }
  __device__ int dim(int block) const { return w * 256 + block * 64 + warp * 16 + lane / 4 * 2; }
};

// Sixteen bytes of each of 32 keys, from a chunk of a key tile: 8 x 8 matrices of pairs of dimensions, transposed.
__device__ __forceinline__ void load_pairs(const Adder& c, int tile, int block, int half, uint32_t (&pairs)[4]) {
  const int piece = block % 2 * 4 + c.warp;
  const uint32_t chunk = chunk_address(c.base, tile, 2 * c.w + block / 2);
  ldmatrix_x4_transposed(pairs, chunk + half * (kChunkBytes / 2) + swizzled(c.lane, piece));
}

// Pairs of dimensions of one key -> four keys of one dimension, in the order of publish(): 2 c, 2 c + 8, 2 c + 1,
// 2 c + 9 of 16 keys in lane c of a quad.
__device__ __forceinline__ void split_pairs(const uint32_t (&pairs)[4], uint32_t (&a)[4]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    a[2 * i] = __byte_perm(pairs[2 * i], pairs[2 * i + 1], 0x6240);
    a[2 * i + 1] = __byte_perm(pairs[2 * i], pairs[2 * i + 1], 0x7351);
  }
}

// What has been added so far times factor[head] * ratio[scale tile], both at these addresses.
__device__ __forceinline__ void rescale(Adder& c, uint32_t factors, uint32_t ratios) {
  const float2 ratio = shared_f32x2(ratios + c.w * 8);
#pragma unroll
  for (int j = 0; j < kHeads / 8; ++j) {
    const float2 factor = shared_f32x2(factors + (8 * j + c.lane % 4 * 2) * 4);
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      const float r = t == 0 ? ratio.x : ratio.y, even = factor.x * r, odd = factor.y * r;
#pragma unroll
      for (int i = 0; i < 8; ++i) c.o[2 * t + i / 4][4 * j + i % 4] *= i % 2 ? odd : even;
    }
  }
}

__device__ __forceinline__ void sync_adders() { named_barrier(kAddBarrier, 2 * kWarpgroup); }

inline constexpr int kPairs = kHeads / 8;  // heads of a thread whose weights it makes: 32 w + 8 j + 2 (lane % 4) + e

// Adds weights, pairs of the thread's keys, to the totals; joined over the warp in a fixed order.
__device__ __forceinline__ void add_totals(Adder& c, const uint32_t (&weights)[kPairs]) {
  uint32_t sums[kPairs / 2];
#pragma unroll
  for (int j = 0; j < kPairs / 2; ++j)
    sums[j] = add_f16x2(__byte_perm(weights[2 * j], weights[2 * j + 1], 0x5410),
                        __byte_perm(weights[2 * j], weights[2 * j + 1], 0x7632));
  const bool upper = c.lane & 16, odd = c.lane & 8;
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const uint32_t other = __shfl_xor_sync(~0u, upper ? sums[j] : sums[j + 2], 16);
    sums[j] = add_f16x2(upper ? sums[j + 2] : sums[j], other);
  }
  const uint32_t other = __shfl_xor_sync(~0u, odd ? sums[0] : sums[1], 8);
  uint32_t sum = add_f16x2(odd ? sums[1] : sums[0], other);
  sum = add_f16x2(sum, __shfl_xor_sync(~0u, sum, 4));
  const float2 x = unpack_f16x2(sum);
  c.total[0] += x.x;
  c.total[1] += x.y;
}

// Weights of half of the heads times the factors of the four scale tiles, for both adders. Row g of an 8 x 8 matrix of
// pairs holds keys g and g + 8 of the warp's 16, so that in memory a head has them in the order 0, 8, 1, 9, ...
__device__ __forceinline__ void publish(const Adder& c, const uint32_t (&factors)[kLatentTiles],
                                        const uint32_t (&weights)[kPairs]) {
#pragma unroll
  for (int t = 0; t < kLatentTiles; ++t) {
    uint32_t words[4];
#pragma unroll
    for (int j = 0; j < 4; ++j)
      words[j] =
          f16x4_to_e4m3x4(multiply_f16x2(weights[2 * j], factors[t]), multiply_f16x2(weights[2 * j + 1], factors[t]));
    stmatrix_x4_transposed(
        c.base + kWeightsOffset + t / 2 * kChunkBytes + c.w * (kChunkBytes / 2) + swizzled(c.lane, t % 2 * 4 + c.warp),
        words[0], words[1], words[2], words[3]);
  }
}

__device__ __forceinline__ void make_weights(Adder& c, const Message& message) {
  uint32_t weights[kPairs], factors[kLatentTiles];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint4 logits = shared_u32x4(message.logits(c.thread(), 2 * c.w + i));
    weights[4 * i] = fast_exp2_f16x2(logits.x);
    weights[4 * i + 1] = fast_exp2_f16x2(logits.y);
    weights[4 * i + 2] = fast_exp2_f16x2(logits.z);
    weights[4 * i + 3] = fast_exp2_f16x2(logits.w);
  }
  const int key = c.warp * 16 + c.lane / 4;
  const uint2 first = shared_u32x2(message.key_factors(key)), second = shared_u32x2(message.key_factors(key + 8));
  factors[0] = __byte_perm(first.x, second.x, 0x5410);
  factors[1] = __byte_perm(first.x, second.x, 0x7632);
  factors[2] = __byte_perm(first.y, second.y, 0x5410);
  factors[3] = __byte_perm(first.y, second.y, 0x7632);
  sync_adders();  // the weights of the step before are not needed any more
  publish(c, factors, weights);
  fence_async_proxy();
  sync_adders();
  add_totals(c, weights);
}

__device__ __forceinline__ void release(const Adder& c, const Barriers& barriers, int tile) {
  __syncwarp();
  if (c.lane == 0) mbarrier_arrive(barriers.empty(tile));
}

// out^T += V^T . weights^T over one tile of keys.
__device__ __forceinline__ void add_step(Adder& c, const Barriers& barriers, const RingPosition& position) {
  constexpr int kProducts = 2 * kBlocks, kInFlight = 1;
  asm volatile("" : "+r"(c.base));  // keeps ptxas from holding addresses and descriptors in registers across steps
  const int tile = position.tile();
  const Message message{c.base, tile};
  uint32_t pairs[2][4], a[kInFlight + 1][4];
  mbarrier_wait(barriers.full(tile), position.parity());
  mbarrier_wait(barriers.message(tile), position.parity());
  if (shared_u32(message.moved()) != 0) {
    rescale(c, message.factors(), message.ratios());
    const float2 factor = shared_f32x2(message.factors() + c.own_heads() * 4);
    c.total[0] *= factor.x;
    c.total[1] *= factor.y;
  }
  make_weights(c, message);
  load_pairs(c, tile, 0, 0, pairs[0]);
  load_pairs(c, tile, 0, 1, pairs[1]);
  const uint64_t weights = swizzled_tile(c.base + kWeightsOffset + c.w * kChunkBytes);
#pragma unroll
  for (int i = 0; i < kProducts; ++i) {
    const int block = i / 2, half = i % 2;
    wgmma_wait<kInFlight>();
    split_pairs(pairs[i % 2], a[i % (kInFlight + 1)]);
    wgmma_fence();
    wgmma_n64_e4m3(c.o[block], a[i % (kInFlight + 1)], advance(weights, block / 2 * 64 + half * 32), true);
    wgmma_commit();
    if (i + 2 < kProducts) load_pairs(c, tile, (i + 2) / 2, i % 2, pairs[i % 2]);
  }
  wgmma_wait<0>();
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) pin(c.o[block]);
}

// Sums -> results, and lse, after the last step, whose message is still there.
__device__ __forceinline__ void finish_item(const SparseMlaParams& p, const KeySplit& split, const Item& item, Adder& c,
                                            bool empty, const Message& message) {
  if (c.lane % 8 < 4)
    set_shared(c.base + kTotalOffset + (c.warp * kHeads + c.own_heads()) * 4, make_float2(c.total[0], c.total[1]));
  sync_adders();
  const int head = threadIdx.x;
  if (head < kHeads) {
    float total = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) total += shared_f32(c.base + kTotalOffset + (warp * kHeads + head) * 4);
    set_shared(c.base + kInverseOffset + head * 4, total == 0.0f ? 0.0f : 1.0f / total);
    const bool whole = split.parts == 1;
    const int64_t row = whole ? item.row : item.part * p.rows + item.row;
    (whole ? p.lse : split.partial_lse)[row * p.heads + item.head0 + head] =
        empty || total == 0.0f ? -INFINITY : shared_f32(message.shifts() + head * 4) * kLn2 + logf(total);
  }
  sync_adders();
  if (!empty) rescale(c, c.base + kInverseOffset, message.references());
}

// Eight lanes write 32 bytes (bf16) or 64 (partial states, fp32) of a head.
__device__ __forceinline__ void store_results(const SparseMlaParams& p, const KeySplit& split, const Item& item,
                                              const Adder& c) {
  const bool whole = split.parts == 1;
  const int64_t row = whole ? item.row : item.part * p.rows + item.row;
  const int64_t first = (row * p.heads + item.head0 + c.lane % 4 * 2) * kLatentDim;
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
    for (int i = 0; i < kHeads / 4; ++i) {
      const int64_t place = first + (i / 2 * 8 + i % 2) * kLatentDim + c.dim(block);
      const float low = c.o[block][i / 2 * 4 + i % 2], high = c.o[block][i / 2 * 4 + i % 2 + 2];
      if (whole) *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(p.out) + place) = float_to_bf16x2(low, high);
      else *reinterpret_cast<float2*>(split.partial_out + place) = make_float2(low, high);
    }
  }
}

__device__ __forceinline__ void add_values(const SparseMlaParams& p, const KeySplit& split, int64_t items,
                                           uint32_t base) {
  const Barriers barriers{base + kBarrierOffset};
  Adder c;
  c.base = base;
  c.w = __shfl_sync(~0u, threadIdx.x / kWarpgroup, 0);
  c.warp = __shfl_sync(~0u, threadIdx.x / 32 % kWarps, 0);
  c.lane = threadIdx.x % 32;
  RingPosition position;
  for (uint32_t count = 0; item_number(count) < items; ++count) {
    load_queries<4>(p, sm90::work_item(p, split, item_number(count)), base, 32 + 16 * c.w);
    sync_queries();
    const int steps = wait_for_item(barriers, count);
#pragma unroll
    for (int i = 0; i < kBlocks * 32; ++i) c.o[i / 32][i % 32] = 0.0f;
    c.total[0] = c.total[1] = 0.0f;
    for (int i = 0; i < steps; ++i, ++position.count) {
      if (i > 0) release(c, barriers, RingPosition{position.count - 1}.tile());
      add_step(c, barriers, position);
    }
    const Item item = sm90::work_item(p, split, item_number(count));
    const int last_tile = RingPosition{position.count - 1}.tile();
    finish_item(p, split, item, c, steps == 0, Message{c.base, last_tile});
    if (steps > 0) release(c, barriers, last_tile);
    store_results(p, split, item, c);
  }
}

}  // namespace fp8_mode
}  // namespace sparse_cp_ops
