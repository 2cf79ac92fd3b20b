// Scores of a chunk into the workspace, selection from there; the best keys of a row travel from key chunk to key
// chunk.
#include "../arch.h"
#include "../indexer_scores_ragged_cp/scoring.h"
#include "selection.h"
#include "topk_paths.h"

namespace sparse_cp_ops {
namespace {

// Rows and keys that are scored at once, so that all temporary memory fits the workspace. Shapes alone decide.
struct Chunks {
  int64_t rows, keys;
  int64_t kept_bytes;  // of a row: kept keys, read and written, 2 * topk * (rank + position); 0 with one key chunk
  int64_t plan_bytes;  // of the scoring kernel
  int64_t bytes() const { return rows * (keys * 4 + kept_bytes) + plan_bytes; }
};

constexpr int64_t kFewRows = 64;      // more would not all run at once in clusters of blocks
constexpr int64_t kEnoughRows = 512;  // fewer leave processors idle: then shorter key chunks are better

Chunks plan_chunks(const IndexerTopkParams& p, int64_t rows, int64_t budget, int32_t device) {
  constexpr int64_t kKeyUnit = 1024;  // keys of one CTA of the portable scoring kernel, whole tiles of the other
  const int64_t capacity = p.in.capacity();
  if (capacity <= p.topk) return {rows, std::max<int64_t>(capacity, 1), 0, 0};  // nothing is scored
  const int64_t fixed = score_plan_bytes(device, 0) + 16;                       // plans are rounded up to 16 bytes
  const int64_t per_row = (score_plan_bytes(device, 1000) - score_plan_bytes(device, 0) + 999) / 1000;
  const int64_t all_keys = (capacity + 3) / 4 * 4;
  Chunks chunks{std::min(rows, (budget - fixed) / (all_keys * 4 + per_row)), all_keys, 0, 0};
  if (chunks.rows < std::min(rows, kEnoughRows)) {
    chunks.kept_bytes = 2 * p.topk * 8;
    // A chunk of 4 * topk keys spends most of its time on new keys; the smallest workspace holds 15 such rows.
    const int64_t shortest = (4 * p.topk + kKeyUnit - 1) / kKeyUnit * kKeyUnit;
    chunks.rows = std::min({rows, kEnoughRows, (budget - fixed) / (shortest * 4 + chunks.kept_bytes + per_row)});
    const int64_t row_bytes = (budget - fixed) / chunks.rows - per_row;
    chunks.keys = (row_bytes - chunks.kept_bytes) / 4 / kKeyUnit * kKeyUnit;
  }
  // Equal chunks: a last one of a few rows would cost nearly as much time as a full one.
  const int64_t count = (rows + chunks.rows - 1) / std::max<int64_t>(chunks.rows, 1);
  chunks.rows = count > 0 ? (rows + count - 1) / count : 0;
  chunks.plan_bytes = score_plan_bytes(device, chunks.rows);
  return chunks;
}

}  // namespace

int64_t dense_topk_bytes(const IndexerTopkParams& p, int64_t rows, int64_t budget, int32_t device) {
  return p.in.capacity() > p.topk ? plan_chunks(p, rows, budget, device).bytes() : 0;
}

void dense_topk(const IndexerTopkParams& p, const RowSet& rows, const Workspace& workspace, int32_t device,
                cudaStream_t stream) {
  const Chunks chunks = plan_chunks(p, rows.count, workspace.bytes, device);
  const int64_t capacity = std::max<int64_t>(p.in.capacity(), 1);  // no keys at all: still one chunk that writes -1
  float* scores = reinterpret_cast<float*>(workspace.memory);
  KeptKeys kept[2]{};
  uint8_t* behind = workspace.memory + chunks.rows * chunks.keys * 4;
  for (int i = 0; i < 2 && chunks.kept_bytes > 0; ++i, behind += chunks.rows * p.topk * 8)
    kept[i] = {reinterpret_cast<uint32_t*>(behind), reinterpret_cast<int32_t*>(behind) + chunks.rows * p.topk};
  void* plan = behind;
  const bool clusters = device_arch(device).kernels == KernelSet::kSm90;
  for (int64_t row = 0; row < rows.count; row += chunks.rows) {
    RowSet part = rows;
    part.first += row;
    part.count = std::min(chunks.rows, rows.count - row);
    // A row of a list failed a filter before.
    const bool few = rows.list != nullptr || part.count <= kFewRows;
    const bool narrow = capacity <= chunks.keys && capacity <= (clusters && few ? kNarrowBlocks : 1) * kNarrowKeys;
    int turn = 0;
    for (int64_t key = 0; key < capacity; key += chunks.keys, turn ^= 1) {
      const int64_t key_count = std::min(chunks.keys, capacity - key);
      if (capacity > p.topk)
        launch_scores({p.in, scores, chunks.keys, part, key, key_count, p.topk, false}, plan, device, stream);
      const SelectTask task{p, part, scores, chunks.keys, key, key_count, kept[turn], kept[turn ^ 1]};
      if (narrow) launch_narrow_selection(task, device, stream);
      else launch_selection(task, device, stream);
    }
  }
}

}  // namespace sparse_cp_ops
