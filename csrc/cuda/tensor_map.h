// Descriptors of tensors in global memory for the bulk tensor copy engine (sm_90 and newer).
#pragma once

#include <cuda.h>

#include <cstdint>

namespace sparse_cp_ops {

// Byte tensor [planes, rows, 128], dense rows, planes plane_stride bytes apart (a multiple of 16), read in boxes of
// box_rows rows that lie 128-byte swizzled in shared memory. A plane outside [0, planes) reads as zeros.
CUtensorMap swizzled_rows_map(const void* data, int64_t planes, int64_t rows, int64_t plane_stride, uint32_t box_rows);

}  // namespace sparse_cp_ops
