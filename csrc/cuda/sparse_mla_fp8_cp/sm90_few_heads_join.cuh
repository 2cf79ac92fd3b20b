// Few heads, the end of a row: workers join their states, then the blocks of a cluster, and the results are stored.
// All sums have a fixed order.
#pragma once

#include "../device/cluster.cuh"
#include "sm90_few_heads_consumer.cuh"

namespace sparse_cp_ops {
namespace few_heads {

// State of a block in shared memory, floats: peaks and totals of the heads, later the factor of its results and the
// divisor; then the references of the scale tiles.
template <class S>
struct BlockState {
  uint32_t base;
  __device__ uint32_t peak(int head) const { return base + S::kBlockOffset + head * 4; }
  __device__ uint32_t total(int head) const { return base + S::kBlockOffset + (S::kHeads + head) * 4; }
  __device__ uint32_t factor(int head) const { return base + S::kBlockOffset + (2 * S::kHeads + head) * 4; }
  __device__ uint32_t reference(int tile) const { return base + S::kBlockOffset + (3 * S::kHeads + tile) * 4; }
  __device__ uint32_t ratio(int tile) const { return reference(kLatentTiles + tile); }
};

// The first `active` workers have states. Leaves peaks and references of the block in `peaks` and in c, its totals in
// c.total, and scale tile t of the results in worker t % active.
template <class S>
__device__ __forceinline__ void join_workers(Worker<S>& c, int active, float (&peaks)[S::kColumns]) {
#pragma unroll
  for (int i = 0; i < S::kColumns; ++i) {
#pragma unroll
    for (int lanes = 4; lanes < 32; lanes *= 2) c.total[i] += __shfl_xor_sync(~0u, c.total[i], lanes);
    if (c.lane < 4) set_shared(c.scratch(c.warp, c.column(i / 2) + i % 2), c.total[i]);
  }
  if (c.thread() == 0) {
#pragma unroll
    for (int t = 0; t < kLatentTiles; ++t)
      set_shared(c.warp_reference(0) + t * 4, static_cast<uint32_t>(c.reference[t]));
  }
  named_barrier(kConsumerBarrier, S::kConsumers);
  auto of = [&](int w, uint32_t address, uint32_t bytes_a_worker) {
    return address + (w - c.w) * static_cast<int>(bytes_a_worker);
  };
  float factors[S::kColumns];
#pragma unroll
  for (int i = 0; i < S::kColumns; ++i) {
    const int head = c.column(i / 2) + i % 2;
    const uint32_t peak = c.peak(head), total = c.scratch(0, head);
    peaks[i] = kNoPeak;
    for (int w = 0; w < active; ++w) peaks[i] = fmaxf(peaks[i], shared_f32(of(w, peak, S::kHeads * 4)));
    c.total[i] = 0.0f;
    for (int w = 0; w < active; ++w) {
      float sum = 0.0f;
#pragma unroll
      for (int warp = 0; warp < 4; ++warp) sum += shared_f32(of(w, total, 4 * S::kHeads * 4) + warp * S::kHeads * 4);
      c.total[i] += sum * fast_exp2(shared_f32(of(w, peak, S::kHeads * 4)) - peaks[i]);
    }
    factors[i] = fast_exp2(shared_f32(peak) - peaks[i]);
  }
#pragma unroll
  for (int t = 0; t < kLatentTiles; ++t) {
    int reference = 0;
    for (int w = 0; w < active; ++w)
      reference =
          max(reference, static_cast<int>(shared_u32(of(w, c.warp_reference(0) + t * 4, 4 * kLatentTiles * 4))));
    move_reference(c, t, reference, factors);
  }
  if (active == 1) return;
  // One scale tile after the other, in the memory of the weights: thread i of a worker and thread i of another hold the
  // same elements.
  constexpr int kPieces = S::kHeads / 4;
  const uint32_t place = c.base + S::kWeightsOffset + c.thread() * 16;
#pragma unroll
  for (int t = 0; t < kLatentTiles; ++t) {
    auto value = [&](int i) -> float& { return c.o[t][i / S::kAccumulators][i % S::kAccumulators]; };
    const int owner = t % active;
    if (c.w != owner && c.w < active) {
#pragma unroll
      for (int i = 0; i < kPieces; ++i)
        set_shared(place + c.w * S::kWeightsBytes + i * kWarpgroup * 16,
                   make_float4(value(4 * i), value(4 * i + 1), value(4 * i + 2), value(4 * i + 3)));
    }
    named_barrier(kConsumerBarrier, S::kConsumers);
    if (c.w == owner) {
      for (int w = 0; w < active; ++w) {
        if (w == owner) continue;
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
          const float4 x = shared_f32x4(place + w * S::kWeightsBytes + i * kWarpgroup * 16);
          value(4 * i) += x.x, value(4 * i + 1) += x.y, value(4 * i + 2) += x.z, value(4 * i + 3) += x.w;
        }
      }
    }
    named_barrier(kConsumerBarrier, S::kConsumers);
  }
}

// The four neighbouring dimensions of head column i that a thread holds in a scale tile.
template <class S>
__device__ __forceinline__ float4 four_values(const Worker<S>& c, int tile, int i) {
  const int k = i / 2 * 4 + i % 2;
  return make_float4(c.o[tile][0][k], c.o[tile][0][k + 2], c.o[tile][1][k], c.o[tile][1][k + 2]);
}

__device__ __forceinline__ uint2 pack_bf16x4(const float4& x, float factor) {
  return make_uint2(float_to_bf16x2(x.x * factor, x.y * factor), float_to_bf16x2(x.z * factor, x.w * factor));
}

__device__ __forceinline__ float log_sum(float peak, float total) {
  return total == 0.0f ? -INFINITY : peak * kLn2 + logf(total);
}

// 2^(reference - 127)
__device__ __forceinline__ float reference_power(int reference) {
  return __uint_as_float(static_cast<uint32_t>(reference) << 23);
}

template <class S>
__device__ __forceinline__ void store_results(const SparseMlaParams& p, const Item& item, const Worker<S>& c,
                                              int active, const float (&peaks)[S::kColumns]) {
  const int64_t first = item.row * p.heads + item.head0;
#pragma unroll
  for (int i = 0; i < S::kColumns; ++i) {
    const int head = c.column(i / 2) + i % 2;
    const float inverse = 1.0f / c.total[i];
    if (c.w == 0 && c.warp == 0 && c.lane < 4) p.lse[first + head] = log_sum(peaks[i], c.total[i]);
    auto* out = static_cast<__nv_bfloat16*>(p.out) + (first + head) * kLatentDim + c.dims();
#pragma unroll
    for (int t = 0; t < kLatentTiles; ++t) {
      if (t % active != c.w) continue;
      const float factor = reference_power(c.reference[t]) * inverse;
      *reinterpret_cast<uint2*>(out + t * kScaleTile) =
          c.total[i] == 0.0f ? make_uint2(0, 0) : pack_bf16x4(four_values(c, t, i), factor);
    }
  }
}

// Blocks of a cluster hold parts of one row. Each sums and stores a slice of the results of all.
template <class S>
__device__ __forceinline__ void join_blocks(const SparseMlaParams& p, const Item& item, const Worker<S>& c, int parts,
                                            int active, const float (&peaks)[S::kColumns]) {
  const BlockState<S> state{c.base};
  if (threadIdx.x < 4) {
#pragma unroll
    for (int i = 0; i < S::kColumns; ++i) {
      set_shared(state.peak(c.column(i / 2) + i % 2), peaks[i]);
      set_shared(state.total(c.column(i / 2) + i % 2), c.total[i]);
    }
#pragma unroll
    for (int t = 0; t < kLatentTiles; ++t)
      if (threadIdx.x == 0) set_shared(state.reference(t), static_cast<uint32_t>(c.reference[t]));
  }
  cluster_barrier();
  // The joint state of a head or scale tile, by one thread each.
  float own_factor = 0.0f, inverse = 0.0f, own_ratio = 0.0f;
  int reference = 0;
  const int64_t first = item.row * p.heads + item.head0;
  const int head = threadIdx.x, tile = static_cast<int>(threadIdx.x) - 32;
  if (head < S::kHeads) {
    float peak = kNoPeak, total = 0.0f;
    for (int rank = 0; rank < parts; ++rank) peak = fmaxf(peak, cluster_f32(cluster_address(state.peak(head), rank)));
    for (int rank = 0; rank < parts; ++rank)
      total += cluster_f32(cluster_address(state.total(head), rank)) *
               fast_exp2(cluster_f32(cluster_address(state.peak(head), rank)) - peak);
    own_factor = fast_exp2(shared_f32(state.peak(head)) - peak);
    inverse = total == 0.0f ? 0.0f : 1.0f / total;
    if (item.part == 0) p.lse[first + head] = log_sum(peak, total);
    set_shared(state.factor(head), own_factor);
  } else if (tile >= 0 && tile < kLatentTiles) {
    for (int rank = 0; rank < parts; ++rank)
      reference = max(reference, __float_as_int(cluster_f32(cluster_address(state.reference(tile), rank))));
    own_ratio = power_ratio(static_cast<int>(shared_u32(state.reference(tile))), reference);
    set_shared(state.ratio(tile), own_ratio);
  }
  named_barrier(kConsumerBarrier, S::kConsumers);
  const uint32_t staging = c.base + S::kRingOffset;
#pragma unroll
  for (int i = 0; i < S::kColumns; ++i) {
    const int column = c.column(i / 2) + i % 2;
    const float factor = shared_f32(state.factor(column));
#pragma unroll
    for (int t = 0; t < kLatentTiles; ++t) {
      if (t % active != c.w) continue;
      const float f = factor * shared_f32(state.ratio(t));
      const float4 x = four_values(c, t, i);
      set_shared(staging + column * S::kStagingPitch + (t * kScaleTile + c.dims()) * 4,
                 make_float4(x.x * f, x.y * f, x.z * f, x.w * f));
    }
  }
  cluster_barrier();  // every block has read the states and written its results
  if (head < S::kHeads) set_shared(state.total(head), inverse);
  else if (tile >= 0 && tile < kLatentTiles) set_shared(state.ratio(tile), reference_power(reference));
  named_barrier(kConsumerBarrier, S::kConsumers);
  constexpr int kFours = kLatentDim / 4, kAll = S::kHeads * kFours;
  const int end = kAll * (item.part + 1) / parts;
  for (int i = kAll * item.part / parts + threadIdx.x; i < end; i += S::kConsumers) {
    const int row = i / kFours, four = i % kFours;
    const uint32_t place = staging + row * S::kStagingPitch + four * 16;
    float4 sum = make_float4(0, 0, 0, 0);
    for (int rank = 0; rank < parts; ++rank) {
      const float4 x = cluster_f32x4(cluster_address(place, rank));
      sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
    }
    const float factor = shared_f32(state.total(row)) * shared_f32(state.ratio(four / (kScaleTile / 4)));
    *reinterpret_cast<uint2*>(static_cast<__nv_bfloat16*>(p.out) + (first + row) * kLatentDim + four * 4) =
        pack_bf16x4(sum, factor);
  }
  cluster_barrier();  // nobody reads this block's memory any more
}

template <class S>
__device__ __forceinline__ void consume(const SparseMlaParams& p, const KeySplit& split, int64_t items, uint32_t base) {
  Worker<S> c;
  c.base = base;
  c.w = __shfl_sync(~0u, threadIdx.x / kWarpgroup, 0);
  c.warp = __shfl_sync(~0u, threadIdx.x / 32 % 4, 0);
  c.lane = threadIdx.x % 32;
  RingPosition<S> position;  // of the item's first step
  for (int64_t number = blockIdx.x; number < items; number += gridDim.x) {
    const Item item = work_item<S>(p, split, number);
    for (int head = c.thread(); head < S::kHeads; head += kWarpgroup) set_shared(c.peak(head), kNoPeak);
#pragma unroll
    for (int i = 0; i < S::kColumns; ++i) c.total[i] = 0.0f;
#pragma unroll
    for (int t = 0; t < kLatentTiles; ++t) {
      c.reference[t] = 0;
#pragma unroll
      for (int i = 0; i < 2 * S::kAccumulators; ++i) c.o[t][i / S::kAccumulators][i % S::kAccumulators] = 0.0f;
    }
    load_queries<S>(p, item, base);
    for (int step = c.w; step < item.steps; step += S::kWorkers) take_step(c, position + step * 4);
    position = position + item.steps * 4;
    const int active = max(min(item.steps, S::kWorkers), 1);
    float peaks[S::kColumns];
    join_workers(c, active, peaks);
    if (split.parts == 1) store_results(p, item, c, active, peaks);
    else join_blocks(p, item, c, static_cast<int>(split.parts), active, peaks);
    named_barrier(kConsumerBarrier, S::kConsumers);  // queries and states are free
  }
}

}  // namespace few_heads
}  // namespace sparse_cp_ops
