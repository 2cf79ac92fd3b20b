// The kernel for many rows of a multiple of 16 heads with 64 RoPE dimensions: two lanes a vector.
//
// A persistent warp takes 16 heads of a row at a time; while it works on one set, the next one is copied to shared
// memory, and its position and weights are on their way. Two lanes need fewer instructions for a vector than four, and
// leave registers for more warps than one.
#pragma once

#include "../device/cp_async.cuh"
#include "../device/mma_sync.cuh"
#include "../device/shared_access.cuh"
#include "direct.cuh"

namespace sparse_cp_ops::staged {

using Lanes = Layout<2>;
inline constexpr uint32_t kHeads = Lanes::kVectors;  // of a set
inline constexpr int kWarps = 4, kThreads = kWarps * 32;
inline constexpr int kBlocksPerMultiprocessor = 4;  // of 128 registers a thread and 34 KB of shared memory

// A stage of shared memory holds a set of heads on its way, 16 bf16 vectors of 16 pieces of 16 bytes, later overwritten
// by FP8 vectors of 8 pieces, and behind them the cosines and sines of its row. Piece i of bf16 vector n lies at place
// i ^ (2 * n % 8), of FP8 vector n at i ^ (n % 8): so neither the lanes of a vector nor coalesced accesses meet in a
// bank, and the exclusive or is one of addresses, too. First come the first stages of all warps, then the second.
inline constexpr uint32_t kVectorBytes = 256, kCosSinOffset = kHeads * kVectorBytes;
inline constexpr uint32_t kStageBytes = kCosSinOffset + kRopeDims * 4, kStagesBytes = kWarps * kStageBytes;
inline constexpr int kSharedBytes = 2 * kStagesBytes;

// Keeps addresses that are one operation away from this one out of registers.
__device__ __forceinline__ uint32_t opaque(uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}

struct Grid {
  uint32_t warps;               // of the launch
  uint32_t sets_per_row;        // heads / 16
  uint32_t q_sets;              // rows * sets_per_row
  uint32_t k_groups;            // of eight rows
  uint32_t row_step, set_step;  // warps / sets_per_row, warps % sets_per_row
};

struct Set {
  uint32_t row, number;
  __device__ __forceinline__ Set next(const Grid& grid) const {
    Set set{row + grid.row_step, number + grid.set_step};
    if (set.number >= grid.sets_per_row) set.number -= grid.sets_per_row, ++set.row;
    return set;
  }
};

__device__ __forceinline__ void start_copy(const QuantQKParams& p, const Set& set, int position, uint32_t stage) {
  const uint32_t lane = threadIdx.x % 32, odd = lane / 16, piece = lane % 16;
  const uint32_t first = opaque(stage + odd * kVectorBytes + (piece ^ odd * 2) * 16);
  const auto* q = static_cast<const uint16_t*>(p.q) + int64_t{set.row} * p.q_row_stride +
                  (set.number * kHeads + odd) * p.q_head_stride + piece * 8;
#pragma unroll
  for (uint32_t i = 0; i < kHeads / 2; ++i) {  // two vectors at a time
    cp_async_16((first ^ (4 * i % 8 * 16)) + 2 * i * kVectorBytes, q, true);
    q += 2 * p.q_head_stride;
  }
  if (lane >= kRopeDims / 4) return;
  const uint32_t target = stage + kCosSinOffset + lane * 16;
  constexpr uint32_t kNan = 0x7FFFFFFF;
  if (position >= 0 && position < p.table.max_positions)
    cp_async_16(target, p.table.cos_sin + int64_t{position} * kRopeDims + lane * 4, true);
  else set_shared(target, make_uint4(kNan, kNan, kNan, kNan));
}

template <bool kHardwareFp8>
__device__ __forceinline__ void quantise_set(const QuantQKParams& p, const Absmax& absmax, const Set& set,
                                             uint32_t weight, uint32_t stage) {
  float v[Lanes::kValues];
  const uint32_t lane = threadIdx.x % 32, vector = Lanes::vector();
  const uint32_t own = opaque(stage + vector * kVectorBytes + (vector * 2 % 8 ^ Lanes::lane()) * 16);
#pragma unroll
  for (int m = 0; m < Lanes::kPieces; ++m) unpack_bf16x8(shared_u32x4(own ^ (m * 32)), v + 8 * m);
  const auto load4 = [&](int i, float* out) {
    const uint4 x = shared_u32x4(stage + kCosSinOffset + i * 4);
    out[0] = __uint_as_float(x.x), out[1] = __uint_as_float(x.y);
    out[2] = __uint_as_float(x.z), out[3] = __uint_as_float(x.w);
  };
  rope_in_lane<2>(v, p.table.interleaved, load4);
  const float amax = vector_amax<2>(p.hadamard ? hadamard_transform<2>(v) : largest_magnitude(v));
  uint32_t bytes[Lanes::kValues / 4];
  const float scale = encode<kHardwareFp8>(v, amax, p, absmax, bytes);
  __syncwarp();  // both lanes of a vector have read it
  const uint32_t target = opaque(stage + vector * kVectorBytes + vector % 8 * 16);
#pragma unroll
  for (int m = 0; m < Lanes::kPieces; ++m)
    set_shared((target ^ (m * 16)) + Lanes::lane() * 8, make_uint2(bytes[2 * m], bytes[2 * m + 1]));
  __syncwarp();
  const int64_t i = int64_t{set.row} * p.heads + set.number * kHeads;
  auto* out = reinterpret_cast<uint4*>(p.q_fp8 + i * kIndexDim) + lane;
  const uint32_t group = lane / 8, first = stage + group * kVectorBytes + (lane % 8 ^ group) * 16;
#pragma unroll
  for (uint32_t n = 0; n < kHeads / 4; ++n)  // four vectors at a time
    out[32 * n] = shared_u32x4((first ^ (4 * n % 8 * 16)) + 4 * n * kVectorBytes);
  if (Lanes::lane() == 0) store_weight(p, set.row, set.number * kHeads + vector, weight, scale);
  __syncwarp();  // the stage may be filled again
}

// Warps take k, eight rows at a time and the last warps first, while the first sets of q arrive; then sets in turn.
template <bool kHardwareFp8>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    quant_kernel(QuantQKParams p, Absmax q_absmax, Grid grid) {
  extern __shared__ __align__(256) uint8_t shared[];
  const uint32_t middle = shared_address(shared) + kStagesBytes;
  const auto other = [&](uint32_t stage) { return stage < middle ? stage + kStagesBytes : stage - kStagesBytes; };
  uint32_t index = blockIdx.x * kWarps + threadIdx.x / 32;
  uint32_t stage = shared_address(shared) + threadIdx.x / 32 * kStageBytes;
  Set set{index / grid.sets_per_row, index % grid.sets_per_row};
  Set next = set.next(grid);
  int next_position = 0;
  if (index < grid.q_sets) start_copy(p, set, __ldg(p.table.positions + set.row), stage);
  cp_async_commit();
  if (index + grid.warps < grid.q_sets) next_position = __ldg(p.table.positions + next.row);
  for (uint32_t group = grid.warps - 1 - index; group < grid.k_groups; group += grid.warps)
    direct::quantise_k<kHardwareFp8, true>(p, int64_t{group} * direct::Lanes::kVectors);
  for (; index < grid.q_sets; index += grid.warps) {
    const uint32_t weight = load_weight_bits(p, set.row, set.number * kHeads + Lanes::vector());
    if (index + grid.warps < grid.q_sets) start_copy(p, next, next_position, other(stage));
    cp_async_commit();
    const Set after = next.next(grid);
    if (index + 2 * grid.warps < grid.q_sets) next_position = __ldg(p.table.positions + after.row);
    cp_async_wait<1>();
    __syncwarp();
    quantise_set<kHardwareFp8>(p, q_absmax, set, weight, stage);
    set = next, next = after;
    stage = other(opaque(stage));
  }
}

}  // namespace sparse_cp_ops::staged
