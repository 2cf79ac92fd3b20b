// sparse_cp_ops._config: configuration types and the host-side planner (no torch).
#include <pybind11/pybind11.h>

PYBIND11_MODULE(_config, m) { m.doc() = "Configuration types and the host-side context-parallel planner."; }
