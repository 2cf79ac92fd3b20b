#include "planner.h"

#include <limits>
#include <sstream>
#include <stdexcept>

#include "../plan_limits.h"

namespace sparse_cp_ops {
namespace {

constexpr int64_t kInt32Max = std::numeric_limits<int32_t>::max();

template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw std::invalid_argument(message.str());
}

void check_request(int64_t request, int64_t prefix_len, int64_t new_len, const PlanArguments& a) {
  if (new_len < 0) fail("new_lens[", request, "]: expected a length >= 0, got ", new_len);
  if (prefix_len < 0) fail("prefix_lens[", request, "]: expected a length >= 0, got ", prefix_len);
  const int64_t kv_len = prefix_len + new_len;
  if (kv_len > kInt32Max)
    fail("request ", request, ": expected prefix_len + new_len to fit int32, got ", prefix_len, " + ", new_len);
  if (a.max_positions != kUnlimited && kv_len > a.max_positions)
    fail("request ", request, ": expected prefix_len + new_len <= max_positions = ", a.max_positions, ", got ",
         prefix_len, " + ", new_len);
  const int64_t pages = (kv_len + a.page_size - 1) / a.page_size;
  if (a.table_width != kUnlimited && pages > a.table_width)
    fail("block_table: expected at least ", pages, " columns for the ", prefix_len, " + ", new_len,
         " tokens of request ", request, " with page_size ", a.page_size, ", got ", a.table_width);
}

}  // namespace

void check_plan_arguments(const PlanArguments& a) {
  if (a.cp_size < 1 || a.cp_size > kMaxCpSize)
    fail("cp_size: expected a size in [1, ", kMaxCpSize, "], got ", a.cp_size);
  if (a.cp_rank < 0 || a.cp_rank >= a.cp_size)
    fail("cp_rank: expected a rank in [0, ", a.cp_size, "), got ", a.cp_rank);
  if (a.split != "zigzag" && a.split != "interleave")
    fail("split: expected 'zigzag' or 'interleave', got '", a.split, "'");
  if (a.page_size != 16 && a.page_size != 32 && a.page_size != 64 && a.page_size != 128)
    fail("page_size: expected 16, 32, 64 or 128, got ", a.page_size);
}

PlanSizes plan_requests(Lengths new_lens, Lengths prefix_lens, int64_t requests, const PlanArguments& a) {
  check_plan_arguments(a);
  const bool zigzag = a.split == "zigzag";
  const int64_t chunks = 2 * a.cp_size;
  PlanSizes sizes{};
  for (int64_t b = 0; b < requests; ++b) {
    const int64_t prefix_len = prefix_lens[b], new_len = new_lens[b];
    check_request(b, prefix_len, new_len, a);
    sizes.total_tokens += new_len;
    if (sizes.total_tokens > kInt32Max) fail("new_lens: expected the sum of all lengths to fit int32");
    sizes.kv_work += new_len * prefix_len + new_len * (new_len + 1) / 2;
    if (zigzag) sizes.local_rows += 2 * ((new_len + chunks - 1) / chunks);
  }
  if (!zigzag) sizes.local_rows = (sizes.total_tokens + a.cp_size - 1) / a.cp_size;
  if (sizes.local_rows > kInt32Max / a.cp_size)
    fail("new_lens: expected cp_size * local_rows to fit int32, got ", a.cp_size, " * ", sizes.local_rows);
  return sizes;
}

void fill_request_table(Lengths new_lens, Lengths prefix_lens, int64_t requests, int32_t* table, int64_t table_rows) {
  for (int64_t b = 0; b < table_rows; ++b) {
    table[2 * b] = b < requests ? static_cast<int32_t>(prefix_lens[b]) : 0;
    table[2 * b + 1] = b < requests ? static_cast<int32_t>(new_lens[b]) : 0;
  }
}

}  // namespace sparse_cp_ops
