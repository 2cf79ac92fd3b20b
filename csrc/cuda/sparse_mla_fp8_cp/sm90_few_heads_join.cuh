// Few heads, an adder's items; the blocks of a cluster join what they have of a row. All sums have a fixed order.
#pragma once

#include "../device/cluster.cuh"
#include "sm90_few_heads_adder.cuh"

namespace sparse_cp_ops {
namespace few_heads {

// Blocks of a cluster hold parts of one row. Each learns the states of all, moves its sums to the joint peaks and
// references, and sends them in pieces of half a head to the blocks that sum and store those.
template <class S>
__device__ __forceinline__ void join_blocks(const SparseMlaParams& p, const Item& item, const Adder<S>& c, int parts) {
  constexpr int kWords = 2 * S::kHeads + kLatentTiles;  // of a state: peaks, totals, references
  const uint32_t states = c.base + S::kWeightsOffset, received = c.base + S::kRingOffset;
  const int thread = c.thread();
  cluster_barrier();  // every block has its state, and nobody reads its ring or weights any more
  for (int i = thread; i < parts * kWords; i += S::kAdderThreads) {
    const int rank = i / kWords, word = i % kWords;
    const uint32_t place =
        word < 2 * S::kHeads ? S::final_peak(c.base, word) : S::final_reference(c.base, word - 2 * S::kHeads);
    set_shared(states + i * 4, cluster_f32(cluster_address(place, rank)));
  }
  named_barrier(kAddersBarrier, S::kAdderThreads);
  // The joint state of a head or scale tile, by one thread each.
  const int64_t first = item.row * p.heads + item.head0;
  const int head = thread, tile = thread - 32;
  auto of = [&](int rank, int word) { return states + (rank * kWords + word) * 4; };
  if (head < S::kHeads) {
    float peak = kNoPeak, total = 0.0f;
    for (int rank = 0; rank < parts; ++rank) peak = fmaxf(peak, shared_f32(of(rank, head)));
    for (int rank = 0; rank < parts; ++rank)
      total += shared_f32(of(rank, S::kHeads + head)) * fast_exp2(shared_f32(of(rank, head)) - peak);
    if (item.part == 0) p.lse[first + head] = log_sum(peak, total);
    set_shared(S::joint_factor(c.base, head), fast_exp2(shared_f32(of(item.part, head)) - peak));
    set_shared(S::joint_inverse(c.base, head), total == 0.0f ? 0.0f : 1.0f / total);
  } else if (tile >= 0 && tile < kLatentTiles) {
    int reference = 0;
    for (int rank = 0; rank < parts; ++rank)
      reference = max(reference, static_cast<int>(shared_u32(of(rank, 2 * S::kHeads + tile))));
    set_shared(S::joint_ratio(c.base, tile),
               power_ratio(static_cast<int>(shared_u32(of(item.part, 2 * S::kHeads + tile))), reference));
    set_shared(S::joint_power(c.base, tile), reference_power(reference));
  }
  named_barrier(kAddersBarrier, S::kAdderThreads);
  // Piece i is head i / 2, dimensions of adder i % 2; block r takes the pieces from first_piece(r) on.
  constexpr int kPieces = S::kAdders * S::kHeads, kPieceBytes = kLatentDim / S::kAdders * 4;
  auto first_piece = [&](int rank) { return (kPieces * rank + parts - 1) / parts; };
  const int most = (kPieces + parts - 1) / parts;  // pieces of a block
#pragma unroll
  for (int i = 0; i < S::kColumns; ++i) {
    const int column = c.column(i / 2) + i % 2, piece = column * S::kAdders + c.a, rank = piece * parts / kPieces;
    const uint32_t target =
        cluster_address(received + (item.part * most + piece - first_piece(rank)) * kPieceBytes, rank);
    const float factor = shared_f32(S::joint_factor(c.base, column));
#pragma unroll
    for (int t = 0; t < S::kTiles; ++t) {
      const float f = factor * shared_f32(S::joint_ratio(c.base, c.first_tile() + t));
      const float4 x = four_values(c, t, i);
      set_cluster(target + (t * kScaleTile + c.dims()) * 4, make_float4(x.x * f, x.y * f, x.z * f, x.w * f));
    }
  }
  cluster_barrier();
  constexpr int kFours = kPieceBytes / 16;
  const int begin = first_piece(item.part), count = first_piece(item.part + 1) - begin;
  for (int i = thread; i < count * kFours; i += S::kAdderThreads) {
    const int piece = begin + i / kFours, column = piece / S::kAdders;
    const int dim = piece % S::kAdders * (kLatentDim / S::kAdders) + i % kFours * 4;
    float4 sum = make_float4(0, 0, 0, 0);
    for (int rank = 0; rank < parts; ++rank) {
      const float4 x = shared_f32x4(received + rank * most * kPieceBytes + i * 16);
      sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
    }
    const float factor =
        shared_f32(S::joint_inverse(c.base, column)) * shared_f32(S::joint_power(c.base, dim / kScaleTile));
    *reinterpret_cast<uint2*>(static_cast<__nv_bfloat16*>(p.out) + (first + column) * kLatentDim + dim) =
        pack_bf16x4(sum, factor);
  }
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
    for (int step = 0; step < item.steps; ++step) take_step(c, step_number++);
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
