// How writers choose the scale of an FP8 tile.
#pragma once

#include <string>

#include "../tensor_checks.h"

namespace sparse_cp_ops {

// True for "ue8m0" (rounded up to a power of two), false for "fp32".
inline bool check_scale_format(const std::string& scale_format) {
  SCO_CHECK(scale_format == "ue8m0" || scale_format == "fp32", "scale_format: expected \"ue8m0\" or \"fp32\", got \"",
            scale_format, "\"");
  return scale_format == "ue8m0";
}

}  // namespace sparse_cp_ops
