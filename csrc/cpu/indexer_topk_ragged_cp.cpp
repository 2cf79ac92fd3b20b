// indexer_topk_ragged_cp on the CPU: exact top-k of the scores of indexer_scores_ragged_cp, without storing them.
//
// A worker takes a block of rows, scores tile after tile and keeps a running candidate list a row. If there are fewer
// rows than workers, each row's keys are cut into spans with a list each, which are joined at the end.
#include "../ops/indexer_topk_ragged_cp.h"

#include <torch/csrc/stable/library.h>

#include "indexer_scoring.h"
#include "topk_candidates.h"

namespace sparse_cp_ops {
namespace {

constexpr int64_t kTasksPerWorker = 4;  // rows have different lengths: several tasks even out
constexpr int64_t kMinSpan = 4096;      // keys of a list that are worth joining it

// How the work is cut; the result does not depend on it.
struct TopkPlan {
  int64_t workers, row_block, spans, span, capacity;
  int64_t scratch_bytes, list_bytes, lists;

  int64_t bytes() const { return workers * scratch_bytes + lists * list_bytes; }
};

TopkPlan make_plan(const IndexerTopkParams& p, const IndexerKernel& kernel) {
  const auto& in = p.in;
  TopkPlan plan{};
  auto resize = [&](int64_t workers, int64_t row_block, int64_t capacity) {
    plan.workers = workers;
    plan.row_block = row_block;
    plan.capacity = capacity;
    plan.scratch_bytes = ScoringScratch::bytes(kernel, in.heads, row_block);
    plan.list_bytes = capacity * 8;
    plan.lists = workers * row_block;
  };
  const int64_t threads = torch::stable::get_num_threads();
  plan.spans = 1;
  plan.span = in.capacity();
  int64_t workers = threads, row_block = std::clamp<int64_t>(in.rows / (threads * kTasksPerWorker), 1, kMaxRowBlock);
  resize(workers, row_block, 2 * p.topk + kKeyTile);
  while (plan.bytes() > p.workspace_bytes && row_block > 1) resize(workers, row_block /= 2, plan.capacity);
  while (plan.bytes() > p.workspace_bytes && workers > 1) resize(--workers, row_block, plan.capacity);
  return plan;
}

void select_block(const IndexerTopkParams& p, const IndexerKernel& kernel, const TopkPlan& plan,
                  uint8_t* scratch_memory, uint8_t* list_memory, int64_t row_begin, int64_t row_end) {
  const auto& in = p.in;
  int64_t limits[kMaxRowBlock];
  TopkCandidates lists[kMaxRowBlock];
  for (int64_t row = row_begin; row < row_end; ++row) {
    const int64_t keys = in.keys_of(row), i = row - row_begin;
    limits[i] = keys > p.topk ? keys : 0;
    auto* order = reinterpret_cast<uint32_t*>(list_memory + i * plan.list_bytes);
    lists[i] = {order, reinterpret_cast<int32_t*>(order + plan.capacity), 0, 0};
  }
  const ScoringScratch scratch(scratch_memory, kernel, in.heads, plan.row_block);
  score_rows(in, kernel, scratch, row_begin, row_end, limits, 0, in.capacity(),
             [&](int64_t row, int64_t first_key, int64_t keys, const float* scores) {
               TopkCandidates& list = lists[row - row_begin];
               list.append(scores, keys, first_key);
               if (list.count > plan.capacity - kKeyTile) list.keep_best(p.topk);
             });
  for (int64_t row = row_begin; row < row_end; ++row) {
    const int64_t i = row - row_begin, count = std::min(in.keys_of(row), p.topk);
    int32_t* indices = p.indices + row * p.topk;
    if (limits[i] == 0) {
      for (int64_t key = 0; key < count; ++key) indices[key] = static_cast<int32_t>(key);
      std::fill(indices + count, indices + p.topk, -1);
    } else {
      if (lists[i].count > p.topk) lists[i].keep_best(p.topk);
      std::copy_n(lists[i].positions, p.topk, indices);
    }
  }
}

Tensor indexer_topk_ragged_cp(const Tensor& q_fp8, const Tensor& q_weights, const Tensor& indexer_cache,
                              const Tensor& block_table, const Tensor& req_ids, const Tensor& kv_lens, int64_t topk,
                              int64_t workspace_bytes, std::string precision) {
  IndexerTopkCall call = prepare_indexer_topk_ragged_cp(q_fp8, q_weights, indexer_cache, block_table, req_ids, kv_lens,
                                                        topk, workspace_bytes, precision);
  const IndexerTopkParams& p = call.params;
  if (value_checks_enabled()) check_indexer_values(p.in);
  const IndexerKernel& kernel = indexer_kernel(cpu_isa());
  const TopkPlan plan = make_plan(p, kernel);
  const Tensor memory = torch::stable::new_empty(q_fp8, {plan.bytes()});
  auto* base = static_cast<uint8_t*>(memory.mutable_data_ptr());
  run_tasks(ceil_div(p.in.rows, plan.row_block), plan.workers, [&](int64_t worker, int64_t task) {
    uint8_t* lists = base + plan.workers * plan.scratch_bytes + worker * plan.row_block * plan.list_bytes;
    const int64_t row = task * plan.row_block;
    select_block(p, kernel, plan, base + worker * plan.scratch_bytes, lists, row,
                 std::min(row + plan.row_block, p.in.rows));
  });
  return call.indices;
}

}  // namespace
}  // namespace sparse_cp_ops

STABLE_TORCH_LIBRARY_IMPL(sparse_cp_ops, CPU, m) {
  m.impl("indexer_topk_ragged_cp", TORCH_BOX(&sparse_cp_ops::indexer_topk_ragged_cp));
}
