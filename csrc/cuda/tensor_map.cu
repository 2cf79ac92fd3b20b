// The one place that asks the driver for its tensor map encoder: the library links cudart alone.
#include "tensor_map.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "launch.h"

namespace sparse_cp_ops {
namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

Encode find_encoder() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  constexpr unsigned kSince = 12000;  // CUDA 12.0 brought tensor maps
  check_cuda(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, kSince, cudaEnableDefault, &found),
             "cuTensorMapEncodeTiled");
  if (found != cudaDriverEntryPointSuccess) throw std::runtime_error("the driver lacks cuTensorMapEncodeTiled");
  return reinterpret_cast<Encode>(function);
}

}  // namespace

CUtensorMap swizzled_rows_map(const void* data, int64_t planes, int64_t rows, int64_t plane_stride, uint32_t box_rows) {
  static const Encode encode = find_encoder();
  CUtensorMap map;
  const cuuint64_t extents[] = {128, static_cast<cuuint64_t>(rows), static_cast<cuuint64_t>(planes)};
  const cuuint64_t strides[] = {128, static_cast<cuuint64_t>(plane_stride)};
  const cuuint32_t box[] = {128, box_rows, 1}, steps[] = {1, 1, 1};
  const CUresult status = encode(&map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 3, const_cast<void*>(data), extents, strides, box,
                                 steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS)
    throw std::runtime_error("cuTensorMapEncodeTiled failed with code " + std::to_string(static_cast<int>(status)));
  return map;
}

}  // namespace sparse_cp_ops
