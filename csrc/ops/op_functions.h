// The ops that others are made of, as C++ functions: each library defines them for its device, under the ops' names.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>

namespace sparse_cp_ops {

using torch::stable::Tensor;

void rope_(Tensor x, const Tensor& positions, const Tensor& cos_sin_cache, bool interleaved,
           std::optional<Tensor> source);

void pack_mla_kv(const Tensor& compressed_kv, const Tensor& k_pe, const Tensor& positions, const Tensor& cos_sin_cache,
                 Tensor records, bool interleaved, std::string scale_format);

std::tuple<Tensor, Tensor> quant_q_k_cp(const Tensor& q, const Tensor& k, const Tensor& weights,
                                        const Tensor& positions, const Tensor& cos_sin_cache, Tensor k_records,
                                        bool interleaved, bool hadamard, double weight_scale, std::string scale_format,
                                        double q_absmax);

void write_kv_cache(const Tensor& mla_records, std::optional<Tensor> k_records, std::optional<Tensor> req_ids,
                    std::optional<Tensor> positions, std::optional<Tensor> block_table, Tensor mla_cache,
                    std::optional<Tensor> indexer_cache, std::optional<Tensor> slots);

Tensor indexer_topk_ragged_cp(const Tensor& q_fp8, const Tensor& q_weights, const Tensor& indexer_cache,
                              const Tensor& block_table, const Tensor& req_ids, const Tensor& kv_lens, int64_t topk,
                              int64_t workspace_bytes, std::string precision);

std::tuple<Tensor, Tensor> sparse_mla_fp8_cp(const Tensor& q, const Tensor& kv_cache, const Tensor& indices,
                                             const std::optional<Tensor>& block_table,
                                             const std::optional<Tensor>& req_ids, const std::optional<Tensor>& kv_lens,
                                             double softmax_scale, const std::string& precision, bool batch_invariant);

}  // namespace sparse_cp_ops
