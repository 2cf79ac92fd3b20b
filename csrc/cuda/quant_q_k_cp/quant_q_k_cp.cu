// quant_q_k_cp on CUDA: RoPE, Hadamard and FP8 of q and k in registers, one read and one write of every byte.
#include <torch/csrc/stable/library.h>

#include <tuple>

#include "../arch.h"
#include "../launch.h"
#include "../rows.h"
#include "../value_checks.h"
#include "lane_per_vector.cuh"

namespace sparse_cp_ops {
namespace {

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Both kernels write the same bytes; the choice depends on the shape alone.
template <bool kHardwareFp8>
void launch(const QuantQKParams& p, bool fast, const DeviceArch& arch, int32_t device, cudaStream_t stream) {
  const int64_t k_groups = divide_up(p.rows, four_lanes::kVectorsPerWarp);
  const int64_t q_sets = p.rows * (p.heads / lane_per_vector::kHeads);
  const int64_t persistent_blocks =
      int64_t{arch.multiprocessors} * lane_per_vector::kBlocksPerMultiprocessor<kHardwareFp8>;
  const int64_t persistent_warps = persistent_blocks * lane_per_vector::kWarpsPerBlock;
  // A turn or more for every warp: below, four lanes a vector spread the work over more warps.
  if (fast && p.heads % lane_per_vector::kHeads == 0 && q_sets >= persistent_warps) {
    constexpr auto kKernel = lane_per_vector::quant_kernel<kHardwareFp8>;
    allow_shared_bytes<kKernel>(device, lane_per_vector::kSharedBytes);
    const lane_per_vector::Grid grid{static_cast<uint32_t>(persistent_warps),
                                     static_cast<uint32_t>(p.heads / lane_per_vector::kHeads),
                                     static_cast<uint32_t>(q_sets), static_cast<uint32_t>(k_groups)};
    kKernel<<<static_cast<unsigned>(persistent_blocks), lane_per_vector::kThreads, lane_per_vector::kSharedBytes,
              stream>>>(p, make_absmax(p.q_absmax), grid);
    return;
  }
  const int64_t head_groups = divide_up(p.heads, four_lanes::kVectorsPerWarp), q_warps = p.rows * head_groups;
  const auto kernel =
      fast ? four_lanes::quant_kernel<kHardwareFp8, true> : four_lanes::quant_kernel<kHardwareFp8, false>;
  kernel<<<grid_size(q_warps + k_groups, four_lanes::kWarpsPerBlock), four_lanes::kWarpsPerBlock * 32, 0, stream>>>(
      p, make_absmax(p.q_absmax), static_cast<uint32_t>(head_groups), static_cast<uint32_t>(q_warps));
}

std::tuple<Tensor, Tensor> quant_q_k_cp(const Tensor& q, const Tensor& k, const Tensor& weights,
                                        const Tensor& positions, const Tensor& cos_sin_cache, Tensor k_records,
                                        bool interleaved, bool hadamard, double weight_scale, std::string scale_format,
                                        double q_absmax) {
  const int32_t device = q.get_device_index();
  torch::stable::accelerator::DeviceGuard guard(device);
  const QuantQKCall call = prepare_quant_q_k_cp(q, k, weights, positions, cos_sin_cache, k_records, interleaved,
                                                hadamard, weight_scale, scale_format, q_absmax);
  const QuantQKParams& p = call.params;
  cudaStream_t stream = current_stream(device);
  if (value_checks_possible(stream)) check_rope_positions(positions, cos_sin_cache);
  if (p.rows == 0) return {call.q_fp8, call.q_weights};
  // Indices of groups of eight vectors, and twice the warps of a device beyond them, fit 32 bits.
  SCO_CHECK(p.rows * (p.heads + 8) <= int64_t{1} << 33, "q: expected at most 2^33 vectors, got shape ",
            shape_string(q));

  const bool fast = p.table.dim == lane_per_vector::kRopeDims && has_vector_rows(q, 2) && has_vector_rows(k, 2) &&
                    has_vector_rows(cos_sin_cache, 4);
  const DeviceArch& arch = device_arch(device);
  if (arch.kernels == KernelSet::kSm90) launch<true>(p, fast, arch, device, stream);
  else launch<false>(p, fast, arch, device, stream);
  check_launch("quant_q_k_cp");
  return {call.q_fp8, call.q_weights};
}

}  // namespace
}  // namespace sparse_cp_ops

STABLE_TORCH_LIBRARY_IMPL(sparse_cp_ops, CUDA, m) { m.impl("quant_q_k_cp", TORCH_BOX(&sparse_cp_ops::quant_q_k_cp)); }
