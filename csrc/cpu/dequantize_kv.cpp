// dequantize_kv on the CPU.
#include "../ops/dequantize_kv.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstring>

#include "numeric.h"
#include "row_loop.h"

namespace sparse_cp_ops {
namespace {

SCO_INLINE void dequantize_rows(const DequantizeKvParams& p, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    uint16_t* out = static_cast<uint16_t*>(p.out) + row * kQkDim;
    const int64_t slot = p.slots[row];
    if (slot < 0 || slot >= p.num_pages * p.page_size) {
      std::fill_n(out, kQkDim, uint16_t{0});
      continue;
    }
    const uint8_t* record = p.kv_cache + slot / p.page_size * p.page_stride + slot % p.page_size * kMlaRecordBytes;
    float scales[kLatentTiles];
    std::memcpy(scales, record + kMlaScaleOffset, sizeof(scales));
    for (int64_t tile = 0; tile < kLatentTiles; ++tile)
      for (int64_t i = tile * kScaleTile; i < (tile + 1) * kScaleTile; ++i)
        out[i] = float_to_bf16(e4m3_to_float(record[i]) * scales[tile]);
    std::memcpy(out + kLatentDim, record + kMlaRopeOffset, kRopeDim * 2);
  }
}
SCO_DEFINE_ROW_LOOP(dequantize_rows, DequantizeKvParams)

Tensor dequantize_kv(const Tensor& kv_cache, const Tensor& slots) {
  const DequantizeKvCall call = prepare_dequantize_kv(kv_cache, slots);
  const DequantizeKvParams& p = call.params;
  if (value_checks_enabled()) check_slots(slots, p.num_pages * p.page_size);
  const auto loop = dequantize_rows_for_this_cpu();
  parallel_rows(p.rows, kQkDim, [&](int64_t begin, int64_t end) { loop(p, begin, end); });
  return call.out;
}

}  // namespace
}  // namespace sparse_cp_ops

STABLE_TORCH_LIBRARY_IMPL(sparse_cp_ops, CPU, m) { m.impl("dequantize_kv", TORCH_BOX(&sparse_cp_ops::dequantize_kv)); }
