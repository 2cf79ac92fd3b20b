// dequantize_kv: checks, parameters and result, shared by the CPU and CUDA kernels.
#pragma once

#include "../new_tensor.h"
#include "paged_cache.h"

namespace sparse_cp_ops {

struct DequantizeKvParams {
  const uint8_t* kv_cache;  // [num_pages, page_size, 656]
  const int64_t* slots;     // [rows]
  void* out;                // [rows, 576] bf16
  int64_t rows, num_pages, page_size, page_stride;
};

struct DequantizeKvCall {
  DequantizeKvParams params;
  Tensor out;
};

inline DequantizeKvCall prepare_dequantize_kv(const Tensor& kv_cache, const Tensor& slots) {
  const int64_t page_size = check_mla_cache(kv_cache, "kv_cache", kv_cache, "kv_cache");
  check_tensor(slots, "slots", kv_cache, "kv_cache", ScalarType::Long, {kAny});
  check_contiguous(slots, "slots");
  Tensor out = new_tensor(kv_cache, {slots.size(0), kQkDim}, ScalarType::BFloat16);
  DequantizeKvParams params{static_cast<const uint8_t*>(kv_cache.data_ptr()),
                            static_cast<const int64_t*>(slots.data_ptr()),
                            out.data_ptr(),
                            slots.size(0),
                            kv_cache.size(0),
                            page_size,
                            kv_cache.stride(0)};
  return {params, out};
}

}  // namespace sparse_cp_ops
