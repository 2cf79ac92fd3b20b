// attend_new_rows on the CPU.
#include "../ops/attend_new_rows.h"

#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY_IMPL(sparse_cp_ops, CPU, m) {
  m.impl("attend_new_rows", TORCH_BOX(&sparse_cp_ops::attend_new_rows));
}
