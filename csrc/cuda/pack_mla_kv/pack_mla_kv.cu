// pack_mla_kv on CUDA: one warp a row, every byte read and written once.
#include "../../ops/pack_mla_kv.h"

#include <torch/csrc/stable/library.h>

#include "../../ops/op_functions.h"
#include "../arch.h"
#include "../device/bf16.cuh"
#include "../device/fp8.cuh"
#include "../device/rope.cuh"
#include "../launch.h"
#include "../rows.h"
#include "../value_checks.h"

namespace sparse_cp_ops {
namespace {

constexpr int kWarpsPerBlock = 4;
constexpr int kLanesPerTile = 16;  // eight values a lane

// Largest magnitude of eight values and of the lanes of their tile.
__device__ float tile_amax(const float* x) {
  float amax = fabsf(x[0]);
#pragma unroll
  for (int i = 1; i < 8; ++i) amax = max_or_nan(amax, fabsf(x[i]));
#pragma unroll
  for (int lanes = 1; lanes < kLanesPerTile; lanes *= 2)
    amax = max_or_nan(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, lanes));
  return amax;
}

template <bool kHardwareFp8>
__device__ uint2 encode(float (&x)[8], const Fp8Tile& tile, bool ue8m0) {
  if (tile.bad) return make_uint2(kFp8NanX4, kFp8NanX4);
  shrink_if_large(x, tile);
  float y[8];
#pragma unroll
  for (int i = 0; i < 8; ++i)  // a product with a power of two is the quotient
    y[i] = ue8m0 ? __fmul_rn(x[i], tile.reciprocal) : fp8_quotient(x[i], tile);
  return make_uint2(floats_to_e4m3x4<kHardwareFp8>(y[0], y[1], y[2], y[3]),
                    floats_to_e4m3x4<kHardwareFp8>(y[4], y[5], y[6], y[7]));
}

template <bool kHardwareFp8>
__global__ void __launch_bounds__(kWarpsPerBlock * 32) pack_kernel(PackMlaKvParams p, bool vector_loads) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarpsPerBlock + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (row >= p.rows) return;
  const auto* kv = static_cast<const uint16_t*>(p.compressed_kv) + row * p.kv_stride;
  const auto* pe = static_cast<const uint16_t*>(p.k_pe) + row * p.pe_stride;
  uint8_t* record = p.records + row * p.record_stride;

  // Tiles 0 and 1 in the first half of the latent, 2 and 3 in the second.
  uint4 packed[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) packed[half] = load_bf16x8(kv + half * 256 + lane * 8, vector_loads);
  const int first = p.table.interleaved ? 2 * lane : lane, second = p.table.interleaved ? first + 1 : lane + 32;
  float a = bf16_to_float(__ldg(pe + first)), b = bf16_to_float(__ldg(pe + second));
  const float* cos_sin = cos_sin_row(p.table, row);
  const float cosine = load_cos_sin(cos_sin, lane), sine = load_cos_sin(cos_sin, lane + kRopeDim / 2);

  constexpr Absmax absmax = make_absmax(kFp8Max);
  auto* scales = reinterpret_cast<float*>(record + kMlaScaleOffset);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float x[8];
    unpack_bf16x8(packed[half], x);
    const Fp8Tile tile = fp8_tile(tile_amax(x), absmax, p.ue8m0);
    *reinterpret_cast<uint2*>(record + half * 256 + lane * 8) = encode<kHardwareFp8>(x, tile, p.ue8m0);
    if (lane % kLanesPerTile == 0) scales[half * 2 + lane / kLanesPerTile] = tile.scale;
  }
  rotate(a, b, cosine, sine);
  auto* rope = reinterpret_cast<uint16_t*>(record + kMlaRopeOffset);
  if (p.table.interleaved) {
    reinterpret_cast<uint32_t*>(rope)[lane] = float_to_bf16x2(a, b);
  } else {
    rope[first] = float_to_bf16(a);
    rope[second] = float_to_bf16(b);
  }
}

}  // namespace

void pack_mla_kv(const Tensor& compressed_kv, const Tensor& k_pe, const Tensor& positions, const Tensor& cos_sin_cache,
                 Tensor records, bool interleaved, std::string scale_format) {
  const int32_t device = compressed_kv.get_device_index();
  torch::stable::accelerator::DeviceGuard guard(device);
  const PackMlaKvParams p =
      prepare_pack_mla_kv(compressed_kv, k_pe, positions, cos_sin_cache, records, interleaved, scale_format);
  cudaStream_t stream = current_stream(device);
  if (value_checks_possible(stream)) check_rope_positions(positions, cos_sin_cache);
  if (p.rows == 0) return;
  const bool vector_loads = has_vector_rows(compressed_kv, 2);
  const unsigned blocks = grid_size(p.rows, kWarpsPerBlock);
  const bool hardware = device_arch(device).kernels == KernelSet::kSm90;
  (hardware ? pack_kernel<true> : pack_kernel<false>)<<<blocks, kWarpsPerBlock * 32, 0, stream>>>(p, vector_loads);
  check_launch("pack_mla_kv");
}

}  // namespace sparse_cp_ops

STABLE_TORCH_LIBRARY_IMPL(sparse_cp_ops, CUDA, m) { m.impl("pack_mla_kv", TORCH_BOX(&sparse_cp_ops::pack_mla_kv)); }
