// Thresholds from a sample, survivor lists from the other keys, selection among them; on Hopper.
#include "../arch.h"
#include "../indexer_scores_ragged_cp/scoring.h"
#include "selection.h"
#include "survivors.h"
#include "topk_paths.h"

namespace sparse_cp_ops {
namespace {

constexpr int64_t kAlignment = 256;

int64_t aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// Sizes that shapes decide. A larger sample costs memory, a smaller one looser thresholds and so longer lists.
struct Layout {
  int64_t slots;  // rows at once
  int64_t sample_keys;
  int list_capacity;
  int ctas;

  int64_t plan() const { return aligned(ScorePlan::bytes(slots)); }
  int64_t sample() const { return aligned(slots * sample_keys * 4); }
  int64_t regions() const { return SurvivorLists::regions(slots, ctas); }
  int64_t entries() const { return aligned(regions() * SurvivorLists::kLanes * list_capacity * sizeof(Survivor)); }
  int64_t counts() const { return aligned(regions() * SurvivorLists::kLanes * 4); }
  int64_t per_slot() const { return aligned(slots * 4); }
  // The number of failed rows and the list counts start as zeros.
  int64_t zeroed() const { return kAlignment + counts(); }
  // The failed rows and their number stay while dense_topk uses the rest again.
  int64_t kept() const { return zeroed() + per_slot(); }
  int64_t bytes() const { return kept() + 2 * per_slot() + plan() + sample() + entries(); }
};

Layout make_layout(const IndexerTopkParams& p, int64_t budget, int32_t device) {
  const int64_t capacity = p.in.capacity();
  Layout layout{p.in.rows, 0, 0, std::min(device_arch(device).multiprocessors, kMaxCtas)};
  // One key in 16, up to 128K keys. Sparser samples need more survivors (2880 of 2048), of which a lane's list gets a
  // 32nd, and scatter more: lists that are 5 standard deviations longer hardly ever fill up.
  layout.sample_keys = std::clamp<int64_t>((capacity + 15) / 16, 2048, kMaxSampleKeys);
  layout.sample_keys = (layout.sample_keys + kTileKeys - 1) / kTileKeys * kTileKeys;
  layout.list_capacity = capacity <= 131072 ? 160 : 192;
  for (int64_t chunks = 1; layout.bytes() > budget && layout.slots > 1; ++chunks) {
    const int64_t even = (p.in.rows + chunks - 1) / chunks;
    layout.slots = std::min(p.in.rows, (even + kBlockRows - 1) / kBlockRows * kBlockRows);
    if (chunks > p.in.rows) break;
  }
  return layout;
}

}  // namespace

bool streamed_topk_fits(const IndexerTopkParams& p, int64_t budget, int32_t device) {
  constexpr int64_t kFewestRows = 1000;  // with fewer, scores stay in the L2 cache anyhow
  if (device_arch(device).kernels != KernelSet::kSm90) return false;
  if (p.in.capacity() <= kNarrowKeys || p.in.capacity() > kMaxSurvivorKeys) return false;
  // Blocks of rows of one request must be well filled.
  if (p.in.rows < kFewestRows || p.in.rows < 2 * kBlockRows * p.in.requests) return false;
  const Layout layout = make_layout(p, budget, device);
  return layout.bytes() <= budget && layout.slots >= std::min(p.in.rows, kFewestRows);
}

int64_t streamed_topk_bytes(const IndexerTopkParams& p, int64_t budget, int32_t device) {
  return make_layout(p, budget, device).bytes();
}

void streamed_topk(const IndexerTopkParams& p, const Workspace& workspace, int32_t device, cudaStream_t stream) {
  const Layout layout = make_layout(p, workspace.bytes, device);
  uint8_t* at = workspace.memory;
  const auto take = [&at](int64_t bytes) { return std::exchange(at, at + bytes); };
  SurvivorTask task{p, {}};
  task.failed_count = reinterpret_cast<int32_t*>(take(kAlignment));
  task.lists.counts = reinterpret_cast<int32_t*>(take(layout.counts()));
  task.failed = reinterpret_cast<int32_t*>(take(layout.per_slot()));
  task.thresholds = reinterpret_cast<float*>(take(layout.per_slot()));
  task.sample_counts = reinterpret_cast<int32_t*>(take(layout.per_slot()));
  task.plan = ScorePlan::at(take(layout.plan()), layout.slots);
  task.sample = reinterpret_cast<float*>(take(layout.sample()));
  task.sample_stride = layout.sample_keys;
  task.lists.entries = reinterpret_cast<Survivor*>(take(layout.entries()));
  task.lists.thresholds = task.thresholds;
  task.lists.capacity = layout.list_capacity;
  const int64_t capacity = p.in.capacity();

  for (int64_t row = 0; row < p.in.rows; row += layout.slots) {
    task.rows = {row, std::min(layout.slots, p.in.rows - row), nullptr, nullptr};
    check_cuda(cudaMemsetAsync(task.failed_count, 0, layout.zeroed(), stream), "cudaMemsetAsync");
    launch_score_plan({p.in, task.rows, 0, capacity, p.topk, layout.sample_keys, layout.ctas, task.plan}, device,
                      stream);
    const auto score = [&](Sweep sweep) {
      launch_sm90_scores({p.in, task.rows, task.plan, sweep, 0, capacity, p.topk,
                          sweep == Sweep::kSample ? task.sample : nullptr, layout.sample_keys, task.lists},
                         layout.ctas, device, stream);
    };
    score(Sweep::kSample);
    launch_thresholds(task, device, stream);
    score(Sweep::kRest);
    launch_survivor_selection(task, device, stream);
    dense_topk(p, {0, task.rows.count, task.failed, task.failed_count},
               {workspace.memory + layout.kept(), layout.bytes() - layout.kept()}, device, stream);
  }
}

}  // namespace sparse_cp_ops
