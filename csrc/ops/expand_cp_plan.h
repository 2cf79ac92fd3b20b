// expand_cp_plan: checks, parameters and the row arithmetic, shared by the CPU and CUDA kernels.
#pragma once

#include <cstdint>
#include <string>

#include "../new_tensor.h"
#include "../plan_limits.h"
#include "../value_checks.h"

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

// Starts saturate here: no row and no token has this number, and the sum of two starts still fits uint32.
inline constexpr uint32_t kBehind = INT32_MAX;

// Where a request starts: in every rank's zigzag rows and in the packed token stream.
struct RequestStart {
  uint32_t row, token;
};

SCO_HOST_DEVICE inline RequestStart operator+(RequestStart a, RequestStart b) {
  const uint32_t row = a.row + b.row, token = a.token + b.token;
  return {row < kBehind ? row : kBehind, token < kBehind ? token : kBehind};
}

// The request that a row or token belongs to.
struct Request {
  int64_t id;  // the number of requests: behind the batch
  RequestStart start;
  uint32_t prefix, fresh;  // cached and new tokens
  // Zigzag only: it cuts a request into 2 * cp_size chunks of this many tokens; rank r owns chunks r and 2 * cp_size -
  // 1 - r.
  uint32_t chunk;
};

SCO_HOST_DEVICE inline Request load_request(const ExpandCpPlanParams& p, int64_t id, RequestStart start) {
  const int32_t prefix = p.request_table[2 * id], fresh = p.request_table[2 * id + 1];
  const uint32_t tokens = fresh > 0 ? static_cast<uint32_t>(fresh) : 0, chunks = 2 * static_cast<uint32_t>(p.cp_size);
  return {id, start, prefix > 0 ? static_cast<uint32_t>(prefix) : 0, tokens,
          p.zigzag ? (tokens + chunks - 1) / chunks : 0};
}

// How far the next request starts behind this one.
SCO_HOST_DEVICE inline RequestStart extent(const Request& request) { return {2 * request.chunk, request.fresh}; }

// Zigzag rows are looked up by RequestStart::row, interleaved ones by ::token.
SCO_HOST_DEVICE inline uint32_t key_of(RequestStart start, bool by_row) { return by_row ? start.row : start.token; }

SCO_HOST_DEVICE inline uint32_t row_key(const ExpandCpPlanParams& p, uint32_t rank, uint32_t row) {
  return p.zigzag ? row : row * static_cast<uint32_t>(p.cp_size) + rank;
}

// A token whose kv_len leaves int32 has no row.
SCO_HOST_DEVICE inline bool is_token(const Request& request, uint32_t offset) {
  return offset < request.fresh && request.prefix + offset < INT32_MAX;
}

struct PlanRow {
  int32_t req_id = -1, position = 0, kv_len = 0, token_id = -1;
};

SCO_HOST_DEVICE inline PlanRow expand_row(const ExpandCpPlanParams& p, uint32_t rank, uint32_t row,
                                          const Request& request) {
  if (request.id >= p.requests) return {};
  uint32_t offset = row_key(p, rank, row) - request.start.token;
  if (p.zigzag) {
    const uint32_t within = row - request.start.row, chunk = request.chunk;
    offset = within < chunk ? rank * chunk + within
                            : (2 * static_cast<uint32_t>(p.cp_size) - 1 - rank) * chunk + within - chunk;
  }
  if (!is_token(request, offset)) return {};
  const int32_t position = static_cast<int32_t>(request.prefix + offset);
  return {static_cast<int32_t>(request.id), position, position + 1, static_cast<int32_t>(request.start.token + offset)};
}

// Walks along the tokens of a request (zigzag) or of the batch (interleave): division once, then counting.
struct TokenPlace {
  uint32_t quotient, remainder;  // zigzag: chunk and offset in it; interleave: row and rank

  SCO_HOST_DEVICE static TokenPlace of(const ExpandCpPlanParams& p, uint32_t token, const Request& request) {
    const uint32_t value = p.zigzag ? token - request.start.token : token, size = divisor(p, request);
    return {value / size, value % size};
  }

  SCO_HOST_DEVICE void next(const ExpandCpPlanParams& p, const Request& request) {
    if (++remainder == divisor(p, request)) {
      remainder = 0;
      ++quotient;
    }
  }

  SCO_HOST_DEVICE static uint32_t divisor(const ExpandCpPlanParams& p, const Request& request) {
    return p.zigzag ? request.chunk : static_cast<uint32_t>(p.cp_size);
  }
};

// Gathered row of a token; -1 behind the batch and where its row was cut.
SCO_HOST_DEVICE inline int32_t restore_row(const ExpandCpPlanParams& p, uint32_t token, const Request& request,
                                           TokenPlace place) {
  if (request.id >= p.requests || !is_token(request, token - request.start.token)) return -1;
  const uint32_t size = static_cast<uint32_t>(p.cp_size), rows = static_cast<uint32_t>(p.local_rows);
  uint32_t rank = place.remainder, row = place.quotient;
  if (p.zigzag) {
    const bool second = place.quotient >= size;
    rank = second ? 2 * size - 1 - place.quotient : place.quotient;
    row = request.start.row + (second ? request.chunk : 0) + place.remainder;
  }
  return row < rows ? static_cast<int32_t>(rank * rows + row) : -1;
}

inline ExpandCpPlanCall prepare_expand_cp_plan(const Tensor& request_table, int64_t cp_rank, int64_t cp_size,
                                               const std::string& split, int64_t local_rows, int64_t total_tokens) {
  check_dim(request_table, "request_table", 2);
  check_dtype(request_table, "request_table", ScalarType::Int);
  check_shape(request_table, "request_table", {kAny, 2});
  check_contiguous(request_table, "request_table");
  SCO_CHECK(cp_size >= 1 && cp_size <= kMaxCpSize, "cp_size: expected a size in [1, ", kMaxCpSize, "], got ", cp_size);
  SCO_CHECK(cp_rank >= 0 && cp_rank < cp_size, "cp_rank: expected a rank in [0, ", cp_size, "), got ", cp_rank);
  SCO_CHECK(split == "zigzag" || split == "interleave", "split: expected 'zigzag' or 'interleave', got '", split, "'");
  SCO_CHECK(local_rows >= 0 && local_rows <= INT32_MAX / cp_size,
            "local_rows: expected a count >= 0 with cp_size * local_rows in int32, got ", local_rows);
  SCO_CHECK(total_tokens >= 0 && total_tokens <= INT32_MAX, "total_tokens: expected an int32 count >= 0, got ",
            total_tokens);
  const auto rows = [&](int64_t n) { return new_tensor(request_table, {n}); };
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

// SPARSE_CP_OPS_CHECK=1: raises where tokens do not fit the sizes or int32.
inline void check_plan_fits(const ExpandCpPlanParams& p, const Tensor& request_table) {
  const Tensor host = host_copy(request_table);
  const auto* table = static_cast<const int32_t*>(host.data_ptr());
  int64_t rows = 0, tokens = 0;
  for (int64_t b = 0; b < p.requests; ++b) {
    const int32_t prefix = table[2 * b], fresh = table[2 * b + 1];
    SCO_CHECK(prefix >= 0 && fresh >= 0, "request_table[", b, "]: expected lengths >= 0, got (", prefix, ", ", fresh,
              ")");
    SCO_CHECK(int64_t{prefix} + fresh <= INT32_MAX, "request_table[", b,
              "]: expected prefix_len + new_len to fit int32, got (", prefix, ", ", fresh, ")");
    tokens += fresh;
    rows += 2 * ((fresh + 2 * p.cp_size - 1) / (2 * p.cp_size));
  }
  if (!p.zigzag) rows = (tokens + p.cp_size - 1) / p.cp_size;
  SCO_CHECK(rows <= p.local_rows, "local_rows: expected at least ", rows, " for the request table, got ", p.local_rows);
  SCO_CHECK(tokens <= p.total_tokens, "total_tokens: expected at least ", tokens, " for the request table, got ",
            p.total_tokens);
}

}  // namespace sparse_cp_ops
