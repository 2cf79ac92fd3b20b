// expand_cp_plan on CUDA: one kernel. Every block sums the requests up for itself, then its threads find the requests
// of four neighbouring rows or tokens at a time by binary search and write them as whole vectors.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <tuple>

#include "../../ops/expand_cp_plan.h"
#include "../arch.h"
#include "../launch.h"
#include "../value_checks.h"

namespace sparse_cp_ops {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kRows = 4;  // rows or tokens a thread and round: one 16-byte vector of int32
// Every block sums all requests up, so large plans are walked in rounds by as many blocks as hide the latency.
constexpr int kBlocksPerMultiprocessor = 4;

// Starts of kThreads segments of neighbouring requests, and the end of the batch.
struct SegmentStarts {
  uint32_t row[kThreads + 1];
  uint32_t token[kThreads + 1];
};

struct Segments {
  int64_t requests;  // of one segment
  int search_step;   // first step of a binary search over the segments that hold requests
};

__device__ RequestStart warp_inclusive_sum(RequestStart sum, int lane) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const RequestStart below{__shfl_up_sync(~0u, sum.row, step), __shfl_up_sync(~0u, sum.token, step)};
    if (lane >= step) sum = sum + below;
  }
  return sum;
}

__device__ void sum_segments(const ExpandCpPlanParams& p, int64_t segment, SegmentStarts& starts) {
  __shared__ RequestStart warp_sums[kWarps];
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  RequestStart sum{0, 0};
  const int64_t begin = thread * segment, end = min(begin + segment, p.requests);
  for (int64_t b = begin; b < end; ++b) sum = sum + extent(load_request(p, b, sum));
  sum = warp_inclusive_sum(sum, lane);
  if (lane == 31) warp_sums[warp] = sum;
  __syncthreads();
  RequestStart below{0, 0};
#pragma unroll
  for (int w = 0; w + 1 < kWarps; ++w) {
    const RequestStart other = warp_sums[w];
    if (w < warp) below = below + other;
  }
  sum = below + sum;
  starts.row[thread + 1] = sum.row;
  starts.token[thread + 1] = sum.token;
  if (thread == 0) starts.row[0] = starts.token[0] = 0;
  __syncthreads();
}

// Finds the requests of growing keys; consecutive ones mostly lie in the same request.
template <bool kByRow>
class RequestCursor {
 public:
  __device__ RequestCursor(const ExpandCpPlanParams& p, const Segments& segments, const SegmentStarts& starts)
      : p_(p), segments_(segments), starts_(starts) {}

  // True if `x` lies in another request than the last one.
  __device__ bool moved_to(uint32_t x) {
    if (x < end_) return false;
    const uint32_t* keys = kByRow ? starts_.row : starts_.token;
    if (x >= keys[kThreads]) {
      request_.id = p_.requests;
      end_ = kBehind;
      return true;
    }
    int index = 0;  // of the last segment that starts at or before x
    for (int step = segments_.search_step; step > 0; step /= 2)
      if (keys[index + step] <= x) index += step;
    request_ = load_request(p_, index * segments_.requests, {starts_.row[index], starts_.token[index]});
    RequestStart next = request_.start + extent(request_);
    while (x >= key_of(next, kByRow)) {  // ends inside the segment, because the next one starts behind x
      request_ = load_request(p_, request_.id + 1, next);
      next = next + extent(request_);
    }
    end_ = key_of(next, kByRow);
    return true;
  }

  __device__ const Request& request() const { return request_; }

 private:
  const ExpandCpPlanParams& p_;
  const Segments& segments_;
  const SegmentStarts& starts_;
  uint32_t end_ = 0;  // keys below it belong to the request
  Request request_{};
};

// The first `count` of kRows values; as one vector where the target is aligned.
__device__ void store_rows(int32_t* target, const int32_t (&values)[kRows], uint32_t count, bool aligned) {
  if (aligned && count >= kRows) {
    *reinterpret_cast<int4*>(target) = make_int4(values[0], values[1], values[2], values[3]);
    return;
  }
#pragma unroll
  for (uint32_t i = 0; i < kRows; ++i)
    if (i < count) target[i] = values[i];
}

template <bool kZigzag>
__device__ void expand_rows(const ExpandCpPlanParams& p, RequestCursor<kZigzag> cursor, uint32_t rank, uint32_t first) {
  const uint32_t count = static_cast<uint32_t>(p.local_rows) - first;
  int32_t req_ids[kRows], positions[kRows], kv_lens[kRows], token_ids[kRows];
#pragma unroll
  for (uint32_t i = 0; i < kRows; ++i) {
    PlanRow out;
    if (i < count) {
      cursor.moved_to(row_key(p, rank, first + i));
      out = expand_row(p, rank, first + i, cursor.request());
    }
    req_ids[i] = out.req_id;
    positions[i] = out.position;
    kv_lens[i] = out.kv_len;
    token_ids[i] = out.token_id;
  }
  const int64_t gathered = rank * p.local_rows + first;
  const bool aligned = p.local_rows % kRows == 0;
  store_rows(p.gathered_req_ids + gathered, req_ids, count, aligned);
  store_rows(p.gathered_positions + gathered, positions, count, aligned);
  if (rank != p.cp_rank) return;
  store_rows(p.req_ids + first, req_ids, count, true);
  store_rows(p.positions + first, positions, count, true);
  store_rows(p.kv_lens + first, kv_lens, count, true);
  store_rows(p.token_ids + first, token_ids, count, true);
}

__device__ void expand_tokens(const ExpandCpPlanParams& p, RequestCursor<false> cursor, uint32_t first) {
  const uint32_t count = static_cast<uint32_t>(p.total_tokens) - first;
  int32_t rows[kRows];
  TokenPlace place{};
#pragma unroll
  for (uint32_t i = 0; i < kRows; ++i) {
    rows[i] = -1;
    if (i >= count) continue;
    if (!cursor.moved_to(first + i)) place.next(p, cursor.request());
    else if (cursor.request().id < p.requests) place = TokenPlace::of(p, first + i, cursor.request());
    rows[i] = restore_row(p, first + i, cursor.request(), place);
  }
  store_rows(p.restore + first, rows, count, true);
}

template <bool kZigzag>
__global__ void __launch_bounds__(kThreads)
    expand_kernel(const __grid_constant__ ExpandCpPlanParams params, const __grid_constant__ Segments segments,
                  uint32_t rank_items, uint32_t items) {
  __shared__ SegmentStarts starts;
  ExpandCpPlanParams p = params;
  p.zigzag = kZigzag;  // known at compile time from here on
  sum_segments(p, segments.requests, starts);
  const uint32_t row_items = static_cast<uint32_t>(p.cp_size) * rank_items;
  for (uint32_t item = blockIdx.x * kThreads + threadIdx.x; item < items; item += gridDim.x * kThreads) {
    if (item < row_items) {
      const uint32_t rank = item / rank_items;
      expand_rows<kZigzag>(p, {p, segments, starts}, rank, (item - rank * rank_items) * kRows);
    } else {
      expand_tokens(p, {p, segments, starts}, (item - row_items) * kRows);
    }
  }
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> expand_cp_plan(const Tensor& request_table,
                                                                                  int64_t cp_rank, int64_t cp_size,
                                                                                  const std::string& split,
                                                                                  int64_t local_rows,
                                                                                  int64_t total_tokens) {
  torch::stable::accelerator::DeviceGuard guard(request_table.get_device_index());
  ExpandCpPlanCall call = prepare_expand_cp_plan(request_table, cp_rank, cp_size, split, local_rows, total_tokens);
  const auto& p = call.params;
  cudaStream_t stream = current_stream(request_table.get_device_index());
  if (value_checks_possible(stream)) check_plan_fits(p, request_table);
  Segments segments{std::max<int64_t>((p.requests + kThreads - 1) / kThreads, 1), 0};
  for (int64_t used = 1; used * segments.requests < p.requests; used *= 2)
    segments.search_step = static_cast<int>(used);
  // At most 2^29 + 2^20 items of rows and 2^29 of tokens: numbers and strides fit uint32.
  const int64_t rank_items = (p.local_rows + kRows - 1) / kRows, token_items = (p.total_tokens + kRows - 1) / kRows;
  const int64_t items = p.cp_size * rank_items + token_items;
  if (items > 0) {
    const int64_t most = kBlocksPerMultiprocessor * device_arch(request_table.get_device_index()).multiprocessors;
    const dim3 grid(static_cast<unsigned>(std::min((items + kThreads - 1) / kThreads, most)));
    const auto kernel = p.zigzag ? expand_kernel<true> : expand_kernel<false>;
    kernel<<<grid, kThreads, 0, stream>>>(p, segments, static_cast<uint32_t>(rank_items), static_cast<uint32_t>(items));
    check_launch("expand_cp_plan");
  }
  return {call.req_ids,          call.positions,          call.kv_lens, call.token_ids,
          call.gathered_req_ids, call.gathered_positions, call.restore};
}

}  // namespace
}  // namespace sparse_cp_ops

STABLE_TORCH_LIBRARY_IMPL(sparse_cp_ops, CUDA, m) {
  m.impl("expand_cp_plan", TORCH_BOX(&sparse_cp_ops::expand_cp_plan));
}
