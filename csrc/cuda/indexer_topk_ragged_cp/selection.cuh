// Exact, deterministic selection by one thread block: the k best of a sequence that is in position order, ties to the
// smaller position, results in position order.
//
// A cut says what is known about the k-th best rank: its leading bits. Elements above the cut are in, elements below
// are out, those on the cut are undecided; narrow() learns more bits from a histogram of the undecided. What is left on
// the cut when all bits are known are ties: the first `need` of them are in.
#pragma once

#include <cstdint>

#include "ranks.cuh"

namespace sparse_cp_ops {

inline constexpr int kSelectThreads = 512;
inline constexpr int kSelectWarps = kSelectThreads / 32;
inline constexpr int kVector = 8;                       // elements a thread and step
inline constexpr int kStep = kSelectThreads * kVector;  // elements a block and step
inline constexpr int kFirstBits = 12;                   // sign, exponent and three bits of the mantissa
inline constexpr int kNextBits = 10;
inline constexpr int kBins = 1 << kFirstBits;

struct Cut {
  uint32_t mask;    // leading bits that are known
  uint32_t prefix;  // their values
  int need;         // how many of the elements on the cut are in
  int undecided;    // how many elements are on the cut

  __device__ __forceinline__ bool above(uint32_t rank) const { return (rank & mask) > prefix; }
  __device__ __forceinline__ bool on(uint32_t rank) const { return (rank & mask) == prefix; }
  __device__ __forceinline__ bool settled() const { return mask == ~0u || need == undecided; }
};

struct SelectScratch {
  int bins[kBins];
  uint32_t warp_sums[2][kSelectWarps];
  Cut cut;
};

// Sum over the threads before this one, and over all. `turn` alternates so that one barrier a scan is enough.
__device__ __forceinline__ uint32_t block_scan(uint32_t value, SelectScratch& scratch, int turn, uint32_t& total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint32_t sum = value;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const uint32_t other = __shfl_up_sync(~0u, sum, d);
    if (lane >= d) sum += other;
  }
  if (lane == 31) scratch.warp_sums[turn][warp] = sum;
  __syncthreads();
  uint32_t warps = lane < kSelectWarps ? scratch.warp_sums[turn][lane] : 0;
#pragma unroll
  for (int d = 1; d < kSelectWarps; d *= 2) {
    const uint32_t other = __shfl_up_sync(~0u, warps, d);
    if (lane >= d) warps += other;
  }
  total = __shfl_sync(~0u, warps, kSelectWarps - 1);
  const uint32_t before = __shfl_sync(~0u, warps, (warp + 31) % 32);
  return (warp > 0 ? before : 0) + sum - value;
}

// One radix step. Source: `int size` and `void load(int first, uint32_t (&ranks)[kVector])`, first a multiple of
// kVector.
template <class Source>
__device__ Cut narrow(const Source& source, Cut cut, SelectScratch& scratch) {
  const bool first = cut.mask == 0;
  const int bits = first ? kFirstBits : kNextBits, bins = 1 << bits;
  const int shift = first ? 32 - kFirstBits : __ffs(cut.mask) - 1 - kNextBits;
  for (int bin = threadIdx.x; bin < bins; bin += kSelectThreads) scratch.bins[bin] = 0;
  __syncthreads();
  for (int i = threadIdx.x * kVector; i < source.size; i += kStep) {
    uint32_t ranks[kVector];
    source.load(i, ranks);
#pragma unroll
    for (int v = 0; v < kVector; ++v)
      if (i + v < source.size && cut.on(ranks[v])) atomicAdd(&scratch.bins[ranks[v] >> shift & (bins - 1)], 1);
  }
  __syncthreads();
  // Bins in falling order, a contiguous run a thread; the run that holds the need-th element decides.
  const int per_thread = bins / kSelectThreads;
  const int highest = bins - 1 - threadIdx.x * per_thread;
  uint32_t mine = 0, total;
  for (int b = 0; b < per_thread; ++b) mine += scratch.bins[highest - b];
  int above = block_scan(mine, scratch, 0, total);
  if (above < cut.need && cut.need <= above + static_cast<int>(mine)) {
    int bin = highest;
    while (above + scratch.bins[bin] < cut.need) above += scratch.bins[bin--];
    scratch.cut = {cut.mask | static_cast<uint32_t>(bins - 1) << shift,
                   cut.prefix | static_cast<uint32_t>(bin) << shift, cut.need - above, scratch.bins[bin]};
  }
  __syncthreads();
  return scratch.cut;
}

// Calls emit(slot, index, rank) for every element above the cut and the first `take` on it, slots in index order.
template <class Source, class Emit>
__device__ void compact(const Source& source, const Cut& cut, int take, SelectScratch& scratch, const Emit& emit) {
  int above = 0, on = 0;  // before this step
  int turn = 0;
  for (int first = 0; first < source.size; first += kStep, turn ^= 1) {
    const int i = first + threadIdx.x * kVector;
    uint32_t ranks[kVector];
    uint32_t mine = 0;  // low half: above, high half: on; a step has kStep < 2^16 elements
    if (i < source.size) source.load(i, ranks);
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      if (i + v >= source.size) continue;
      mine += cut.above(ranks[v]) ? 1u : cut.on(ranks[v]) ? 1u << 16 : 0u;
    }
    uint32_t total;
    const uint32_t before = block_scan(mine, scratch, turn, total);
    int my_above = above + static_cast<int>(before & 0xFFFF), my_on = on + static_cast<int>(before >> 16);
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      if (i + v >= source.size) continue;
      const bool is_above = cut.above(ranks[v]), is_on = cut.on(ranks[v]);
      if (is_above || (is_on && my_on < take)) emit(my_above + min(my_on, take), i + v, ranks[v]);
      my_above += is_above;
      my_on += is_on;
    }
    above += total & 0xFFFF;
    on += total >> 16;
  }
  __syncthreads();  // what was emitted may be read, and the scratch used again
}

}  // namespace sparse_cp_ops
