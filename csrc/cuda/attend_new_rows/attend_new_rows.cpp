// attend_new_rows on CUDA: the kernels of its ops, one after the other on the current stream.
#include "../../ops/attend_new_rows.h"

#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY_IMPL(sparse_cp_ops, CUDA, m) {
  m.impl("attend_new_rows", TORCH_BOX(&sparse_cp_ops::attend_new_rows));
}
