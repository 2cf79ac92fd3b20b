// The parts of the _config module, one a file.
#pragma once

#include <pybind11/pybind11.h>

namespace sparse_cp_ops {

void bind_config_types(pybind11::module_& m);
void bind_planner(pybind11::module_& m);

}  // namespace sparse_cp_ops
