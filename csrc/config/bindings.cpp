// sparse_cp_ops._config: configuration types and the host-side planner (no torch).
#include "bindings.h"

PYBIND11_MODULE(_config, m) {
  m.doc() = "Configuration types and the host-side context-parallel planner.";
  sparse_cp_ops::bind_config_types(m);
  sparse_cp_ops::bind_planner(m);
}
