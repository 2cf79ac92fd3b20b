// quant_q_k_cp on CUDA: RoPE, Hadamard and FP8 of q and k in registers, one read and one write of every byte.
#include <torch/csrc/stable/library.h>

#include <tuple>

#include "../../ops/op_functions.h"
#include "../arch.h"
#include "../launch.h"
#include "../rows.h"
#include "../value_checks.h"
#include "staged.cuh"

namespace sparse_cp_ops {
namespace {

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Both kernels write the same bytes; the choice depends on the shape alone.
template <bool kHardwareFp8>
void launch(const QuantQKParams& p, bool fast, const DeviceArch& arch, int32_t device, cudaStream_t stream) {
  const int64_t k_groups = divide_up(p.rows, direct::Lanes::kVectors);
  const int64_t sets_per_row = p.heads / staged::kHeads, q_sets = p.rows * sets_per_row;
  const int64_t blocks = int64_t{arch.multiprocessors} * staged::kBlocksPerMultiprocessor;
  const int64_t warps = blocks * staged::kWarps;
  // A turn or more for every warp: below, four lanes a vector spread the work over more warps.
  if (fast && p.heads % staged::kHeads == 0 && q_sets >= warps) {
    constexpr auto kKernel = staged::quant_kernel<kHardwareFp8>;
    allow_shared_bytes<kKernel>(device, staged::kSharedBytes);
    const staged::Grid grid{static_cast<uint32_t>(warps),
                            static_cast<uint32_t>(sets_per_row),
                            static_cast<uint32_t>(q_sets),
                            static_cast<uint32_t>(k_groups),
                            static_cast<uint32_t>(warps / sets_per_row),
                            static_cast<uint32_t>(warps % sets_per_row)};
    kKernel<<<static_cast<unsigned>(blocks), staged::kThreads, staged::kSharedBytes, stream>>>(
        p, make_absmax(p.q_absmax), grid);
    return;
  }
  const int64_t head_groups = divide_up(p.heads, direct::Lanes::kVectors), q_warps = p.rows * head_groups;
  const auto kernel = fast ? direct::quant_kernel<kHardwareFp8, true> : direct::quant_kernel<kHardwareFp8, false>;
  kernel<<<grid_size(q_warps + k_groups, direct::kWarpsPerBlock), direct::kWarpsPerBlock * 32, 0, stream>>>(
      p, make_absmax(p.q_absmax), static_cast<uint32_t>(head_groups), static_cast<uint32_t>(q_warps));
}

}  // namespace

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

  const bool fast =
      p.table.dim == kRopeDims && has_vector_rows(q, 2) && has_vector_rows(k, 2) && has_vector_rows(cos_sin_cache, 4);
  const DeviceArch& arch = device_arch(device);
  if (arch.kernels == KernelSet::kSm90) launch<true>(p, fast, arch, device, stream);
  else launch<false>(p, fast, arch, device, stream);
  check_launch("quant_q_k_cp");
  return {call.q_fp8, call.q_weights};
}

}  // namespace sparse_cp_ops

STABLE_TORCH_LIBRARY_IMPL(sparse_cp_ops, CUDA, m) { m.impl("quant_q_k_cp", TORCH_BOX(&sparse_cp_ops::quant_q_k_cp)); }
