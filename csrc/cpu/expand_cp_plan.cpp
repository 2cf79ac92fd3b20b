// expand_cp_plan on the CPU: prefix sums over the requests, then every row and token by itself.
#include "../ops/expand_cp_plan.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <tuple>
#include <vector>

namespace sparse_cp_ops {
namespace {

constexpr int64_t kGrain = 16384;  // rows a thread: some 50 us of work, well above the cost of waking one

// Starts of all requests and, behind them, the end of the batch.
std::vector<RequestStart> request_starts(const ExpandCpPlanParams& p) {
  std::vector<RequestStart> starts(p.requests + 1, RequestStart{0, 0});
  for (int64_t b = 0; b < p.requests; ++b) starts[b + 1] = starts[b] + extent(load_request(p, b, starts[b]));
  return starts;
}

// Finds the requests of growing keys: it walks on from the last one.
class RequestCursor {
 public:
  RequestCursor(const ExpandCpPlanParams& p, const std::vector<RequestStart>& starts, bool by_row)
      : p_(p), starts_(starts), by_row_(by_row) {}

  // True if `x` lies in another request than the last one.
  bool moved_to(uint32_t x) {
    if (x < end_) return false;
    const auto behind =
        std::upper_bound(starts_.begin(), starts_.end(), x,
                         [this](uint32_t value, const RequestStart& start) { return value < key_of(start, by_row_); });
    const int64_t id = behind - starts_.begin() - 1;
    if (id < p_.requests) {
      request_ = load_request(p_, id, starts_[id]);
      end_ = key_of(starts_[id + 1], by_row_);
    } else {
      request_.id = p_.requests;
      end_ = kBehind;
    }
    return true;
  }

  const Request& request() const { return request_; }

 private:
  const ExpandCpPlanParams& p_;
  const std::vector<RequestStart>& starts_;
  bool by_row_;
  uint32_t end_ = 0;  // keys below it belong to the request
  Request request_{};
};

void expand_rows(const ExpandCpPlanParams& p, const std::vector<RequestStart>& starts, int64_t rank, int64_t begin,
                 int64_t end) {
  RequestCursor cursor(p, starts, p.zigzag);
  for (int64_t row = begin; row < end; ++row) {
    cursor.moved_to(row_key(p, rank, row));
    const PlanRow out = expand_row(p, rank, row, cursor.request());
    p.gathered_req_ids[rank * p.local_rows + row] = out.req_id;
    p.gathered_positions[rank * p.local_rows + row] = out.position;
    if (rank != p.cp_rank) continue;
    p.req_ids[row] = out.req_id;
    p.positions[row] = out.position;
    p.kv_lens[row] = out.kv_len;
    p.token_ids[row] = out.token_id;
  }
}

void expand_tokens(const ExpandCpPlanParams& p, const std::vector<RequestStart>& starts, int64_t begin, int64_t end) {
  RequestCursor cursor(p, starts, false);
  TokenPlace place{};
  for (int64_t token = begin; token < end; ++token) {
    if (!cursor.moved_to(token)) place.next(p, cursor.request());
    else if (cursor.request().id < p.requests) place = TokenPlace::of(p, token, cursor.request());
    p.restore[token] = restore_row(p, token, cursor.request(), place);
  }
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> expand_cp_plan(const Tensor& request_table,
                                                                                  int64_t cp_rank, int64_t cp_size,
                                                                                  const std::string& split,
                                                                                  int64_t local_rows,
                                                                                  int64_t total_tokens) {
  ExpandCpPlanCall call = prepare_expand_cp_plan(request_table, cp_rank, cp_size, split, local_rows, total_tokens);
  const auto& p = call.params;
  if (value_checks_enabled()) check_plan_fits(p, request_table);
  const std::vector<RequestStart> starts = request_starts(p);
  torch::stable::parallel_for(0, p.cp_size * p.local_rows, kGrain, [&](int64_t begin, int64_t end) {
    while (begin < end) {  // rank by rank
      const int64_t rank = begin / p.local_rows, first = begin - rank * p.local_rows;
      const int64_t rows = std::min(end - begin, p.local_rows - first);
      expand_rows(p, starts, rank, first, first + rows);
      begin += rows;
    }
  });
  torch::stable::parallel_for(0, p.total_tokens, kGrain,
                              [&](int64_t begin, int64_t end) { expand_tokens(p, starts, begin, end); });
  return {call.req_ids,          call.positions,          call.kv_lens, call.token_ids,
          call.gathered_req_ids, call.gathered_positions, call.restore};
}

}  // namespace
}  // namespace sparse_cp_ops

STABLE_TORCH_LIBRARY_IMPL(sparse_cp_ops, CPU, m) {
  m.impl("expand_cp_plan", TORCH_BOX(&sparse_cp_ops::expand_cp_plan));
}
