// The Hopper kernel with keys from the records: few rows, or a cache too large for a workspace.
#include "sm90_direct_producer.cuh"
#include "sm90_kernel.cuh"

namespace sparse_cp_ops {

void launch_sm90_direct(const SparseMlaParams& p, const KeySplit& split, const DeviceArch& arch, int32_t device_index,
                        cudaStream_t stream) {
  sm90::launch<sm90::DirectSource, true>(p, split, sm90::DirectSource{}, arch, device_index, stream);
}

}  // namespace sparse_cp_ops
