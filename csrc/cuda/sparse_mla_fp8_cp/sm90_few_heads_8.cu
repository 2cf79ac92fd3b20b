// The Hopper kernel for few heads with 8 heads a block.
#include "sm90_few_heads_kernel.cuh"

namespace sparse_cp_ops {

void launch_few_heads_8(const SparseMlaParams& p, const KeySplit& split, const DeviceArch& arch, int32_t device_index,
                        cudaStream_t stream) {
  few_heads::launch<few_heads::Shape<8, 3>>(p, split, arch, device_index, stream);
}

int count_few_heads_clusters(int32_t device_index, int blocks) {
  return few_heads::count_clusters<few_heads::Shape<8, 3>>(device_index, blocks);
}

}  // namespace sparse_cp_ops
