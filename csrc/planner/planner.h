// Host part of planning a forward: checks the request lengths and sizes the per-row tensors. O(requests), no torch.
#pragma once

#include <cstdint>
#include <string>

namespace sparse_cp_ops {

inline constexpr int64_t kUnlimited = -1;

struct PlanArguments {
  int64_t cp_rank, cp_size;
  std::string split;      // "zigzag" or "interleave"
  int64_t page_size;      // tokens a page
  int64_t table_width;    // pages a request in the block table, or kUnlimited
  int64_t max_positions;  // rows of the RoPE cache, or kUnlimited
};

struct PlanSizes {
  int64_t local_rows;    // of every rank, pads included
  int64_t total_tokens;  // new tokens of the batch
  int64_t kv_work;       // (query, key) pairs: the sum of kv_len over the new tokens
};

// One length a request, anywhere in memory.
struct Lengths {
  const int32_t* data;
  int64_t stride;  // elements
  int64_t operator[](int64_t request) const { return data[request * stride]; }
};

// Throw std::invalid_argument naming the argument or request, what was expected and what came.
void check_plan_arguments(const PlanArguments& arguments);
PlanSizes plan_requests(Lengths new_lens, Lengths prefix_lens, int64_t requests, const PlanArguments& arguments);

// Fills an int32 [table_rows, 2] table with (prefix_len, new_len), zeros behind the last request.
void fill_request_table(Lengths new_lens, Lengths prefix_lens, int64_t requests, int32_t* table, int64_t table_rows);

}  // namespace sparse_cp_ops
