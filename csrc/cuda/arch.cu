// The table behind device_arch().
#include "arch.h"

#include <cstdlib>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>

namespace sparse_cp_ops {
namespace {

struct TableEntry {
  const char* name;  // value of SPARSE_CP_OPS_ARCH
  KernelSet kernels;
  int min_capability, max_capability;  // 10 * major + minor
};

// The first entry that fits a device is its automatic choice. sm_90a code runs on capability 9.0 alone.
constexpr TableEntry kTable[] = {
    {"sm90", KernelSet::kSm90, 90, 90},
    {"portable", KernelSet::kPortable, 80, 1 << 20},
};

int attribute(cudaDeviceAttr name, int32_t device_index) {
  int value = 0;
  check_cuda(cudaDeviceGetAttribute(&value, name, device_index), "cudaDeviceGetAttribute");
  return value;
}

DeviceArch inspect(int32_t device_index) {
  const int capability = 10 * attribute(cudaDevAttrComputeCapabilityMajor, device_index) +
                         attribute(cudaDevAttrComputeCapabilityMinor, device_index);
  const char* value = std::getenv("SPARSE_CP_OPS_ARCH");
  const std::string wanted = value == nullptr || value[0] == '\0' ? "auto" : value;
  bool known = wanted == "auto";
  for (const TableEntry& entry : kTable) {
    known |= wanted == entry.name;
    if (wanted != "auto" && wanted != entry.name) continue;
    if (capability < entry.min_capability || capability > entry.max_capability) continue;
    return {entry.kernels, attribute(cudaDevAttrMultiProcessorCount, device_index),
            attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device_index)};
  }
  const std::string device = "cuda:" + std::to_string(device_index) + " of compute capability " +
                             std::to_string(capability / 10) + "." + std::to_string(capability % 10);
  if (!known)
    throw std::invalid_argument("SPARSE_CP_OPS_ARCH: expected auto, portable or sm90, got \"" + wanted + "\"");
  if (wanted == "auto")
    throw std::invalid_argument("sparse_cp_ops needs compute capability 8.0 or newer, got " + device);
  throw std::invalid_argument("SPARSE_CP_OPS_ARCH=" + wanted + " does not run on " + device);
}

}  // namespace

const DeviceArch& device_arch(int32_t device_index) {
  static std::mutex mutex;
  static std::map<int32_t, DeviceArch> known;
  const std::lock_guard<std::mutex> lock(mutex);
  auto found = known.find(device_index);
  if (found == known.end()) found = known.emplace(device_index, inspect(device_index)).first;
  return found->second;
}

}  // namespace sparse_cp_ops
