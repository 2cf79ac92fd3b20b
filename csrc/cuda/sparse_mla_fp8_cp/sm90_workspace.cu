// The Hopper kernel with keys from a workspace, and what fills it.
#include "sm90_kernel.cuh"

namespace sparse_cp_ops {
namespace {

constexpr int kWarps = 8;

// One warp a record.
__global__ __launch_bounds__(kWarps * 32) void convert(SparseMlaParams p, Workspace workspace, int64_t tokens) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  const int lane = threadIdx.x % 32;
  bool uniform = true;
  for (int64_t slot = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32; slot < tokens;
       slot += static_cast<int64_t>(gridDim.x) * kWarps) {
    const int64_t page = slot / p.page_size;
    const uint8_t* record = p.kv_cache + page * p.page_stride + (slot - page * p.page_size) * kMlaRecordBytes;
    const sm90::RecordScales scales = sm90::record_scales(*reinterpret_cast<const float4*>(record + kMlaScaleOffset));
    auto* row = reinterpret_cast<uint4*>(workspace.rows + slot * kWorkspaceRowBytes);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint2 bytes = *reinterpret_cast<const uint2*>(record + half * 256 + lane * 8);
      const uint32_t multiplier = lane < 16 ? scales.multipliers[2 * half] : scales.multipliers[2 * half + 1];
      row[half * 32 + lane] = sm90::convert_latent(bytes, multiplier);
    }
    if (lane < 8)
      row[64 + lane] = sm90::convert_rope(*reinterpret_cast<const uint4*>(record + kMlaRopeOffset + lane * 16),
                                          scales.rope_multiplier);
    if (lane == 0) workspace.factors[slot] = scales.factors;
    uniform &= sm90::is_uniform(scales.factors);
  }
  if (!uniform && lane == 0) *workspace.mixed = 1;
#endif
}

}  // namespace

void fill_workspace(const SparseMlaParams& p, const Workspace& workspace, const DeviceArch& arch, cudaStream_t stream) {
  check_cuda(cudaMemsetAsync(workspace.mixed, 0, sizeof(int), stream), "cudaMemsetAsync");
  const int64_t tokens = p.num_pages * p.page_size;
  const auto blocks = std::min<int64_t>((tokens + kWarps - 1) / kWarps, arch.multiprocessors * 8);
  if (blocks == 0) return;
  convert<<<static_cast<unsigned>(blocks), kWarps * 32, 0, stream>>>(p, workspace, tokens);
  check_launch("sparse_mla_fp8_cp: workspace");
}

void launch_sm90(const SparseMlaParams& p, const KeySplit& split, const Workspace& workspace, const DeviceArch& arch,
                 int32_t device_index, cudaStream_t stream) {
  const sm90::WorkspaceSource source{workspace};
  // Which of the two runs is known on the device only; the other one ends at once.
  sm90::launch<sm90::WorkspaceSource, true>(p, split, source, arch, device_index, stream);
  sm90::launch<sm90::WorkspaceSource, false>(p, split, source, arch, device_index, stream);
}

}  // namespace sparse_cp_ops
