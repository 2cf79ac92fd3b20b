// pack_mla_kv: checks and parameters, shared by the CPU and CUDA kernels.
#pragma once

#include "../kv_record.h"
#include "fp8_scale.h"
#include "rope_table.h"

namespace sparse_cp_ops {

struct PackMlaKvParams {
  const void* compressed_kv;  // [rows, 512] bf16
  const void* k_pe;           // [rows, 64] bf16
  uint8_t* records;           // [rows, 656]
  RopeTable table;
  int64_t rows;
  int64_t kv_stride, pe_stride, record_stride;  // of rows, in elements
  bool ue8m0;
};

inline PackMlaKvParams prepare_pack_mla_kv(const Tensor& compressed_kv, const Tensor& k_pe, const Tensor& positions,
                                           const Tensor& cos_sin_cache, const Tensor& records, bool interleaved,
                                           const std::string& scale_format) {
  const char* like = "compressed_kv";
  check_tensor(compressed_kv, like, compressed_kv, like, ScalarType::BFloat16, {kAny, kLatentDim});
  const int64_t rows = compressed_kv.size(0);
  check_tensor(k_pe, "k_pe", compressed_kv, like, ScalarType::BFloat16, {rows, kRopeDim});
  check_tensor(records, "records", compressed_kv, like, ScalarType::Byte, {rows, kMlaRecordBytes});
  const RopeTable table = check_rope_table(positions, cos_sin_cache, interleaved, rows, compressed_kv, like);
  check_shape(cos_sin_cache, "cos_sin_cache", {kAny, kRopeDim});
  check_last_contiguous(compressed_kv, like);
  check_last_contiguous(k_pe, "k_pe");
  check_last_contiguous(records, "records");
  check_row_alignment(records, "records", kMlaRecordAlignment);
  check_writable(records, "records");
  check_no_overlap(records, "records",
                   {{like, compressed_kv}, {"k_pe", k_pe}, {"positions", positions}, {"cos_sin_cache", cos_sin_cache}});
  return {compressed_kv.data_ptr(),
          k_pe.data_ptr(),
          static_cast<uint8_t*>(records.data_ptr()),
          table,
          rows,
          compressed_kv.stride(0),
          k_pe.stride(0),
          records.stride(0),
          check_scale_format(scale_format)};
}

}  // namespace sparse_cp_ops
