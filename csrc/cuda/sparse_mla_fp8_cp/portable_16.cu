// The portable kernel with 16 heads a block, 32 keys a step.
#include "portable.cuh"

namespace sparse_cp_ops {

void launch_portable_16(const SparseMlaParams& p, const KeySplit& split, int32_t device_index, cudaStream_t stream) {
  portable::launch<portable::Tile<16, 32>>(p, split, device_index, stream);
}

}  // namespace sparse_cp_ops
