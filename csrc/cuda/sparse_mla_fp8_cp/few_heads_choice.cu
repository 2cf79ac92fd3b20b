// How the kernel for few heads divides a call: heads of a block, parts of the lists.
#include <algorithm>
#include <array>
#include <atomic>

#include "kernels.h"

namespace sparse_cp_ops {
namespace {

// Blocks that run at the same time. Clusters leave multiprocessors over, how many depends on the device's own layout:
// the driver is asked once.
int64_t blocks_at_a_time(const DeviceArch& arch, int32_t device_index, int64_t parts) {
  static std::array<std::array<std::atomic<int>, kFewHeadsParts + 1>, 64> known{};  // clusters and 1
  if (parts == 1) return arch.multiprocessors;
  std::atomic<int>& clusters = known[device_index % 64][parts];
  if (clusters.load() == 0) clusters.store(count_few_heads_clusters(device_index, static_cast<int>(parts)) + 1);
  return (clusters.load() - 1) * parts;
}

// Microseconds of a block that takes a list of so many steps, as measured (docs/kernels/sparse_mla_few_heads.md): its
// first keys and its results, and what each step adds; below three steps nothing gets shorter.
double block_time(int64_t heads, int64_t steps) {
  const double step = heads == 8 ? 0.88 : heads == 16 ? 0.95 : 1.22, rest = heads == 8 ? 7.4 : heads == 16 ? 8.2 : 10.6;
  return rest + step * std::max<int64_t>(steps, 3);
}

}  // namespace

FewHeadsChoice choose_few_heads(const SparseMlaParams& p, const DeviceArch& arch, int32_t device_index) {
  const int64_t steps = p.topk / kIndexListMultiple;
  FewHeadsChoice best{std::min(p.heads, kFewHeads), {}};
  best.split.width = p.topk;
  if (p.batch_invariant || steps <= 1) return best;
  // Those that were measured; in a list of 2048 entries the others are no shorter.
  constexpr int64_t kParts[] = {1, 2, 3, 4, 5, 6, 7, 8, 11, kFewHeadsParts};
  double shortest = 0;
  for (int64_t heads = best.heads; heads >= 8; heads /= 2) {
    for (int64_t parts : kParts) {
      if (parts > std::min(steps, few_heads_parts(heads))) break;
      const int64_t part_steps = (steps + parts - 1) / parts;
      if ((steps + part_steps - 1) / part_steps != parts) continue;  // fewer parts are as long
      const int64_t at_a_time = blocks_at_a_time(arch, device_index, parts);
      if (at_a_time == 0) continue;
      const int64_t blocks = p.rows * (p.heads / heads) * parts;
      const int64_t rounds = (blocks - 1) / at_a_time + 1;
      const double time = rounds * block_time(heads, part_steps);
      if (shortest != 0 && time > shortest) continue;
      shortest = time;
      best.heads = heads;
      best.split.parts = parts;
      best.split.width = part_steps * kIndexListMultiple;
    }
  }
  return best;
}

}  // namespace sparse_cp_ops
