// Sums over the lanes or threads before this one.
#pragma once

namespace sparse_cp_ops {

__device__ __forceinline__ int lanes_before(int value, int& total) {
  int through = value;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int other = __shfl_up_sync(~0u, through, d);
    if (threadIdx.x % 32 >= d) through += other;
  }
  total = __shfl_sync(~0u, through, 31);
  return through - value;
}

// One barrier; `sums` must not be in use from an earlier call.
template <int WARPS>
__device__ __forceinline__ int threads_before(int value, int (&sums)[WARPS]) {
  int total;
  const int in_warp = lanes_before(value, total), lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (lane == 0) sums[warp] = total;
  __syncthreads();
  int unused;
  const int warps = lanes_before(lane < WARPS ? sums[lane] : 0, unused);
  return __shfl_sync(~0u, warps, warp) + in_warp;
}

}  // namespace sparse_cp_ops
