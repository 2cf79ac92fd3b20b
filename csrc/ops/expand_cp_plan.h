// expand_cp_plan: checks, parameters and the row arithmetic, shared by the CPU and CUDA kernels.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <cstdint>
#include <string>

#include "../tensor_checks.h"

#ifdef __CUDACC__
#define SCO_HOST_DEVICE __host__ __device__
#else
#define SCO_HOST_DEVICE
#endif

namespace sparse_cp_ops {

struct ExpandCpPlanParams {
  const int32_t* request_table;  // [B, 2] = (prefix_len, new_len); negative counts as 0
  int32_t* req_ids;              // [L]
  int32_t* positions;            // [L]
  int32_t* kv_lens;              // [L]
  int32_t* token_ids;            // [L]
  int32_t* gathered_req_ids;     // [S * L]
  int32_t* gathered_positions;   // [S * L]
  int32_t* restore;              // [T]
  int64_t requests, cp_rank, cp_size, local_rows, total_tokens;
  bool zigzag;
};

struct ExpandCpPlanCall {
  ExpandCpPlanParams params;
  Tensor req_ids, positions, kv_lens, token_ids, gathered_req_ids, gathered_positions, restore;
};

// Where a request starts: in every rank's zigzag rows and in the packed token stream.
struct RequestStart {
  int64_t row, token;
};

struct RequestLens {
  int64_t prefix, fresh;  // cached and new tokens
};

// The request that a row or token belongs to; `id` is the number of requests behind the batch.
struct FoundRequest {
  int64_t id;
  RequestStart start;
  RequestLens lens;
};

struct PlanRow {
  int32_t req_id = -1, position = 0, kv_len = 0, token_id = -1;
};

SCO_HOST_DEVICE inline RequestLens request_lens(const ExpandCpPlanParams& p, int64_t request) {
  const int32_t prefix = p.request_table[2 * request], fresh = p.request_table[2 * request + 1];
  return {prefix > 0 ? prefix : 0, fresh > 0 ? fresh : 0};
}

// Zigzag cuts a request into 2 * cp_size chunks of this many tokens; rank r owns chunks r and 2 * cp_size - 1 - r.
SCO_HOST_DEVICE inline int64_t chunk_tokens(int64_t fresh, int64_t cp_size) {
  return (fresh + 2 * cp_size - 1) / (2 * cp_size);
}

SCO_HOST_DEVICE inline RequestStart next_start(RequestStart start, RequestLens lens, int64_t cp_size) {
  return {start.row + 2 * chunk_tokens(lens.fresh, cp_size), start.token + lens.fresh};
}

// What a row is looked up by: its zigzag row or its token (RequestStart::row or ::token).
SCO_HOST_DEVICE inline int64_t row_key(const ExpandCpPlanParams& p, int64_t rank, int64_t row) {
  return p.zigzag ? row : row * p.cp_size + rank;
}

// A token whose kv_len leaves int32 has no row.
SCO_HOST_DEVICE inline bool is_token(RequestLens lens, int64_t offset) {
  return offset < lens.fresh && lens.prefix + offset < INT32_MAX;
}

SCO_HOST_DEVICE inline PlanRow expand_row(const ExpandCpPlanParams& p, int64_t rank, int64_t row,
                                          const FoundRequest& request) {
  if (request.id >= p.requests) return {};
  int64_t offset;
  if (p.zigzag) {
    const int64_t chunk = chunk_tokens(request.lens.fresh, p.cp_size), within = row - request.start.row;
    offset = within < chunk ? rank * chunk + within : (2 * p.cp_size - 1 - rank) * chunk + within - chunk;
  } else {
    offset = row_key(p, rank, row) - request.start.token;
  }
  if (!is_token(request.lens, offset)) return {};
  const int64_t position = request.lens.prefix + offset;
  return {static_cast<int32_t>(request.id), static_cast<int32_t>(position), static_cast<int32_t>(position + 1),
          static_cast<int32_t>(request.start.token + offset)};
}

// Gathered row of a token; -1 behind the batch and where its row was cut.
SCO_HOST_DEVICE inline int32_t restore_row(const ExpandCpPlanParams& p, int64_t token, const FoundRequest& request) {
  if (request.id >= p.requests) return -1;
  const int64_t offset = token - request.start.token;
  if (!is_token(request.lens, offset)) return -1;
  int64_t rank, row;
  if (p.zigzag) {
    const int64_t chunk = chunk_tokens(request.lens.fresh, p.cp_size), index = offset / chunk;
    const bool second = index >= p.cp_size;
    rank = second ? 2 * p.cp_size - 1 - index : index;
    row = request.start.row + (second ? chunk : 0) + offset - index * chunk;
  } else {
    rank = token % p.cp_size;
    row = token / p.cp_size;
  }
  return row < p.local_rows ? static_cast<int32_t>(rank * p.local_rows + row) : -1;
}

inline ExpandCpPlanCall prepare_expand_cp_plan(const Tensor& request_table, int64_t cp_rank, int64_t cp_size,
                                               const std::string& split, int64_t local_rows, int64_t total_tokens) {
  check_dim(request_table, "request_table", 2);
  check_dtype(request_table, "request_table", ScalarType::Int);
  check_shape(request_table, "request_table", {kAny, 2});
  check_contiguous(request_table, "request_table");
  // Results are int32; int32 arguments also keep every product below in int64.
  SCO_CHECK(cp_size >= 1 && cp_size <= INT32_MAX, "cp_size: expected an int32 >= 1, got ", cp_size);
  SCO_CHECK(cp_rank >= 0 && cp_rank < cp_size, "cp_rank: expected a rank in [0, ", cp_size, "), got ", cp_rank);
  SCO_CHECK(split == "zigzag" || split == "interleave", "split: expected 'zigzag' or 'interleave', got '", split, "'");
  SCO_CHECK(local_rows >= 0 && local_rows <= INT32_MAX / cp_size,
            "local_rows: expected a count >= 0 with cp_size * local_rows in int32, got ", local_rows);
  SCO_CHECK(total_tokens >= 0 && total_tokens <= INT32_MAX, "total_tokens: expected an int32 count >= 0, got ",
            total_tokens);
  const auto rows = [&](int64_t n) { return torch::stable::new_empty(request_table, {n}); };
  ExpandCpPlanCall call{{},
                        rows(local_rows),
                        rows(local_rows),
                        rows(local_rows),
                        rows(local_rows),
                        rows(cp_size * local_rows),
                        rows(cp_size * local_rows),
                        rows(total_tokens)};
  const auto data = [](const Tensor& t) { return static_cast<int32_t*>(t.data_ptr()); };
  call.params = {static_cast<const int32_t*>(request_table.data_ptr()),
                 data(call.req_ids),
                 data(call.positions),
                 data(call.kv_lens),
                 data(call.token_ids),
                 data(call.gathered_req_ids),
                 data(call.gathered_positions),
                 data(call.restore),
                 request_table.size(0),
                 cp_rank,
                 cp_size,
                 local_rows,
                 total_tokens,
                 split == "zigzag"};
  return call;
}

// SPARSE_CP_OPS_CHECK=1: raises where tokens do not fit the sizes or int32. `p.request_table` is host memory.
inline void check_plan_fits(const ExpandCpPlanParams& p) {
  int64_t rows = 0, tokens = 0;
  for (int64_t b = 0; b < p.requests; ++b) {
    const int32_t prefix = p.request_table[2 * b], fresh = p.request_table[2 * b + 1];
    SCO_CHECK(prefix >= 0 && fresh >= 0, "request_table[", b, "]: expected lengths >= 0, got (", prefix, ", ", fresh,
              ")");
    SCO_CHECK(int64_t{prefix} + fresh <= INT32_MAX, "request_table[", b,
              "]: expected prefix_len + new_len to fit int32, got (", prefix, ", ", fresh, ")");
    tokens += fresh;
    rows += 2 * chunk_tokens(fresh, p.cp_size);
  }
  if (!p.zigzag) rows = (tokens + p.cp_size - 1) / p.cp_size;
  SCO_CHECK(rows <= p.local_rows, "local_rows: expected at least ", rows, " for the request table, got ", p.local_rows);
  SCO_CHECK(tokens <= p.total_tokens, "total_tokens: expected at least ", tokens, " for the request table, got ",
            p.total_tokens);
}

}  // namespace sparse_cp_ops
