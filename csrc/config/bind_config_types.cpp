// Python face of the configuration types: immutable, hashable, with versioned pickles.
#include <pybind11/native_enum.h>
#include <pybind11/operators.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <string>
#include <utility>

#include "bindings.h"
#include "config_types.h"

namespace py = pybind11;

namespace sparse_cp_ops {
namespace {

// Pickle states are tuples of all fields in the constructor's order; a new field is only ever appended.
constexpr size_t kPrefillOldEntries = 4;  // without min_tokens, min_kv_work, split, decode_mode
constexpr size_t kPrefillEntries = 8;
constexpr size_t kParallelismOldEntries = 16;  // without use_ub_comm
constexpr size_t kParallelismEntries = 17;

// The values of all fields, from a constructor or a pickle, while they are read: errors name the field and what came.
class FieldReader {
 public:
  explicit FieldReader(py::tuple arguments) : fields_(std::move(arguments)) {}

  FieldReader(const char* type, const py::object& state, size_t oldest, size_t newest) : type_(type) {
    if (!py::isinstance<py::tuple>(state))
      throw py::type_error(std::string(type) + " state: expected a tuple, got " + type_name(state));
    fields_ = py::tuple(state);
    const size_t entries = fields_.size();
    if (entries > newest) {
      const std::string message = std::string(type) + " state: has " + std::to_string(entries) +
                                  " entries, this version knows " + std::to_string(newest) +
                                  ": the rest, written by a newer version, is ignored";
      if (PyErr_WarnEx(PyExc_UserWarning, message.c_str(), 1) != 0) throw py::error_already_set();
    } else if (entries != oldest && entries != newest) {
      throw py::value_error(std::string(type) + " state: expected " + std::to_string(oldest) + " or " +
                            std::to_string(newest) + " entries, got " + std::to_string(entries));
    }
  }

  CPRotateMethod method(size_t i, const char* name) const {
    const py::object entry = fields_[i];
    if (py::isinstance<CPRotateMethod>(entry)) return entry.cast<CPRotateMethod>();
    if (type_ == nullptr) mistyped(i, name, "CPRotateMethod", entry);
    const int64_t value = integer(i, name);  // pickles hold the number
    if (value < 0 || value >= kNumRotateMethods)
      throw py::value_error(where(i, name) + ": expected a CPRotateMethod value in [0, " +
                            std::to_string(kNumRotateMethods) + "), got " + std::to_string(value));
    return static_cast<CPRotateMethod>(value);
  }

  bool has(size_t i) const { return i < fields_.size(); }

  int64_t integer(size_t i, const char* name) const {
    const py::object entry = fields_[i];
    if (!py::isinstance<py::int_>(entry) || py::isinstance<py::bool_>(entry)) mistyped(i, name, "int", entry);
    try {
      return entry.cast<int64_t>();
    } catch (const py::cast_error&) {
      throw py::value_error(where(i, name) + ": expected a 64-bit int, got " + std::string(py::str(entry)));
    }
  }

  bool boolean(size_t i, const char* name) const {
    const py::object entry = fields_[i];
    if (!py::isinstance<py::bool_>(entry)) mistyped(i, name, "bool", entry);
    return entry.cast<bool>();
  }

  std::string text(size_t i, const char* name) const {
    const py::object entry = fields_[i];
    if (!py::isinstance<py::str>(entry)) mistyped(i, name, "str", entry);
    try {
      return entry.cast<std::string>();
    } catch (const py::cast_error&) {  // a lone surrogate
      throw py::value_error(where(i, name) + ": expected text that UTF-8 can encode, got " +
                            std::string(py::repr(entry)));
    }
  }

  PrefillCPConfig prefill_cp_config(size_t i, const char* name) const {
    const py::object entry = fields_[i];
    if (!py::isinstance<PrefillCPConfig>(entry)) mistyped(i, name, "PrefillCPConfig", entry);
    return entry.cast<PrefillCPConfig>();
  }

  std::string where(size_t i, const char* name) const {
    if (type_ == nullptr) return name;
    return std::string(type_) + " state: entry " + std::to_string(i) + " (" + name + ")";
  }

 private:
  static std::string type_name(const py::object& value) {
    return py::type::of(value).attr("__name__").cast<std::string>();
  }

  [[noreturn]] void mistyped(size_t i, const char* name, const char* expected, const py::object& entry) const {
    throw py::type_error(where(i, name) + ": expected " + expected + ", got " + type_name(entry));
  }

  const char* type_ = nullptr;  // of the pickle; none in a constructor
  py::tuple fields_;
};

py::tuple get_state(const PrefillCPConfig& c) {
  return py::make_tuple(static_cast<int>(c.method), c.comm_buffer_size, c.kv_cache_sharded, c.prefill_cp_size,
                        c.min_tokens, c.min_kv_work, c.split, c.decode_mode);
}

PrefillCPConfig read_prefill_cp_config(const FieldReader& reader) {
  PrefillCPConfig c;
  c.method = reader.method(0, "method");
  c.comm_buffer_size = reader.integer(1, "comm_buffer_size");
  c.kv_cache_sharded = reader.boolean(2, "kv_cache_sharded");
  c.prefill_cp_size = reader.integer(3, "prefill_cp_size");
  if (reader.has(kPrefillOldEntries)) {
    c.min_tokens = reader.integer(4, "min_tokens");
    c.min_kv_work = reader.integer(5, "min_kv_work");
    c.split = reader.text(6, "split");
    c.decode_mode = reader.text(7, "decode_mode");
  }
  c.validate();
  return c;
}

py::tuple get_state(const ParallelismConfig& c) {
  py::tuple state(kParallelismEntries);
  size_t i = 0;
  for (const auto& [name, member] : kParallelismFields) state[i++] = py::int_(c.*member);
  state[i++] = py::bool_(c.enable_sp);
  state[i++] = py::cast(c.prefill_cp_config);
  state[i++] = py::bool_(c.use_ub_comm);
  return state;
}

ParallelismConfig read_parallelism_config(const FieldReader& reader) {
  ParallelismConfig c;
  size_t i = 0;
  for (const auto& [name, member] : kParallelismFields) c.*member = reader.integer(i++, name);
  c.enable_sp = reader.boolean(i++, "enable_sp");
  c.prefill_cp_config = reader.prefill_cp_config(i++, "prefill_cp_config");
  if (reader.has(i)) c.use_ub_comm = reader.boolean(i, "use_ub_comm");
  c.validate();
  return c;
}

const char* bool_text(bool value) { return value ? "True" : "False"; }

std::string method_name(CPRotateMethod method) {
  return "CPRotateMethod." + py::cast(method).attr("name").cast<std::string>();
}

std::string repr(const PrefillCPConfig& c) {
  std::ostringstream s;
  s << "PrefillCPConfig(method=" << method_name(c.method) << ", comm_buffer_size=" << c.comm_buffer_size
    << ", kv_cache_sharded=" << bool_text(c.kv_cache_sharded) << ", prefill_cp_size=" << c.prefill_cp_size
    << ", min_tokens=" << c.min_tokens << ", min_kv_work=" << c.min_kv_work << ", split='" << c.split
    << "', decode_mode='" << c.decode_mode << "')";
  return s.str();
}

std::string repr(const ParallelismConfig& c) {
  std::ostringstream s;
  s << "ParallelismConfig(";
  for (const auto& [name, member] : kParallelismFields) s << name << '=' << c.*member << ", ";
  s << "enable_sp=" << bool_text(c.enable_sp) << ", prefill_cp_config=" << repr(c.prefill_cp_config)
    << ", use_ub_comm=" << bool_text(c.use_ub_comm) << ')';
  return s.str();
}

void bind_enums(py::module_& m) {
  py::native_enum<CPRotateMethod>(m, "CPRotateMethod", "enum.IntEnum",
                                  "How prefill rows are shared among the ranks of the tensor-parallel group.")
      .value("DISABLED", CPRotateMethod::DISABLED)
      .value("ALL_GATHER", CPRotateMethod::ALL_GATHER)
      .value("ALL_GATHER_WITH_OVERLAP", CPRotateMethod::ALL_GATHER_WITH_OVERLAP)
      .value("ALLTOALL", CPRotateMethod::ALLTOALL)
      .value("PREFILL_CP", CPRotateMethod::PREFILL_CP)
      .value("UNKNOWN", CPRotateMethod::UNKNOWN)
      .finalize();
  py::native_enum<FMHAType>(m, "FMHAType", "enum.IntEnum", "Which attention implementation runs.")
      .value("NONE", FMHAType::NONE)
      .value("FLASH_INFER", FMHAType::FLASH_INFER)
      .value("SPARSE_FLASHMLA", FMHAType::SPARSE_FLASHMLA)
      .value("CP_SPARSE_FLASHMLA", FMHAType::CP_SPARSE_FLASHMLA)
      .finalize();
}

// What both types share: equality, hash, repr, versioned pickle, and copies through it.
template <class Config>
void bind_value_semantics(py::class_<Config>& type, Config (*from_state)(const py::object&)) {
  type.def(py::self == py::self)
      .def("__hash__", [](const Config& c) { return py::hash(get_state(c)); })
      .def("__repr__", [](const Config& c) { return repr(c); })
      .def("__copy__", [](const Config& c) { return Config(c); })
      .def(
          "__deepcopy__", [](const Config& c, const py::dict&) { return Config(c); }, py::arg("memo"))
      // Below protocol 2 Python would make an instance without pybind11's knowledge, which ends the process.
      .def("__reduce_ex__",
           [](const py::object& self, int protocol) {
             return py::module_::import("builtins").attr("object").attr("__reduce_ex__")(self, std::max(protocol, 2));
           })
      .def(py::pickle([](const Config& c) { return get_state(c); }, from_state));
}

// Every object starts as the default value, which its constructor frees and replaces. pybind11 would leave it without
// one and show uninitialised memory to whoever reads it: after a bare __new__, or from a pickle without a state.
template <class Config>
PyObject* new_default(PyTypeObject* type, PyObject*, PyObject*) {
  PyObject* self = py::detail::make_new_instance(type);
  reinterpret_cast<py::detail::instance*>(self)->get_value_and_holder().value_ptr() = new Config();
  return self;
}

// Final and with Python's own metaclass: nothing to inherit, and the stub can say what they are.
template <class Config>
py::class_<Config> value_class(py::module_& m, const char* name, const char* doc) {
  return py::class_<Config>(
      m, name, doc, py::is_final(), py::metaclass(reinterpret_cast<PyObject*>(&PyType_Type)),
      py::custom_type_setup([](PyHeapTypeObject* heap_type) { heap_type->ht_type.tp_new = new_default<Config>; }));
}

using Object = const py::object&;  // an argument whose type is checked by FieldReader, which names it

void bind_prefill_cp_config(py::module_& m) {
  const PrefillCPConfig d;
  auto type = value_class<PrefillCPConfig>(m, "PrefillCPConfig", "Context parallelism during prefill.");
  type.def(py::init([](Object method, Object comm_buffer_size, Object kv_cache_sharded, Object prefill_cp_size,
                       Object min_tokens, Object min_kv_work, Object split, Object decode_mode) {
             return read_prefill_cp_config(
                 FieldReader(py::make_tuple(method, comm_buffer_size, kv_cache_sharded, prefill_cp_size, min_tokens,
                                            min_kv_work, split, decode_mode)));
           }),
           py::arg("method") = d.method, py::arg("comm_buffer_size") = d.comm_buffer_size,
           py::arg("kv_cache_sharded") = d.kv_cache_sharded, py::arg("prefill_cp_size") = d.prefill_cp_size,
           py::arg("min_tokens") = d.min_tokens, py::arg("min_kv_work") = d.min_kv_work, py::arg("split") = d.split,
           py::arg("decode_mode") = d.decode_mode)
      .def_readonly("method", &PrefillCPConfig::method)
      .def_readonly("comm_buffer_size", &PrefillCPConfig::comm_buffer_size)
      .def_readonly("kv_cache_sharded", &PrefillCPConfig::kv_cache_sharded)
      .def_readonly("prefill_cp_size", &PrefillCPConfig::prefill_cp_size)
      .def_readonly("min_tokens", &PrefillCPConfig::min_tokens)
      .def_readonly("min_kv_work", &PrefillCPConfig::min_kv_work)
      .def_readonly("split", &PrefillCPConfig::split)
      .def_readonly("decode_mode", &PrefillCPConfig::decode_mode)
      .def("is_enabled", &PrefillCPConfig::is_enabled)
      .def("is_prefill_enabled", &PrefillCPConfig::is_prefill_enabled)
      .def("pays", &PrefillCPConfig::pays, py::arg("new_tokens"), py::arg("kv_work"));
  bind_value_semantics<PrefillCPConfig>(type, [](const py::object& state) {
    return read_prefill_cp_config(FieldReader("PrefillCPConfig", state, kPrefillOldEntries, kPrefillEntries));
  });
}

void bind_parallelism_config(py::module_& m) {
  const ParallelismConfig d;
  auto type = value_class<ParallelismConfig>(m, "ParallelismConfig", "Sizes and ranks of every kind of parallelism.");
  type.def(py::init([](Object tp_size, Object tp_rank, Object ep_size, Object ep_rank, Object dp_size, Object dp_rank,
                       Object pp_size, Object pp_rank, Object world_size, Object world_rank, Object local_world_size,
                       Object local_rank, Object ffn_sp_size, Object ffn_sp_rank, Object enable_sp,
                       Object prefill_cp_config, Object use_ub_comm) {
             return read_parallelism_config(FieldReader(py::make_tuple(
                 tp_size, tp_rank, ep_size, ep_rank, dp_size, dp_rank, pp_size, pp_rank, world_size, world_rank,
                 local_world_size, local_rank, ffn_sp_size, ffn_sp_rank, enable_sp, prefill_cp_config, use_ub_comm)));
           }),
           py::arg("tp_size") = d.tp_size, py::arg("tp_rank") = d.tp_rank, py::arg("ep_size") = d.ep_size,
           py::arg("ep_rank") = d.ep_rank, py::arg("dp_size") = d.dp_size, py::arg("dp_rank") = d.dp_rank,
           py::arg("pp_size") = d.pp_size, py::arg("pp_rank") = d.pp_rank, py::arg("world_size") = d.world_size,
           py::arg("world_rank") = d.world_rank, py::arg("local_world_size") = d.local_world_size,
           py::arg("local_rank") = d.local_rank, py::arg("ffn_sp_size") = d.ffn_sp_size,
           py::arg("ffn_sp_rank") = d.ffn_sp_rank, py::arg("enable_sp") = d.enable_sp,
           py::arg("prefill_cp_config") = d.prefill_cp_config, py::arg("use_ub_comm") = d.use_ub_comm);
  for (const auto& [name, member] : kParallelismFields) type.def_readonly(name, member);
  type.def_readonly("enable_sp", &ParallelismConfig::enable_sp)
      .def_readonly("prefill_cp_config", &ParallelismConfig::prefill_cp_config)
      .def_readonly("use_ub_comm", &ParallelismConfig::use_ub_comm)
      .def("get_attn_tp_size", &ParallelismConfig::get_attn_tp_size)
      .def("get_attn_tp_rank", &ParallelismConfig::get_attn_tp_rank)
      .def("is_tp_equal_ep", &ParallelismConfig::is_tp_equal_ep)
      .def("is_attn_tp_equal_ep", &ParallelismConfig::is_attn_tp_equal_ep);
  bind_value_semantics<ParallelismConfig>(type, [](const py::object& state) {
    return read_parallelism_config(
        FieldReader("ParallelismConfig", state, kParallelismOldEntries, kParallelismEntries));
  });
}

}  // namespace

void bind_config_types(py::module_& m) {
  bind_enums(m);
  bind_prefill_cp_config(m);
  bind_parallelism_config(m);
}

}  // namespace sparse_cp_ops
