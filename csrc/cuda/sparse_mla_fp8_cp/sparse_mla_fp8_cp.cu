// sparse_mla_fp8_cp on CUDA: checks, choice of kernel and split, registration.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <tuple>

#include "../../ops/op_functions.h"
#include "../value_checks.h"
#include "kernels.h"

namespace sparse_cp_ops {
namespace {

// Fewer list entries in a part than this don't pay for the merge.
constexpr int64_t kMinPartWidth = 128;
constexpr int64_t kSm90Heads = 64;  // of a block of the Hopper kernel

// As many parts as fill the device once; one part, whatever the number of rows, for batch-invariant results.
KeySplit choose_split(const SparseMlaParams& p, int64_t blocks_per_part, int64_t capacity) {
  KeySplit split;
  split.width = p.topk;
  if (p.batch_invariant || p.topk <= kMinPartWidth) return split;
  const int64_t wanted = std::min(capacity / blocks_per_part, p.topk / kMinPartWidth);
  if (wanted <= 1) return split;
  const int64_t steps = p.topk / kIndexListMultiple;
  split.width = (steps + wanted - 1) / wanted * kIndexListMultiple;
  split.parts = (p.topk + split.width - 1) / split.width;
  return split;
}

// Size of a workspace: what the block table can name, or the whole cache. Engines' caches hold many times more than a
// batch sees.
struct WorkspaceSize {
  int64_t tokens;
  int64_t per_request;
};
WorkspaceSize workspace_size(const SparseMlaParams& p) {
  const int64_t cache = p.num_pages * p.page_size, per_request = p.table_width * p.page_size;
  if (p.paged && p.requests * per_request < cache) return {p.requests * per_request, per_request};
  return {cache, 0};
}

// Whether to turn keys into 16-bit rows first. A token costs about as much as four keys of 64 heads gain.
bool workspace_pays(const SparseMlaParams& p) {
  constexpr int64_t kMaxTokens = int64_t{1} << 19;  // 0.6 GB
  const int64_t tokens = workspace_size(p).tokens;
  return tokens <= kMaxTokens && p.rows * p.topk * (p.heads / kSm90Heads) >= 4 * tokens;
}

// What a device of compute capability 9.0 runs, by shape alone:
//   heads      rows, lists                                             kernel
//   8, 16, 32  all                                                     few heads, parts in a cluster
//   64, 128    lists may be split, and all groups of 32 heads find a   few heads, in groups of 8, 16 or 32
//              multiprocessor of their own, or a workspace doesn't pay
//   64, 128    others                                                  64 heads a block, keys from a workspace or
//                                                                      direct
// A batch-invariant call takes the first or the third line whatever its rows, and both sources of keys give equal bits.
// precision="fp8" has a kernel of its own for the third line and, as it needs no workspace, for most of the second;
// where all groups of 32 heads find a multiprocessor, and with 8 to 32 heads, it answers in "high", which is faster
// there.
bool few_heads_pay(const SparseMlaParams& p, const DeviceArch& arch) {
  if (p.heads <= kFewHeads || p.batch_invariant) return p.heads <= kFewHeads;
  return p.rows * (p.heads / kFewHeads) <= arch.multiprocessors || (!p.low_precision && !workspace_pays(p));
}

void check_values(const SparseMlaParams& p, const Tensor& indices, const std::optional<Tensor>& block_table,
                  const std::optional<Tensor>& req_ids, const std::optional<Tensor>& kv_lens) {
  SparseMlaParams host = p;
  const Tensor host_indices = host_copy(indices);
  host.indices = static_cast<const int32_t*>(host_indices.data_ptr());
  host.indices_stride = p.topk;
  if (!p.paged) return check_sparse_mla_values(host);
  const Tensor host_table = host_copy(*block_table), host_req = host_copy(*req_ids), host_lens = host_copy(*kv_lens);
  host.block_table = static_cast<const int32_t*>(host_table.data_ptr());
  host.table_stride = p.table_width;
  host.req_ids = static_cast<const int32_t*>(host_req.data_ptr());
  host.kv_lens = static_cast<const int32_t*>(host_lens.data_ptr());
  check_sparse_mla_values(host);
}

}  // namespace

std::tuple<Tensor, Tensor> sparse_mla_fp8_cp(const Tensor& q, const Tensor& kv_cache, const Tensor& indices,
                                             const std::optional<Tensor>& block_table,
                                             const std::optional<Tensor>& req_ids, const std::optional<Tensor>& kv_lens,
                                             double softmax_scale, const std::string& precision, bool batch_invariant) {
  SparseMlaCall call = prepare_sparse_mla_fp8_cp(q, kv_cache, indices, block_table, req_ids, kv_lens, softmax_scale,
                                                 precision, batch_invariant);
  const SparseMlaParams& p = call.params;
  if (p.rows == 0) return {call.out, call.lse};
  const int32_t device_index = q.get_device_index();
  torch::stable::accelerator::DeviceGuard guard(device_index);
  cudaStream_t stream = current_stream(device_index);
  if (value_checks_possible(stream)) check_values(p, indices, block_table, req_ids, kv_lens);

  const DeviceArch& arch = device_arch(device_index);
  const bool hopper = arch.kernels == KernelSet::kSm90;
  if (hopper && few_heads_pay(p, arch)) {
    const FewHeadsChoice choice = choose_few_heads(p, arch, device_index);
    const auto launch = choice.heads == 8    ? launch_few_heads_8
                        : choice.heads == 16 ? launch_few_heads_16
                                             : launch_few_heads_32;
    launch(p, choice.split, arch, device_index, stream);
    return {call.out, call.lse};
  }
  const PortableTile tile = hopper ? PortableTile{kSm90Heads, 1} : portable_tile(arch, p.heads);
  KeySplit split = choose_split(p, p.rows * ((p.heads + tile.heads - 1) / tile.heads),
                                static_cast<int64_t>(arch.multiprocessors) * tile.blocks_per_sm);
  Tensor partial_out, partial_lse;
  if (split.parts > 1) {
    partial_out = new_tensor(q, {split.parts, p.rows, p.heads, kLatentDim}, ScalarType::Float);
    partial_lse = new_tensor(q, {split.parts, p.rows, p.heads}, ScalarType::Float);
    split.partial_out = static_cast<float*>(partial_out.data_ptr());
    split.partial_lse = static_cast<float*>(partial_lse.data_ptr());
  }
  if (!hopper) {
    launch_portable(p, split, arch, device_index, stream);
  } else if (p.low_precision) {
    launch_sm90_fp8(p, split, arch, device_index, stream);
  } else if (workspace_pays(p)) {
    const auto [tokens, per_request] = workspace_size(p);
    const Tensor rows = new_tensor(kv_cache, {tokens, kWorkspaceRowBytes});
    const Tensor factors = new_tensor(q, {tokens, 4}, ScalarType::Float);
    const Tensor numbers = new_tensor(indices, {1 + (per_request == 0 ? 0 : p.requests)});
    auto* mixed = static_cast<int*>(numbers.data_ptr());
    const Workspace workspace{tokens,
                              static_cast<int>(per_request),
                              static_cast<uint8_t*>(rows.data_ptr()),
                              static_cast<float4*>(factors.data_ptr()),
                              mixed,
                              mixed + 1};
    fill_workspace(p, workspace, arch, stream);
    launch_sm90(p, split, workspace, arch, device_index, stream);
  } else {
    launch_sm90_direct(p, split, arch, device_index, stream);
  }
  if (split.parts > 1) merge_parts(p, split, device_index, stream);
  return {call.out, call.lse};
}

}  // namespace sparse_cp_ops

STABLE_TORCH_LIBRARY_IMPL(sparse_cp_ops, CUDA, m) {
  m.impl("sparse_mla_fp8_cp", TORCH_BOX(&sparse_cp_ops::sparse_mla_fp8_cp));
}
