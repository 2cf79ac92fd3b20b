// Where a row reads its keys from.
#pragma once

#include "../../ops/sparse_mla_fp8_cp.h"

namespace sparse_cp_ops {

struct RowKeys {
  const int32_t* list;
  const int32_t* table;  // the request's row of block_table
  int32_t kv_len, request;
  bool pad;

  // Whether an entry may name a key; its page may still be missing.
  __device__ bool may_use(const SparseMlaParams& p, int32_t index) const {
    return !pad && index >= 0 && (!p.paged || index < kv_len);
  }
};

__device__ __forceinline__ RowKeys row_keys(const SparseMlaParams& p, int64_t row) {
  RowKeys keys{p.indices + row * p.indices_stride, nullptr, 0, 0, false};
  if (p.paged) {
    const int64_t request = p.req_ids[row];
    const int32_t kv_len = p.kv_lens[row];  // at the same time
    keys.pad = request < 0 || request >= p.requests;
    if (!keys.pad) {
      keys.table = p.block_table + request * p.table_stride;
      keys.kv_len = kv_len;
      keys.request = static_cast<int32_t>(request);
    }
  }
  return keys;
}

}  // namespace sparse_cp_ops
