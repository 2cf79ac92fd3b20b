// The Hopper kernel with keys from a workspace, and what fills it.
#include "sm90_kernel.cuh"

namespace sparse_cp_ops {
namespace {

constexpr int kWarps = 8;

// The longest kv_len of each request's rows, one row a thread; lengths begin as zeros.
__global__ __launch_bounds__(kWarps * 32) void find_lengths(SparseMlaParams p, Workspace workspace) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps * 32 + threadIdx.x;
  const int request = row < p.rows ? p.req_ids[row] : -1;
  const bool pad = request < 0 || request >= p.requests;
  int length = pad ? 0 : min(p.kv_lens[row], workspace.per_request);
  if (__all_sync(~0u, request == __shfl_sync(~0u, request, 0))) {  // neighbouring rows are mostly of one request
    length = __reduce_max_sync(~0u, length);
    if (threadIdx.x % 32 == 0 && !pad) atomicMax(workspace.lengths + request, length);
  } else if (!pad) {
    atomicMax(workspace.lengths + request, length);
  }
}

// One warp a record; blockIdx.y is the request. A token without a page becomes an unused entry.
__global__ __launch_bounds__(kWarps * 32) void convert(SparseMlaParams p, Workspace workspace, int page_shift) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  const int lane = threadIdx.x % 32;
  const bool by_request = workspace.per_request != 0;
  const int64_t tokens = by_request ? workspace.lengths[blockIdx.y] : workspace.tokens;
  bool uniform = true;
  for (int64_t token = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32; token < tokens;
       token += static_cast<int64_t>(gridDim.x) * kWarps) {
    int64_t page = token >> page_shift;
    if (by_request) page = p.block_table[blockIdx.y * p.table_stride + page];
    const bool exists = page >= 0 && page < p.num_pages;
    const uint8_t* record =
        p.kv_cache + page * p.page_stride + (token & ((1 << page_shift) - 1)) * int64_t{kMlaRecordBytes};
    sm90::RecordScales scales{};
    if (exists) scales = sm90::record_scales(*reinterpret_cast<const uint4*>(record + kMlaScaleOffset));
    const int64_t slot = blockIdx.y * static_cast<int64_t>(workspace.per_request) + token;
    auto* row = reinterpret_cast<uint4*>(workspace.rows + slot * kWorkspaceRowBytes);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint2 bytes = exists ? *reinterpret_cast<const uint2*>(record + half * 256 + lane * 8) : make_uint2(0, 0);
      const uint32_t multiplier = lane < 16 ? scales.multipliers[2 * half] : scales.multipliers[2 * half + 1];
      row[half * 32 + lane] = sm90::convert_latent(bytes, multiplier);
    }
    if (lane < 8)
      row[64 + lane] = exists ? sm90::convert_rope(*reinterpret_cast<const uint4*>(record + kMlaRopeOffset + lane * 16),
                                                   scales.rope_multiplier)
                              : make_uint4(0, 0, 0, 0);
    if (lane == 0) workspace.factors[slot] = scales.factors;
    uniform &= sm90::is_uniform(scales.factors);
  }
  if (!uniform && lane == 0) *workspace.mixed = 1;
#endif
}

}  // namespace

void fill_workspace(const SparseMlaParams& p, const Workspace& workspace, const DeviceArch& arch, cudaStream_t stream) {
  const bool by_request = workspace.per_request != 0;
  const int64_t groups = by_request ? p.requests : 1, tokens = by_request ? workspace.per_request : workspace.tokens;
  check_cuda(cudaMemsetAsync(workspace.mixed, 0, (1 + (by_request ? groups : 0)) * sizeof(int), stream),
             "cudaMemsetAsync");
  if (groups == 0 || tokens == 0) return;
  if (by_request) {
    constexpr int64_t kRows = kWarps * 32;
    find_lengths<<<static_cast<unsigned>((p.rows + kRows - 1) / kRows), kRows, 0, stream>>>(p, workspace);
    check_launch("sparse_mla_fp8_cp: lengths");
  }
  const int64_t enough = std::max<int64_t>(arch.multiprocessors * 8 / groups, 1);
  const auto blocks = static_cast<unsigned>(std::min<int64_t>((tokens + kWarps - 1) / kWarps, enough));
  convert<<<dim3(blocks, static_cast<unsigned>(groups)), kWarps * 32, 0, stream>>>(p, workspace,
                                                                                   page_shift_of(p.page_size));
  check_launch("sparse_mla_fp8_cp: workspace");
}

void launch_sm90(const SparseMlaParams& p, const KeySplit& split, const Workspace& workspace, const DeviceArch& arch,
                 int32_t device_index, cudaStream_t stream) {
  const sm90::WorkspaceSource source{workspace};
  // Which of the two runs is known on the device only; the other one ends at once.
  sm90::launch<sm90::WorkspaceSource, false>(p, split, source, arch, device_index, stream);
  sm90::launch<sm90::WorkspaceSource, true>(p, split, source, arch, device_index, stream);
}

}  // namespace sparse_cp_ops
