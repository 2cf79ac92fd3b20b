// pack_mla_kv on the CPU.
#include "../ops/pack_mla_kv.h"

#include <torch/csrc/stable/library.h>

#include <cstring>

#include "../ops/op_functions.h"
#include "numeric.h"
#include "row_loop.h"

namespace sparse_cp_ops {
namespace {

SCO_INLINE void pack_rows(const PackMlaKvParams& p, int64_t begin, int64_t end) {
  float values[kLatentDim], rope[kRopeDim], scales[kLatentTiles];
  uint16_t rope_bits[kRopeDim];
  for (int64_t row = begin; row < end; ++row) {
    const uint16_t* kv = static_cast<const uint16_t*>(p.compressed_kv) + row * p.kv_stride;
    const uint16_t* pe = static_cast<const uint16_t*>(p.k_pe) + row * p.pe_stride;
    uint8_t* record = p.records + row * p.record_stride;
    for (int64_t i = 0; i < kLatentDim; ++i) values[i] = bf16_to_float(kv[i]);
    for (int64_t tile = 0; tile < kLatentTiles; ++tile)
      scales[tile] =
          encode_fp8_tile(values + tile * kScaleTile, kScaleTile, kFp8Max, p.ue8m0, record + tile * kScaleTile);
    std::memcpy(record + kMlaScaleOffset, scales, sizeof(scales));
    for (int64_t i = 0; i < kRopeDim; ++i) rope[i] = bf16_to_float(pe[i]);
    rope_in_place(rope, cos_sin_row(p.table, row), kRopeDim, p.table.interleaved);
    for (int64_t i = 0; i < kRopeDim; ++i) rope_bits[i] = float_to_bf16(rope[i]);
    std::memcpy(record + kMlaRopeOffset, rope_bits, sizeof(rope_bits));
  }
}
SCO_DEFINE_ROW_LOOP(pack_rows, PackMlaKvParams)

}  // namespace

void pack_mla_kv(const Tensor& compressed_kv, const Tensor& k_pe, const Tensor& positions, const Tensor& cos_sin_cache,
                 Tensor records, bool interleaved, std::string scale_format) {
  const PackMlaKvParams p =
      prepare_pack_mla_kv(compressed_kv, k_pe, positions, cos_sin_cache, records, interleaved, scale_format);
  if (value_checks_enabled()) check_rope_positions(positions, cos_sin_cache);
  const auto loop = pack_rows_for_this_cpu();
  parallel_rows(p.rows, kQkDim, [&](int64_t begin, int64_t end) { loop(p, begin, end); });
}

}  // namespace sparse_cp_ops

STABLE_TORCH_LIBRARY_IMPL(sparse_cp_ops, CPU, m) { m.impl("pack_mla_kv", TORCH_BOX(&sparse_cp_ops::pack_mla_kv)); }
