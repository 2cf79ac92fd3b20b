// Python face of the planner: int32 arrays in, sizes out, the request table filled in place.
#include "../config/bindings.h"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>

#include "../check_switch.h"
#include "planner.h"

namespace py = pybind11;

namespace sparse_cp_ops {
namespace {

using Int32Array = py::array_t<int32_t>;

Lengths lengths(const Int32Array& array, const char* name, int64_t requests) {
  if (array.ndim() != 1 || array.shape(0) != requests)
    throw py::value_error(std::string(name) + ": expected shape [" + std::to_string(requests) + "]");
  if (requests && array.strides(0) % static_cast<int64_t>(sizeof(int32_t)))
    throw py::value_error(std::string(name) + ": expected a stride of whole elements, got " +
                          std::to_string(array.strides(0)) + " bytes");
  return {array.data(), requests ? array.strides(0) / static_cast<int64_t>(sizeof(int32_t)) : 0};
}

py::tuple plan_requests_binding(const Int32Array& new_lens, const Int32Array& prefix_lens, int64_t cp_rank,
                                int64_t cp_size, const std::string& split, int64_t page_size,
                                std::optional<int64_t> table_width, std::optional<int64_t> max_positions,
                                std::optional<Int32Array> table) {
  if (max_positions && *max_positions < 0)
    throw py::value_error("max_positions: expected a count >= 0, got " + std::to_string(*max_positions));
  const int64_t requests = new_lens.size();
  const PlanArguments arguments{
      cp_rank, cp_size, split, page_size, table_width.value_or(kUnlimited), max_positions.value_or(kUnlimited)};
  const Lengths fresh = lengths(new_lens, "new_lens", requests), cached = lengths(prefix_lens, "prefix_lens", requests);
  const PlanSizes sizes = plan_requests(fresh, cached, requests, arguments);
  if (table) {
    if (table->ndim() != 2 || table->shape(0) < requests || table->shape(1) != 2 ||
        !(table->flags() & py::array::c_style))
      throw py::value_error("table: expected a contiguous array of shape [>= " + std::to_string(requests) + ", 2]");
    fill_request_table(fresh, cached, requests, table->mutable_data(), table->shape(0));
  }
  return py::make_tuple(sizes.local_rows, sizes.total_tokens, sizes.kv_work);
}

}  // namespace

void bind_planner(py::module_& m) {
  m.def(
      "plan_requests", &plan_requests_binding, py::arg("new_lens").noconvert(), py::arg("prefix_lens").noconvert(),
      py::arg("cp_rank"), py::arg("cp_size"), py::arg("split"), py::arg("page_size"), py::arg("table_width"),
      py::arg("max_positions"), py::arg("table").noconvert() = py::none(),
      "Check a batch and write (prefix_len, new_len) of every request into an int32 table [rows, 2], zeros behind the "
      "last; returns (local_rows, total_tokens, kv_work).");
  m.def("value_checks_enabled", &value_checks_enabled,
        "Whether SPARSE_CP_OPS_CHECK is set to anything but 0; read at each call, as the ops do.");
}

}  // namespace sparse_cp_ops
