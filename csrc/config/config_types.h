// Configuration types that the engine hands over. Plain C++: no torch, no Python.
#pragma once

#include <array>
#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <string>

namespace sparse_cp_ops {

// How prefill rows are shared among the ranks of the tensor-parallel group. The values are part of the pickle format.
enum class CPRotateMethod : int {
  DISABLED = 0,
  ALL_GATHER = 1,
  ALL_GATHER_WITH_OVERLAP = 2,
  ALLTOALL = 3,
  PREFILL_CP = 4,  // a decode process whose prefill peers ran context parallelism
  UNKNOWN = 5,
};
inline constexpr int kNumRotateMethods = 6;

enum class FMHAType : int {
  NONE = 0,
  FLASH_INFER = 1,
  SPARSE_FLASHMLA = 2,
  CP_SPARSE_FLASHMLA = 3,
};

template <class Value>
[[noreturn]] void refuse(const char* name, const char* expected, const Value& got) {
  std::ostringstream message;
  message << name << ": expected " << expected << ", got " << got;
  throw std::invalid_argument(message.str());
}

struct PrefillCPConfig {
  CPRotateMethod method = CPRotateMethod::DISABLED;
  int64_t comm_buffer_size = int64_t{512} << 20;  // bytes; a larger gather uses plain buffers
  bool kv_cache_sharded = false;
  int64_t prefill_cp_size = 0;  // ranks of the prefill group; 0 = the size of the tensor-parallel group
  // A batch runs under context parallelism iff it reaches both thresholds.
  // Eager layers of DeepSeek-V3.2 on an H200 (benchmarks/results/H200_layer.md): up to 512 tokens without a prefix are
  // bound by the host and lose up to 1.3x, 1024 gain 1.5x, and 1.7x to 3.1x behind a prefix of 32K.
  int64_t min_tokens = 1024;
  // (query, key) pairs: 1024 tokens without a prefix have 524,800.
  int64_t min_kv_work = int64_t{1} << 19;
  // Slowest rank over mean in 21 cases of benchmarks/results/H200_layer.md: at most 1.03, zigzag 1.07.
  std::string split = "interleave";
  std::string decode_mode = "replicated";

  bool operator==(const PrefillCPConfig&) const = default;

  bool is_enabled() const {
    return method == CPRotateMethod::ALL_GATHER || method == CPRotateMethod::ALL_GATHER_WITH_OVERLAP ||
           method == CPRotateMethod::ALLTOALL;
  }
  bool is_prefill_enabled() const { return method == CPRotateMethod::PREFILL_CP; }
  bool pays(int64_t new_tokens, int64_t kv_work) const { return new_tokens >= min_tokens && kv_work >= min_kv_work; }

  void validate() const {
    if (comm_buffer_size < 0) refuse("comm_buffer_size", "bytes >= 0", comm_buffer_size);
    if (prefill_cp_size < 0) refuse("prefill_cp_size", "a size >= 0", prefill_cp_size);
    if (min_tokens < 0) refuse("min_tokens", "a count >= 0", min_tokens);
    if (min_kv_work < 0) refuse("min_kv_work", "a count >= 0", min_kv_work);
    if (split != "zigzag" && split != "interleave") refuse("split", "'zigzag' or 'interleave'", "'" + split + "'");
    if (decode_mode != "replicated" && decode_mode != "head_slice" && decode_mode != "batch_slice")
      refuse("decode_mode", "'replicated', 'head_slice' or 'batch_slice'", "'" + decode_mode + "'");
  }
};

struct ParallelismConfig {
  int64_t tp_size = 1, tp_rank = 0;
  int64_t ep_size = 1, ep_rank = 0;
  int64_t dp_size = 1, dp_rank = 0;
  int64_t pp_size = 1, pp_rank = 0;
  int64_t world_size = 1, world_rank = 0;
  int64_t local_world_size = 1, local_rank = 0;
  int64_t ffn_sp_size = 1, ffn_sp_rank = 0;
  bool enable_sp = false;
  PrefillCPConfig prefill_cp_config;
  bool use_ub_comm = false;

  bool operator==(const ParallelismConfig&) const = default;

  // While prefill rows are split, attention weights are replicated: attention sees one rank.
  int64_t get_attn_tp_size() const { return prefill_cp_config.is_enabled() ? 1 : tp_size; }
  int64_t get_attn_tp_rank() const { return prefill_cp_config.is_enabled() ? 0 : tp_rank; }
  bool is_tp_equal_ep() const { return tp_size == ep_size; }
  bool is_attn_tp_equal_ep() const { return get_attn_tp_size() == ep_size; }

  void validate() const;
};

// The integer fields in the order of the constructor and the pickle; sizes and ranks alternate.
struct ParallelismField {
  const char* name;
  int64_t ParallelismConfig::* member;
};
inline constexpr std::array<ParallelismField, 14> kParallelismFields{{
    {"tp_size", &ParallelismConfig::tp_size},
    {"tp_rank", &ParallelismConfig::tp_rank},
    {"ep_size", &ParallelismConfig::ep_size},
    {"ep_rank", &ParallelismConfig::ep_rank},
    {"dp_size", &ParallelismConfig::dp_size},
    {"dp_rank", &ParallelismConfig::dp_rank},
    {"pp_size", &ParallelismConfig::pp_size},
    {"pp_rank", &ParallelismConfig::pp_rank},
    {"world_size", &ParallelismConfig::world_size},
    {"world_rank", &ParallelismConfig::world_rank},
    {"local_world_size", &ParallelismConfig::local_world_size},
    {"local_rank", &ParallelismConfig::local_rank},
    {"ffn_sp_size", &ParallelismConfig::ffn_sp_size},
    {"ffn_sp_rank", &ParallelismConfig::ffn_sp_rank},
}};

inline void ParallelismConfig::validate() const {
  for (size_t i = 0; i < kParallelismFields.size(); i += 2) {
    const auto& [size_name, size_member] = kParallelismFields[i];
    const auto& [rank_name, rank_member] = kParallelismFields[i + 1];
    const int64_t size = this->*size_member, rank = this->*rank_member;
    if (size < 1) refuse(size_name, "a size >= 1", size);
    if (rank < 0 || rank >= size)
      refuse(rank_name, ("a rank in [0, " + std::to_string(size) + "), below " + size_name).c_str(), rank);
  }
  prefill_cp_config.validate();
}

}  // namespace sparse_cp_ops
