// Few heads, an adder's items; the blocks of a cluster join what they have of a row. All sums have a fixed order.
#pragma once

#include "../device/bulk_copy.cuh"
#include "../device/cluster.cuh"
#include "sm90_few_heads_adder.cuh"

namespace sparse_cp_ops {
namespace few_heads {

// Blocks of a cluster hold parts of one row. Each sends its state to all, then its sums to the blocks that move them to
// the joint peaks and references, add and store them.
template <class S>
__device__ __forceinline__ void join_blocks(const SparseMlaParams& p, const Item& item, const Adder<S>& c, int parts) {
  const int thread = c.thread(), warp = __shfl_sync(~0u, thread / 32, 0);
  // Block r stores the pieces from first_piece(r) on: piece i is head i / kAdders, dimensions of adder i % kAdders.
  auto first_piece = [&](int rank) { return (S::kPieces * rank + parts - 1) / parts; };
  const int begin = first_piece(item.part), count = first_piece(item.part + 1) - begin;
  if (thread == 0) {
    mbarrier_expect_bytes(S::stated(c.base), parts * S::kStateWords * 4);
    mbarrier_expect_bytes(S::joined(c.base), (parts - 1) * count * S::kPieceBytes);  // the own ones stay where they are
  }
  fence_async_proxy();
  cluster_wait();                                   // for all blocks to have begun
  named_barrier(kAddersBarrier, S::kAdderThreads);  // a state says, too, that nobody reads its block's ring any more
  for (int i = thread; i < parts * S::kStateWords; i += S::kAdderThreads) {
    const int rank = i / S::kStateWords, word = i % S::kStateWords;
    const uint32_t place =
        word < 2 * S::kHeads ? S::final_peak(c.base, word) : S::final_reference(c.base, word - 2 * S::kHeads);
    send_to_cluster(cluster_address(S::sent_state(c.base, item.part, word), rank), shared_u32(place),
                    cluster_address(S::stated(c.base), rank));
  }
  const uint32_t leaving = c.base + S::kRingOffset, arrived = c.base + S::kArrivedOffset;
#pragma unroll
  for (int i = 0; i < S::kColumns; ++i) {
    const int column = c.column(i / 2) + i % 2;
    const uint32_t target = leaving + (column * S::kAdders + c.a) * S::kPieceBytes + c.dims() * 4;
#pragma unroll
    for (int t = 0; t < S::kTiles; ++t) set_shared(target + t * kScaleTile * 4, four_values(c, t, i));
  }
  fence_async_proxy();
  mbarrier_wait(S::stated(c.base), 0);
  named_barrier(kAddersBarrier, S::kAdderThreads);
  for (int rank = warp; rank < parts; rank += S::kAdderThreads / 32) {
    const int from = first_piece(rank), pieces = first_piece(rank + 1) - from;
    if (pieces == 0 || rank == item.part) continue;
    cluster_copy_by_warp(cluster_address(arrived + item.part * pieces * S::kPieceBytes, rank),
                         leaving + from * S::kPieceBytes, pieces * S::kPieceBytes,
                         cluster_address(S::joined(c.base), rank));
  }
  // Meanwhile the factors of all blocks' heads take the place of their peaks, the ratios that of the references.
  const int64_t first = item.row * p.heads + item.head0;
  const int head = thread, tile = thread - 32;
  auto of = [&](int rank, int word) { return S::sent_state(c.base, rank, word); };
  if (head < S::kHeads) {
    float peak = kNoPeak, total = 0.0f;
    for (int rank = 0; rank < parts; ++rank) peak = fmaxf(peak, shared_f32(of(rank, head)));
    for (int rank = 0; rank < parts; ++rank) {
      const float factor = fast_exp2(shared_f32(of(rank, head)) - peak);
      total += shared_f32(of(rank, S::kHeads + head)) * factor;
      set_shared(of(rank, head), factor);
    }
    if (item.part == 0) p.lse[first + head] = log_sum(peak, total);
    set_shared(S::joint_inverse(c.base, head), total == 0.0f ? 0.0f : 1.0f / total);
  } else if (tile >= 0 && tile < kLatentTiles) {
    int reference = 0;
    for (int rank = 0; rank < parts; ++rank)
      reference = max(reference, static_cast<int>(shared_u32(of(rank, 2 * S::kHeads + tile))));
    for (int rank = 0; rank < parts; ++rank) {
      const uint32_t word = of(rank, 2 * S::kHeads + tile);
      set_shared(word, power_ratio(static_cast<int>(shared_u32(word)), reference));
    }
    set_shared(S::joint_power(c.base, tile), reference_power(reference));
  }
  named_barrier(kAddersBarrier, S::kAdderThreads);
  mbarrier_wait(S::joined(c.base), 0);
  __syncwarp();
  cluster_arrive();
  constexpr int kFours = S::kPieceFloats / 4;
  for (int i = thread; i < count * kFours; i += S::kAdderThreads) {
    const int piece = begin + i / kFours, column = piece / S::kAdders;
    const int dim = piece % S::kAdders * S::kPieceFloats + i % kFours * 4;
    float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 4
    for (int rank = 0; rank < parts; ++rank) {
      const uint32_t sums =
          rank == item.part ? leaving + piece * S::kPieceBytes : arrived + (rank * count + i / kFours) * S::kPieceBytes;
      const float4 x = shared_f32x4(sums + i % kFours * 16);
      const float f = shared_f32(of(rank, column)) * shared_f32(of(rank, 2 * S::kHeads + dim / kScaleTile));
      sum.x = fmaf(x.x, f, sum.x), sum.y = fmaf(x.y, f, sum.y);
      sum.z = fmaf(x.z, f, sum.z), sum.w = fmaf(x.w, f, sum.w);
    }
    const float factor =
        shared_f32(S::joint_inverse(c.base, column)) * shared_f32(S::joint_power(c.base, dim / kScaleTile));
    *reinterpret_cast<uint2*>(static_cast<__nv_bfloat16*>(p.out) + (first + column) * kLatentDim + dim) =
        pack_bf16x4(sum, factor);
  }
  cluster_wait();  // all copies out of this block have arrived
}

template <class S>
__device__ __forceinline__ void add(const SparseMlaParams& p, const KeySplit& split, int64_t items, uint32_t base) {
  Adder<S> c;
  c.base = base;
  c.a = __shfl_sync(~0u, threadIdx.x / kWarpgroup - S::kScorers, 0);
  c.warp = __shfl_sync(~0u, threadIdx.x / 32 % 4, 0);
  c.lane = threadIdx.x % 32;
  uint32_t step_number = 0, item_count = 0;
  for (int64_t number = blockIdx.x; number < items; number += gridDim.x, ++item_count) {
    const Item item = work_item<S>(p, split, number);
#pragma unroll
    for (int t = 0; t < S::kTiles; ++t)
#pragma unroll
      for (int i = 0; i < 2 * S::kAccumulators; ++i) c.o[t][i / S::kAccumulators][i % S::kAccumulators] = 0.0f;
    for (int step = 0; step < item.steps; ++step) take_step(c, step_number++, item_count, step == 0);
    mbarrier_wait(S::final_full(base), item_count & 1);
    __syncwarp();
    if (split.parts == 1) {
      store_results(p, item, c);
      __syncwarp();
      if (c.lane == 0) mbarrier_arrive(S::final_empty(base));
    } else {
      join_blocks(p, item, c, static_cast<int>(split.parts));
    }
  }
}

}  // namespace few_heads
}  // namespace sparse_cp_ops
