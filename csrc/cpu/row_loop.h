// Loops over rows: compiled for the generic level and for AVX2 (the same bytes), spread over threads.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "isa.h"

namespace sparse_cp_ops {

template <class Params>
using RowLoop = void (*)(const Params& p, int64_t begin, int64_t end);

// Defines loop_for_this_cpu() from `loop`, which has to be SCO_INLINE, as has everything that it calls.
#if SCO_HAS_X86_LEVELS
#define SCO_DEFINE_ROW_LOOP(loop, Params)                                                         \
  void loop##_generic(const Params& p, int64_t begin, int64_t end) { loop(p, begin, end); }       \
  __attribute__((target("avx2"))) void loop##_avx2(const Params& p, int64_t begin, int64_t end) { \
    loop(p, begin, end);                                                                          \
  }                                                                                               \
  RowLoop<Params> loop##_for_this_cpu() { return cpu_isa() >= Isa::kAvx2 ? loop##_avx2 : loop##_generic; }
#else
#define SCO_DEFINE_ROW_LOOP(loop, Params)                                                   \
  void loop##_generic(const Params& p, int64_t begin, int64_t end) { loop(p, begin, end); } \
  RowLoop<Params> loop##_for_this_cpu() { return loop##_generic; }
#endif

// Tasks of about 16K values, some 10 us, so that a task is worth waking a thread.
template <class Function>
void parallel_rows(int64_t rows, int64_t values_per_row, const Function& function) {
  const int64_t grain = std::max<int64_t>(1, 16384 / std::max<int64_t>(1, values_per_row));
  torch::stable::parallel_for(0, rows, grain, function);
}

}  // namespace sparse_cp_ops
