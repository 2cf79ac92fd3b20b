// indexer_topk_ragged_cp on the CPU: exact top-k of the scores of indexer_scores_ragged_cp, without storing them.
//
// A worker takes a block of rows, scores tile after tile and keeps a list of candidates for each row. With too few rows
// for all workers, the keys of a row are cut into spans with a list each, which are joined at the end. Neither cut
// changes the result: each list holds the exact best of its keys.
#include "../ops/indexer_topk_ragged_cp.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "../ops/op_functions.h"
#include "indexer_scoring.h"

namespace sparse_cp_ops {
namespace {

constexpr int64_t kMinSpan = 4096;  // keys of a list that make up for joining it

// How the work is cut, so that all temporary memory fits workspace_bytes.
struct TopkPlan {
  int64_t workers, row_block, spans, span;  // span: keys of a task
  int64_t slots;                            // rows whose lists exist at a time
  int64_t capacity;                         // keys of a list
  int64_t scratch_bytes;                    // of a worker

  int64_t lists() const { return slots * spans; }
  int64_t bytes() const {
    return lists() * (static_cast<int64_t>(sizeof(TopkCandidates)) + capacity * 8) + workers * scratch_bytes;
  }
};

TopkPlan make_plan(const IndexerTopkParams& p, const IndexerKernel& kernel) {
  const IndexerInputs& in = p.in;
  int64_t longest = 0;
  for (int64_t row = 0; row < in.rows; ++row) longest = std::max(longest, in.keys_of(row));
  const int64_t threads = torch::stable::get_num_threads();

  TopkPlan plan{};
  plan.capacity = 2 * p.topk + kKeyTile;
  auto cut = [&](int64_t workers, int64_t row_block, int64_t max_spans) {
    plan.workers = workers;
    plan.row_block = row_block;
    plan.spans = std::clamp<int64_t>(threads * kTasksPerWorker / ceil_div(in.rows, row_block), 1, max_spans);
    plan.span = ceil_div(ceil_div(longest, plan.spans), kKeyTile) * kKeyTile;
    plan.slots = plan.spans > 1 ? in.rows : workers * row_block;
    plan.scratch_bytes = ScoringScratch::bytes(kernel, in.heads, row_block);
    return plan.bytes() <= p.workspace_bytes;
  };
  int64_t row_block = row_block_of(in.rows, threads), workers = threads;
  if (cut(workers, row_block, std::max<int64_t>(longest / kMinSpan, 1))) return plan;
  while (!cut(workers, row_block, 1) && row_block > 1) row_block /= 2;
  while (!cut(workers, row_block, 1) && workers > 1) --workers;  // one worker needs about 100 KiB
  return plan;
}

class TopkRun {
 public:
  TopkRun(const IndexerTopkParams& params, const IndexerKernel& kernel, const TopkPlan& plan, void* memory)
      : p_(params), kernel_(kernel), plan_(plan) {
    lists_ = static_cast<TopkCandidates*>(memory);
    keys_ = reinterpret_cast<int32_t*>(lists_ + plan.lists());
    scratch_ = reinterpret_cast<uint8_t*>(keys_ + plan.lists() * plan.capacity * 2);
  }

  void run() const {
    const int64_t blocks = ceil_div(p_.in.rows, plan_.row_block);
    run_tasks(blocks * plan_.spans, plan_.workers, [&](int64_t worker, int64_t task) {
      const int64_t row_begin = task / plan_.spans * plan_.row_block;
      const int64_t row_end = std::min(row_begin + plan_.row_block, p_.in.rows);
      const int64_t first_slot = plan_.spans > 1 ? row_begin : worker * plan_.row_block;
      collect(worker, row_begin, row_end, first_slot, task % plan_.spans);
      for (int64_t row = row_begin; row < row_end && plan_.spans == 1; ++row) finish(row, first_slot + row - row_begin);
    });
    if (plan_.spans > 1) run_tasks(p_.in.rows, plan_.workers, [&](int64_t, int64_t row) { finish(row, row); });
  }

 private:
  // The best of the keys of a span, for each row that has more than topk keys.
  void collect(int64_t worker, int64_t row_begin, int64_t row_end, int64_t first_slot, int64_t span) const {
    int64_t limits[kMaxRowBlock];
    for (int64_t row = row_begin; row < row_end; ++row) {
      const int64_t keys = p_.in.keys_of(row), slot = first_slot + row - row_begin;
      limits[row - row_begin] = keys > p_.topk ? keys : 0;
      int32_t* orders = keys_ + slot * plan_.spans * plan_.capacity * 2 + span * plan_.capacity;
      lists_[slot * plan_.spans + span] = {orders, orders + plan_.spans * plan_.capacity};
    }
    auto list_of = [&](int64_t row) -> TopkCandidates& {
      return lists_[(first_slot + row - row_begin) * plan_.spans + span];
    };
    const ScoringScratch scratch(scratch_ + worker * plan_.scratch_bytes, kernel_, p_.in.heads, plan_.row_block);
    score_rows(p_.in, kernel_, scratch, row_begin, row_end, limits, span * plan_.span, (span + 1) * plan_.span,
               [&](int64_t row, int64_t first_key, int64_t keys, const float* scores) {
                 TopkCandidates& list = list_of(row);
                 kernel_.append_candidates(list, scores, keys, first_key);
                 if (list.count > plan_.capacity - kKeyTile) kernel_.keep_best(list, p_.topk);
               });
  }

  // Joins the lists of a row's spans, which lie side by side with ascending positions, and writes its best keys.
  void finish(int64_t row, int64_t slot) const {
    const int64_t keys = p_.in.keys_of(row), selected = std::min(keys, p_.topk);
    int32_t* indices = p_.indices + row * p_.topk;
    std::fill(indices + selected, indices + p_.topk, -1);
    if (keys <= p_.topk) {
      for (int64_t key = 0; key < keys; ++key) indices[key] = static_cast<int32_t>(key);
      return;
    }
    TopkCandidates joined = lists_[slot * plan_.spans];
    for (int64_t span = 1; span < plan_.spans; ++span) {
      const TopkCandidates& list = lists_[slot * plan_.spans + span];
      std::memmove(joined.orders + joined.count, list.orders, list.count * sizeof(int32_t));
      std::memmove(joined.positions + joined.count, list.positions, list.count * sizeof(int32_t));
      joined.count += list.count;
    }
    if (joined.count > p_.topk) kernel_.keep_best(joined, p_.topk);
    std::copy_n(joined.positions, p_.topk, indices);
  }

  const IndexerTopkParams& p_;
  const IndexerKernel& kernel_;
  const TopkPlan& plan_;
  TopkCandidates* lists_;  // [slots, spans]
  int32_t* keys_;          // [slots, {orders, positions}, spans, capacity]
  uint8_t* scratch_;       // [workers, scratch_bytes]
};

}  // namespace

Tensor indexer_topk_ragged_cp(const Tensor& q_fp8, const Tensor& q_weights, const Tensor& indexer_cache,
                              const Tensor& block_table, const Tensor& req_ids, const Tensor& kv_lens, int64_t topk,
                              int64_t workspace_bytes, std::string precision) {
  IndexerTopkCall call = prepare_indexer_topk_ragged_cp(q_fp8, q_weights, indexer_cache, block_table, req_ids, kv_lens,
                                                        topk, workspace_bytes, precision);
  const IndexerTopkParams& p = call.params;
  if (value_checks_enabled()) check_indexer_values(p.in);
  if (p.in.rows == 0) return call.indices;
  const IndexerKernel& kernel = indexer_kernel(cpu_isa());
  const TopkPlan plan = make_plan(p, kernel);
  Tensor memory = new_tensor(q_fp8, {plan.bytes()});
  TopkRun(p, kernel, plan, memory.data_ptr()).run();
  return call.indices;
}

}  // namespace sparse_cp_ops

STABLE_TORCH_LIBRARY_IMPL(sparse_cp_ops, CPU, m) {
  m.impl("indexer_topk_ragged_cp", TORCH_BOX(&sparse_cp_ops::indexer_topk_ragged_cp));
}
