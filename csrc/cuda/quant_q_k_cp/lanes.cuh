// A vector of 128 values in the registers of two or four lanes: RoPE, Hadamard transform and largest magnitude.
//
// With n lanes a warp works on 32 / n vectors. Lane j of a vector holds the values 8 * (n * m + j) + e (e < 8) as
// v[8 * m + e]. So loads are 16 bytes wide, every RoPE pair of 64 dimensions stays inside a lane in both layouts, and
// of the seven butterfly strides only 8 (and 16 for four lanes) cross lanes.
#pragma once

#include "encode.cuh"

namespace sparse_cp_ops {

template <int kLanes>
struct Layout {
  static constexpr int kVectors = 32 / kLanes;              // of a warp
  static constexpr int kPieces = kIndexDim / (8 * kLanes);  // of 8 values, of a lane
  static constexpr int kValues = kPieces * 8;

  static __device__ __forceinline__ int vector() { return threadIdx.x % 32 / kLanes; }
  static __device__ __forceinline__ int lane() { return threadIdx.x % kLanes; }
  static __device__ __forceinline__ int dim(int piece) { return 8 * (kLanes * piece + lane()); }  // its first value's
};

inline constexpr int kRopeDims = 64;  // the usual ones

// RoPE of the usual dimensions: the pairs of a lane are half a RoPE part or one value apart. load4(i, out) reads four
// cosines from pair i on, or sines from pair i - 32 on.
template <int kLanes, class Load4>
__device__ __forceinline__ void rope_in_lane(float (&v)[Layout<kLanes>::kValues], bool interleaved, Load4 load4) {
  using L = Layout<kLanes>;
  constexpr int kHalf = L::kPieces / 4;  // pieces of a half of the RoPE part
  float cosines[4], sines[4];
  if (interleaved) {
#pragma unroll
    for (int m = 0; m < 2 * kHalf; ++m) {
      load4(L::dim(m) / 2, cosines);
      load4(kRopeDims / 2 + L::dim(m) / 2, sines);
#pragma unroll
      for (int i = 0; i < 4; ++i) rotate(v[8 * m + 2 * i], v[8 * m + 2 * i + 1], cosines[i], sines[i]);
    }
  } else {
#pragma unroll
    for (int m = 0; m < kHalf; ++m)
#pragma unroll
      for (int first = 0; first < 8; first += 4) {
        load4(L::dim(m) + first, cosines);
        load4(kRopeDims / 2 + L::dim(m) + first, sines);
#pragma unroll
        for (int i = first; i < first + 4; ++i)
          rotate(v[8 * m + i], v[8 * (m + kHalf) + i], cosines[i - first], sines[i - first]);
      }
  }
}

// A stage between lanes: the lane with the bit holds the second value of each pair.
template <int kCount>
__device__ __forceinline__ void butterfly_lanes(float (&v)[kCount], int lane_bit) {
  const float sign = threadIdx.x & lane_bit ? -1.0f : 1.0f;
#pragma unroll
  for (int i = 0; i < kCount; ++i)  // the product with +-1 is exact: one rounding, as in a + b and a - b
    v[i] = __fmaf_rn(v[i], sign, __shfl_xor_sync(0xFFFFFFFFu, v[i], lane_bit));
}

// Hadamard transform without its factor; returns the largest magnitude of this lane's results, NaN if one is NaN.
template <int kLanes>
__device__ __forceinline__ float hadamard_transform(float (&v)[Layout<kLanes>::kValues]) {
  constexpr int kLast = Layout<kLanes>::kValues / 2;  // stride 64
  butterfly(v, 1);
  butterfly(v, 2);
  butterfly(v, 4);
#pragma unroll
  for (int lanes = 1; lanes < kLanes; lanes *= 2) butterfly_lanes(v, lanes);
#pragma unroll
  for (int stride = 8; stride < kLast; stride *= 2) butterfly(v, stride);
  // The larger one of |a + b| and |a - b| is |a| + |b|, also when rounded: additions are cheaper than maxima.
  float sums[kLast];
#pragma unroll
  for (int i = 0; i < kLast; ++i) sums[i] = __fadd_rn(fabsf(v[i]), fabsf(v[i + kLast]));
  butterfly(v, kLast);
  return largest_magnitude(sums);
}

// Over the lanes of a vector.
template <int kLanes>
__device__ __forceinline__ float vector_amax(float amax) {
#pragma unroll
  for (int lanes = 1; lanes < kLanes; lanes *= 2) amax = max_or_nan(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, lanes));
  return amax;
}

}  // namespace sparse_cp_ops
