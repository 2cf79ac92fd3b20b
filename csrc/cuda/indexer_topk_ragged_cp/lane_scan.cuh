// Sums over the lanes before this one.
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

}  // namespace sparse_cp_ops
