// Choice of the portable kernel's tile.
#include "kernels.h"

namespace sparse_cp_ops {

// More heads a block read every record less often, but need more shared memory: 64 run on Hopper and B200 (227 KB a
// block), 32 on A100 (163 KB), 16 on Ada and small Blackwells (99 KB). Two blocks of 32 or 16 share a 227-KB device.
PortableTile portable_tile(const DeviceArch& arch, int64_t heads) {
  constexpr int kLarge = 227 * 1024, kMedium = 160 * 1024;
  const int blocks_per_sm = arch.shared_bytes >= kLarge ? 2 : 1;
  if (heads >= 64 && arch.shared_bytes >= kLarge) return {64, 1};
  if (heads >= 32 && arch.shared_bytes >= kMedium) return {32, blocks_per_sm};
  return {16, blocks_per_sm};
}

void launch_portable(const SparseMlaParams& p, const KeySplit& split, const DeviceArch& arch, int32_t device_index,
                     cudaStream_t stream) {
  switch (portable_tile(arch, p.heads).heads) {
    case 64: return launch_portable_64(p, split, device_index, stream);
    case 32: return launch_portable_32(p, split, device_index, stream);
    default: return launch_portable_16(p, split, device_index, stream);
  }
}

}  // namespace sparse_cp_ops
