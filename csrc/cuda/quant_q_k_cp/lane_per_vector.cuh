// One lane a vector: the kernel for many rows of 32 or 64 heads with 64 RoPE dimensions.
//
// Four lanes a vector reach 70-73 % of the copy bandwidth at 8192 and 65,536 rows of 64 heads (H200): shuffles, scales
// and addresses cost as much time as the bytes. Here all 128 values of a head stay in the registers of one lane, so
// that the transform needs no shuffles and one scale is computed for 32 heads at once. A persistent warp takes 32 heads
// of a row at a time; while it works on one set, the next one is copied to shared memory. A lane reads and writes its
// vector there in 16-byte pieces, permuted so that neither these accesses nor the coalesced ones meet in a bank.
#pragma once

#include "../device/cp_async.cuh"
#include "../device/mma_sync.cuh"
#include "four_lanes.cuh"

namespace sparse_cp_ops::lane_per_vector {

inline constexpr int kHeads = 32;  // of a set
inline constexpr int kWarpsPerBlock = 4;
inline constexpr int kThreads = kWarpsPerBlock * 32;
// 204 KB of shared memory and 168 registers a thread on Hopper; the portable kernel needs more registers for its bit
// arithmetic, and an A100 has shared memory for two blocks.
template <bool kHardwareFp8>
inline constexpr int kBlocksPerMultiprocessor = kHardwareFp8 ? 3 : 2;
inline constexpr int kRopeDims = 64;

// A stage of shared memory holds a set of heads on its way, 32 bf16 vectors of 16 pieces of 16 bytes, later overwritten
// by FP8 vectors of 8 pieces, and behind them the cosines and sines of its row. Piece i of vector n lies at place
// i ^ (n % 8), which is an exclusive or of addresses, too. First come the first stages of all warps, then the second.
inline constexpr uint32_t kVectorBytes = 256, kCosSinOffset = kHeads * kVectorBytes;
inline constexpr uint32_t kStageBytes = kCosSinOffset + kRopeDims * 4;
inline constexpr uint32_t kStagesBytes = kWarpsPerBlock * kStageBytes;
inline constexpr int kSharedBytes = 2 * kStagesBytes;

__device__ __forceinline__ uint4 load_shared(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}
__device__ __forceinline__ void store_shared(uint32_t address, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};"
               :
               : "r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}
// Keeps addresses that are one operation away from this one out of registers.
__device__ __forceinline__ uint32_t opaque(uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}

struct Set {
  int64_t row;
  uint32_t first_head;
};

__device__ __forceinline__ Set find_set(uint32_t index, uint32_t sets_per_row) {
  const uint32_t row = index / sets_per_row;
  return {row, (index - row * sets_per_row) * kHeads};
}

__device__ __forceinline__ void prefetch(const void* x) { asm volatile("prefetch.global.L1 [%0];" : : "l"(x)); }

__device__ __forceinline__ void start_copy(const QuantQKParams& p, uint32_t index, uint32_t sets_per_row,
                                           uint32_t stage) {
  const Set set = find_set(index, sets_per_row);
  const float* cos_sin = cos_sin_row(p.table, set.row);
  const uint32_t lane = threadIdx.x % 32, odd = lane / 16, piece = lane % 16;
  const uint32_t first = opaque(stage + odd * kVectorBytes + (piece ^ odd) * 16);
  const auto* q = static_cast<const uint16_t*>(p.q) + set.row * p.q_row_stride +
                  (set.first_head + odd) * p.q_head_stride + piece * 8;
#pragma unroll
  for (int i = 0; i < kHeads / 2; ++i) {  // two vectors at a time
    cp_async_16((first ^ (2 * i % 8 * 16)) + 2 * i * kVectorBytes, q, true);
    q += 2 * p.q_head_stride;
  }
  prefetch(weight_address(p, set.row, set.first_head + lane));
  if (lane >= kRopeDims / 4) return;
  const uint32_t target = stage + kCosSinOffset + lane * 16;
  constexpr uint32_t kNan = 0x7FFFFFFF;
  if (cos_sin != nullptr) cp_async_16(target, cos_sin + lane * 4, true);
  else store_shared(target, make_uint4(kNan, kNan, kNan, kNan));
}

__device__ __forceinline__ void rope(float (&v)[kIndexDim], uint32_t cos_sin, bool interleaved) {
#pragma unroll
  for (int i = 0; i < kRopeDims / 8; ++i) {
    const uint4 c = load_shared(cos_sin + 16 * i), s = load_shared(cos_sin + 2 * kRopeDims + 16 * i);
    const uint32_t cosines[4] = {c.x, c.y, c.z, c.w}, sines[4] = {s.x, s.y, s.z, s.w};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int pair = 4 * i + e;
      float &a = v[interleaved ? 2 * pair : pair], &b = v[interleaved ? 2 * pair + 1 : pair + kRopeDims / 2];
      rotate(a, b, __uint_as_float(cosines[e]), __uint_as_float(sines[e]));
    }
  }
}

template <bool kHardwareFp8>
__device__ __forceinline__ void quantise_set(const QuantQKParams& p, const Absmax& absmax, uint32_t index,
                                             uint32_t sets_per_row, uint32_t stage) {
  float v[kIndexDim];
  const uint32_t lane = threadIdx.x % 32;
  const uint32_t own = opaque(stage + lane * kVectorBytes + lane % 8 * 16);
#pragma unroll
  for (int piece = 0; piece < 16; ++piece) unpack_bf16x8(load_shared(own ^ (piece * 16)), v + 8 * piece);
  if (p.table.interleaved) rope(v, stage + kCosSinOffset, true);
  else rope(v, stage + kCosSinOffset, false);
  if (p.hadamard) {
#pragma unroll
    for (int stride = 1; stride < kIndexDim; stride *= 2) butterfly(v, stride);
  }
  uint32_t bytes[kIndexDim / 4];
  const float scale = encode<kHardwareFp8>(v, largest_magnitude(v), p, absmax, bytes);
  // Only this lane has read the vector's pieces, so that they are free by now.
#pragma unroll
  for (int piece = 0; piece < 8; ++piece)
    store_shared(own ^ (piece * 16),
                 make_uint4(bytes[4 * piece], bytes[4 * piece + 1], bytes[4 * piece + 2], bytes[4 * piece + 3]));
  __syncwarp();
  const Set set = find_set(opaque(index), sets_per_row);  // again: it would not fit the registers above
  const int64_t i = set.row * p.heads + set.first_head;
  auto* out = reinterpret_cast<uint4*>(p.q_fp8 + i * kIndexDim) + lane;
  const uint32_t vector = lane / 8, first = stage + vector * kVectorBytes + (lane % 8 ^ vector) * 16;
#pragma unroll
  for (int n = 0; n < kHeads / 4; ++n)  // four vectors at a time
    out[32 * n] = load_shared((first ^ (4 * n % 8 * 16)) + 4 * n * kVectorBytes);
  store_weight(p, set.row, set.first_head + lane, load_weight(p, set.row, set.first_head + lane), scale);
  __syncwarp();  // the stage may be filled again
}

struct Grid {
  uint32_t warps;         // of the launch
  uint32_t sets_per_row;  // heads / 32
  uint32_t q_sets;        // rows * sets_per_row
  uint32_t k_groups;      // of eight rows
};

// Warps take sets of q in turn, then k, eight rows at a time.
template <bool kHardwareFp8>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor<kHardwareFp8>)
    quant_kernel(QuantQKParams p, Absmax q_absmax, Grid grid) {
  extern __shared__ __align__(256) uint8_t shared[];
  const uint32_t middle = shared_address(shared) + kStagesBytes;
  const auto other = [&](uint32_t stage) { return stage < middle ? stage + kStagesBytes : stage - kStagesBytes; };
  uint32_t index = blockIdx.x * kWarpsPerBlock + threadIdx.x / 32;
  uint32_t stage = shared_address(shared) + threadIdx.x / 32 * kStageBytes;
  if (index < grid.q_sets) start_copy(p, index, grid.sets_per_row, stage);
  cp_async_commit();
  for (; index < grid.q_sets; index += grid.warps) {
    if (index + grid.warps < grid.q_sets) start_copy(p, index + grid.warps, grid.sets_per_row, other(stage));
    cp_async_commit();
    // The next turn needs a position at once, to copy its cosines.
    if (index + 2 * grid.warps < grid.q_sets)
      prefetch(p.table.positions + (index + 2 * grid.warps) / grid.sets_per_row);
    cp_async_wait<1>();
    __syncwarp();
    quantise_set<kHardwareFp8>(p, q_absmax, index, grid.sets_per_row, stage);
    stage = other(opaque(stage));
  }
  for (; index < grid.q_sets + grid.k_groups; index += grid.warps)
    four_lanes::quantise_k<kHardwareFp8, true>(p, int64_t{index - grid.q_sets} * four_lanes::kVectorsPerWarp);
}

}  // namespace sparse_cp_ops::lane_per_vector
