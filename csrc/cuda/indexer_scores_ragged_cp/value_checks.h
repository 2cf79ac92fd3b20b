// SPARSE_CP_OPS_CHECK=1 for the two indexer ops on CUDA.
#pragma once

#include "../../ops/indexer_inputs.h"
#include "../value_checks.h"

namespace sparse_cp_ops {

inline void check_indexer_values_on_host(IndexerInputs in, const Tensor& q_fp8, const Tensor& block_table,
                                         const Tensor& req_ids, const Tensor& kv_lens) {
  const Tensor queries = host_copy(q_fp8), table = host_copy(block_table);
  const Tensor requests = host_copy(req_ids), lengths = host_copy(kv_lens);
  in.q_fp8 = static_cast<const uint8_t*>(queries.data_ptr());
  in.block_table = static_cast<const int32_t*>(table.data_ptr());
  in.table_stride = in.table_width;
  in.req_ids = static_cast<const int32_t*>(requests.data_ptr());
  in.kv_lens = static_cast<const int32_t*>(lengths.data_ptr());
  check_indexer_values(in);
}

}  // namespace sparse_cp_ops
