// dequantize_kv on CUDA: one warp a row.
#include "../../ops/dequantize_kv.h"

#include <torch/csrc/stable/library.h>

#include "../arch.h"
#include "../device/bf16.cuh"
#include "../device/fp8.cuh"
#include "../launch.h"
#include "../rows.h"
#include "../value_checks.h"

namespace sparse_cp_ops {
namespace {

constexpr int kWarpsPerBlock = 4;

template <bool kHardwareFp8>
__global__ void __launch_bounds__(kWarpsPerBlock * 32) dequantize_kernel(DequantizeKvParams p, int page_shift) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarpsPerBlock + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (row >= p.rows) return;
  const int64_t slot = __ldg(p.slots + row);
  auto* out = static_cast<uint16_t*>(p.out) + row * kQkDim;
  uint4 latent[2] = {};  // values lane * 8 .. + 7 of each half
  uint32_t rope = 0;
  if (slot >= 0 && slot < p.num_pages << page_shift) {
    const uint8_t* record =
        p.kv_cache + (slot >> page_shift) * p.page_stride + (slot & (p.page_size - 1)) * kMlaRecordBytes;
    uint2 bytes[2];
    float scales[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      bytes[half] = __ldg(reinterpret_cast<const uint2*>(record + half * 256 + lane * 8));
      scales[half] = __ldg(reinterpret_cast<const float*>(record + kMlaScaleOffset) + half * 2 + lane / 16);
    }
    rope = __ldg(reinterpret_cast<const uint32_t*>(record + kMlaRopeOffset) + lane);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float x[8];
      e4m3x4_to_floats<kHardwareFp8>(bytes[half].x, x);
      e4m3x4_to_floats<kHardwareFp8>(bytes[half].y, x + 4);
#pragma unroll
      for (float& value : x) value = __fmul_rn(value, scales[half]);
      latent[half] = pack_bf16x8(x);
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) *reinterpret_cast<uint4*>(out + half * 256 + lane * 8) = latent[half];
  reinterpret_cast<uint32_t*>(out + kLatentDim)[lane] = rope;
}

Tensor dequantize_kv(const Tensor& kv_cache, const Tensor& slots) {
  const int32_t device = kv_cache.get_device_index();
  torch::stable::accelerator::DeviceGuard guard(device);
  const DequantizeKvCall call = prepare_dequantize_kv(kv_cache, slots);
  const DequantizeKvParams& p = call.params;
  cudaStream_t stream = current_stream(device);
  if (value_checks_possible(stream)) check_slots(slots, p.num_pages * p.page_size);
  if (p.rows == 0) return call.out;
  const unsigned blocks = grid_size(p.rows, kWarpsPerBlock);
  const bool hardware = device_arch(device).kernels == KernelSet::kSm90;
  (hardware ? dequantize_kernel<true> : dequantize_kernel<false>)<<<blocks, kWarpsPerBlock * 32, 0, stream>>>(
      p, page_shift_of(p.page_size));
  check_launch("dequantize_kv");
  return call.out;
}

}  // namespace
}  // namespace sparse_cp_ops

STABLE_TORCH_LIBRARY_IMPL(sparse_cp_ops, CUDA, m) { m.impl("dequantize_kv", TORCH_BOX(&sparse_cp_ops::dequantize_kv)); }
