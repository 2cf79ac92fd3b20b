// SPARSE_CP_OPS_CHECK=1: value checks that read device data. No torch in here: the planner asks, too.
#pragma once

#include <cstdlib>
#include <string_view>

namespace sparse_cp_ops {

// Read at each call, so that a debugger can switch it on.
inline bool value_checks_enabled() {
  const char* value = std::getenv("SPARSE_CP_OPS_CHECK");
  return value != nullptr && value[0] != '\0' && std::string_view(value) != "0";
}

}  // namespace sparse_cp_ops
