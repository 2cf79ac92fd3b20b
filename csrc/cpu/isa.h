// Which vector instructions a CPU kernel uses: the best that this CPU has, at most what SPARSE_CP_OPS_CPU names.
//
// The libraries are built without -march, so that one build runs on every CPU of its architecture. A kernel that wants
// vectors is compiled once a level, from one source that is included in a namespace a level:
//
//   #include <immintrin.h>             // standard and intrinsic headers before the first SCO_BEGIN_*
//   SCO_BEGIN_AVX2
//   namespace avx2 { ... }
//   SCO_END_TARGET
//
// Other compilers than GCC and other architectures get the generic level (SCO_HAS_X86_LEVELS is 0).
#pragma once

#include <algorithm>
#include <cstdlib>
#include <string>

#include "../tensor_checks.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define SCO_HAS_X86_LEVELS 1
#define SCO_BEGIN_AVX2 _Pragma("GCC push_options") _Pragma("GCC target(\"avx2,fma,f16c\")")
#define SCO_BEGIN_AVX512 \
  _Pragma("GCC push_options") _Pragma("GCC target(\"avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl\")")
#define SCO_BEGIN_AVX512_BF16 \
  _Pragma("GCC push_options") \
      _Pragma("GCC target(\"avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512bf16\")")
#define SCO_END_TARGET _Pragma("GCC pop_options")
#else
#define SCO_HAS_X86_LEVELS 0
#endif

namespace sparse_cp_ops {

enum class Isa { kGeneric, kAvx2, kAvx512, kAvx512Bf16 };

inline Isa best_isa() {
#if SCO_HAS_X86_LEVELS
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("f16c"))
    return Isa::kGeneric;
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl"))
    return Isa::kAvx2;
  if (!__builtin_cpu_supports("avx512vbmi") || !__builtin_cpu_supports("avx512bf16")) return Isa::kAvx512;
  return Isa::kAvx512Bf16;
#else
  return Isa::kGeneric;
#endif
}

// SPARSE_CP_OPS_CPU=auto|generic|avx2|avx512|avx512_bf16, read at each call: tests walk through the levels.
inline Isa cpu_isa() {
  static const Isa best = best_isa();
  const char* value = std::getenv("SPARSE_CP_OPS_CPU");
  const std::string name = value == nullptr || value[0] == '\0' ? "auto" : value;
  if (name == "auto") return best;
  if (name == "generic") return Isa::kGeneric;
  if (name == "avx2") return std::min(best, Isa::kAvx2);
  if (name == "avx512") return std::min(best, Isa::kAvx512);
  if (name == "avx512_bf16") return std::min(best, Isa::kAvx512Bf16);
  fail("SPARSE_CP_OPS_CPU: expected auto, generic, avx2, avx512 or avx512_bf16, got \"", name, "\"");
}

}  // namespace sparse_cp_ops
