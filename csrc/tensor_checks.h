// Argument checks of the ops: every message names the argument, what was expected and what came.
// Order in an op: ndim, device, dtype, shape, stride. They throw std::invalid_argument (ValueError in Python).
#pragma once

#include <torch/csrc/stable/device.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>

#include "check_switch.h"

namespace sparse_cp_ops {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw std::invalid_argument(message.str());
}

#define SCO_CHECK(condition, ...)         \
  do {                                    \
    if (!(condition)) [[unlikely]]        \
      ::sparse_cp_ops::fail(__VA_ARGS__); \
  } while (0)

inline constexpr int64_t kAny = -1;  // in check_shape: any extent

inline std::string shape_string(const Tensor& t) {
  std::ostringstream s;
  s << '[';
  for (int64_t i = 0; i < t.dim(); ++i) s << (i ? ", " : "") << t.size(i);
  s << ']';
  return s.str();
}

inline std::string shape_string(std::initializer_list<int64_t> shape) {
  std::ostringstream s;
  s << '[';
  bool first = true;
  for (int64_t extent : shape) {
    s << (first ? "" : ", ");
    if (extent == kAny) s << '*';
    else s << extent;
    first = false;
  }
  s << ']';
  return s.str();
}

inline const char* dtype_name(ScalarType type) {
  switch (type) {
    case ScalarType::Byte: return "uint8";
    case ScalarType::Int: return "int32";
    case ScalarType::Long: return "int64";
    case ScalarType::Short: return "int16";
    case ScalarType::Char: return "int8";
    case ScalarType::Bool: return "bool";
    case ScalarType::Half: return "float16";
    case ScalarType::BFloat16: return "bfloat16";
    case ScalarType::Float: return "float32";
    case ScalarType::Double: return "float64";
    case ScalarType::Float8_e4m3fn: return "float8_e4m3fn";
    case ScalarType::Float8_e5m2: return "float8_e5m2";
    case ScalarType::UInt16: return "uint16";
    case ScalarType::UInt32: return "uint32";
    case ScalarType::UInt64: return "uint64";
    case ScalarType::ComplexFloat: return "complex64";
    case ScalarType::ComplexDouble: return "complex128";
    default: return "another dtype";
  }
}

inline std::string device_name(const Tensor& t) {
  if (t.is_cpu()) return "cpu";
  return (t.is_cuda() ? "cuda:" : "device:") + std::to_string(t.get_device_index());
}

inline void check_dim(const Tensor& t, const char* name, int64_t ndim) {
  SCO_CHECK(t.dim() == ndim, name, ": expected ", ndim, " dimensions, got ", t.dim(), " (shape ", shape_string(t), ")");
}

// Same device as `like`, the argument that decides where the op runs.
inline void check_device(const Tensor& t, const char* name, const Tensor& like, const char* like_name) {
  SCO_CHECK(t.device() == like.device(), name, ": expected device ", device_name(like), " (that of ", like_name,
            "), got ", device_name(t));
}

inline void check_dtype(const Tensor& t, const char* name, ScalarType expected) {
  SCO_CHECK(t.scalar_type() == expected, name, ": expected dtype ", dtype_name(expected), ", got ",
            dtype_name(t.scalar_type()));
}

inline void check_shape(const Tensor& t, const char* name, std::initializer_list<int64_t> expected) {
  bool same = t.dim() == static_cast<int64_t>(expected.size());
  int64_t i = 0;
  for (int64_t extent : expected) {
    if (!same) break;
    same = extent == kAny || t.size(i) == extent;
    ++i;
  }
  SCO_CHECK(same, name, ": expected shape ", shape_string(expected), ", got ", shape_string(t));
}

inline void check_last_contiguous(const Tensor& t, const char* name) {
  const int64_t last = t.dim() - 1;
  SCO_CHECK(t.size(last) <= 1 || t.stride(last) == 1, name, ": expected a contiguous last dimension, got stride ",
            t.stride(last));
}

inline void check_contiguous(const Tensor& t, const char* name) {
  SCO_CHECK(t.is_contiguous(), name, ": expected a contiguous tensor, got shape ", shape_string(t), " with stride ",
            t.dim() ? t.stride(0) : 0, " in dimension 0");
}

// Whole vectors are loaded from rows: base address and row stride in bytes.
inline void check_alignment(const Tensor& t, const char* name, int64_t bytes) {
  SCO_CHECK(reinterpret_cast<uintptr_t>(t.data_ptr()) % bytes == 0, name, ": expected data aligned to ", bytes,
            " bytes, got an address with remainder ", reinterpret_cast<uintptr_t>(t.data_ptr()) % bytes);
}

// uint8 rows that are read or written in pieces of `bytes`: the address and every stride but the last.
inline void check_row_alignment(const Tensor& t, const char* name, int64_t bytes) {
  check_alignment(t, name, bytes);
  for (int64_t i = 0; i + 1 < t.dim(); ++i)
    SCO_CHECK(t.size(i) <= 1 || t.stride(i) % bytes == 0, name, ": expected a stride that is a multiple of ", bytes,
              " bytes in dimension ", i, ", got ", t.stride(i));
}

// ndim, device, dtype and shape of an argument in one line; strides are checked by the op that knows what it needs.
inline void check_tensor(const Tensor& t, const char* name, const Tensor& like, const char* like_name, ScalarType dtype,
                         std::initializer_list<int64_t> shape) {
  check_dim(t, name, static_cast<int64_t>(shape.size()));
  check_device(t, name, like, like_name);
  check_dtype(t, name, dtype);
  check_shape(t, name, shape);
}

// A tensor that is written: no element may be reachable twice (expanded or overlapping views), else rows race.
inline void check_writable(const Tensor& t, const char* name) {
  int64_t reach = 1;  // smallest stride that the next larger dimension may have
  bool used[8] = {};
  for (int64_t k = 0; k < t.dim() && t.dim() <= 8; ++k) {
    int64_t best = -1;
    for (int64_t i = 0; i < t.dim(); ++i)
      if (!used[i] && (best < 0 || t.stride(i) < t.stride(best))) best = i;
    used[best] = true;
    if (t.size(best) <= 1) continue;
    SCO_CHECK(t.stride(best) >= reach, name, ": expected memory without overlap because it is written, got stride ",
              t.stride(best), " in dimension ", best, " of shape ", shape_string(t));
    reach = t.stride(best) * (t.size(best) - 1) + reach;
  }
}

struct NamedTensor {
  const char* name;
  const Tensor& tensor;
};

// Bytes from the first to the last element; strides are never negative. 0 without elements.
inline uintptr_t byte_extent(const Tensor& t) {
  if (t.numel() == 0) return 0;
  int64_t last = 0;
  for (int64_t i = 0; i < t.dim(); ++i) last += (t.size(i) - 1) * t.stride(i);
  return static_cast<uintptr_t>(last + 1) * t.element_size();
}

// What an op writes must not lie among what it reads: rows are worked on in any order and would read each other's
// results. Address ranges are compared, so views that interleave count as overlapping.
inline void check_no_overlap(const Tensor& written, const char* name, std::initializer_list<NamedTensor> read) {
  const auto begin = reinterpret_cast<uintptr_t>(written.data_ptr()), end = begin + byte_extent(written);
  for (const auto& [read_name, t] : read) {
    const auto start = reinterpret_cast<uintptr_t>(t.data_ptr());
    SCO_CHECK(begin >= start + byte_extent(t) || start >= end, name,
              ": expected memory of its own because it is written, got memory that overlaps ", read_name);
  }
}

}  // namespace sparse_cp_ops
