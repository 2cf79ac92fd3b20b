// The portable kernel with 32 heads a block, 32 keys a step.
#include "portable.cuh"

namespace sparse_cp_ops {

void launch_portable_32(const SparseMlaParams& p, const KeySplit& split, int32_t device_index, cudaStream_t stream) {
  portable::launch<portable::Tile<32, 32>>(p, split, device_index, stream);
}

}  // namespace sparse_cp_ops
