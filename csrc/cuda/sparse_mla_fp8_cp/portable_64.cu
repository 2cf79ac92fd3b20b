// The portable kernel with 64 heads a block, 64 keys a step.
#include "portable.cuh"

namespace sparse_cp_ops {

void launch_portable_64(const SparseMlaParams& p, const KeySplit& split, int32_t device_index, cudaStream_t stream) {
  portable::launch<portable::Tile<64, 64>>(p, split, device_index, stream);
}

}  // namespace sparse_cp_ops
