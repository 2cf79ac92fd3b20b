// Indexer scores on the CPU: decode once, then one micro-kernel with one order of operations for every score.
//
// Queries and keys are decoded to words of 32 bits, step by step of the dot product: a word is one fp32 value (128
// steps) or, with AVX512-BF16, a pair of bf16 values (64 steps); e4m3 is exact in both, products are exact in fp32. A
// tile of kKeyTile decoded keys is scored against all rows of its request in a block of rows. The sums of a score run
// over steps, then heads, in one order: wherever its key lies in a tile, whichever rows share the block.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <atomic>
#include <cstring>

#include "../ops/indexer_inputs.h"
#include "isa.h"
#include "topk_candidates.h"

namespace sparse_cp_ops {

inline constexpr int64_t kKeyTile = 64;
inline constexpr int64_t kKeyGroup = 16;     // keys decoded at once: the smallest page
inline constexpr int64_t kMaxRowBlock = 16;  // rows that share a decoded tile: with 16 heads, 8 % of the time decodes

// The kernel of one instruction level.
struct IndexerKernel {
  int64_t steps;  // words a query head or a key decodes to
  // q8 [heads, 128] -> words [heads/8, steps, 8]
  void (*decode_query)(const uint8_t* q8, int64_t heads, uint32_t* words);
  // k8 [kKeyGroup, 128] -> a column of the key tile: words [steps, kKeyTile] from a multiple of kKeyGroup on
  void (*decode_keys)(const uint8_t* k8, uint32_t* words);
  // scores [kKeyTile]: for the first `keys` scales[j] * sum_h weights[h] * relu(query[h] . key[j]), else anything
  void (*score_tile)(const uint32_t* query, const float* weights, int64_t heads, const uint32_t* key_tile,
                     const float* scales, int64_t keys, float* scores);
  // Adds the keys above the list's threshold; it has room for kKeyTile more.
  void (*append_candidates)(TopkCandidates& list, const float* scores, int64_t keys, int64_t first_position);
  void (*keep_best)(TopkCandidates& list, int64_t k);  // k < list.count
};

const IndexerKernel& indexer_kernel(Isa isa);

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Temporary memory of one worker.
struct ScoringScratch {
  uint32_t* queries;  // [row_block, heads/8, steps, 8]
  uint32_t* keys;     // [steps, kKeyTile]
  float* scales;      // [kKeyTile]
  float* scores;      // [kKeyTile]

  static int64_t bytes(const IndexerKernel& kernel, int64_t heads, int64_t row_block) {
    return 4 * (row_block * heads * kernel.steps + kernel.steps * kKeyTile + 2 * kKeyTile);
  }
  ScoringScratch(void* memory, const IndexerKernel& kernel, int64_t heads, int64_t row_block)
      : queries(static_cast<uint32_t*>(memory)),
        keys(queries + row_block * heads * kernel.steps),
        scales(reinterpret_cast<float*>(keys + kernel.steps * kKeyTile)),
        scores(scales + kKeyTile) {}
};

// Decodes keys first .. first+keys-1 of a request. A key without a page gets scale NaN, hence score NaN.
inline void load_key_tile(const IndexerInputs& in, const IndexerKernel& kernel, int64_t request, int64_t first,
                          int64_t keys, const ScoringScratch& scratch) {
  for (int64_t column = 0; column < keys; column += kKeyGroup) {
    const int64_t position = first + column, offset = position % in.page_size;
    const int64_t page = in.block_table[request * in.table_stride + position / in.page_size];
    if (page < 0 || page >= in.pages) {
      for (int64_t step = 0; step < kernel.steps; ++step)
        std::fill_n(scratch.keys + step * kKeyTile + column, kKeyGroup, 0u);
      std::fill_n(scratch.scales + column, kKeyGroup, std::numeric_limits<float>::quiet_NaN());
      continue;
    }
    const uint8_t* base = in.cache + page * in.page_stride;
    kernel.decode_keys(base + index_values_offset(offset), scratch.keys + column);
    std::memcpy(scratch.scales + column, base + index_scale_offset(in.page_size, offset), kKeyGroup * sizeof(float));
  }
}

// Scores rows row_begin .. row_end-1 (at most the scratch's row block) against their keys key_begin .. key_end-1, as
// far as limits[row - row_begin] goes. key_begin is a multiple of kKeyTile. Calls sink(row, first_key, keys, scores)
// with ascending keys for each row.
template <class Sink>
void score_rows(const IndexerInputs& in, const IndexerKernel& kernel, const ScoringScratch& scratch, int64_t row_begin,
                int64_t row_end, const int64_t* limits, int64_t key_begin, int64_t key_end, const Sink& sink) {
  const int64_t query_words = in.heads * kernel.steps;
  for (int64_t first_row = row_begin, last_row; first_row < row_end; first_row = last_row) {
    const int32_t request = in.req_ids[first_row];
    int64_t longest = 0;
    for (last_row = first_row; last_row < row_end && in.req_ids[last_row] == request; ++last_row) {
      const int64_t limit = limits[last_row - row_begin];
      longest = std::max(longest, limit);
      if (limit > key_begin)
        kernel.decode_query(in.q_fp8 + last_row * in.heads * kIndexDim, in.heads,
                            scratch.queries + (last_row - row_begin) * query_words);
    }
    const int64_t end = std::min(longest, key_end);
    for (int64_t first_key = key_begin; first_key < end; first_key += kKeyTile) {
      load_key_tile(in, kernel, request, first_key, std::min(kKeyTile, end - first_key), scratch);
      for (int64_t row = first_row; row < last_row; ++row) {
        const int64_t keys = std::min(kKeyTile, std::min(limits[row - row_begin], key_end) - first_key);
        if (keys <= 0) continue;
        kernel.score_tile(scratch.queries + (row - row_begin) * query_words, in.q_weights + row * in.heads, in.heads,
                          scratch.keys, scratch.scales, keys, scratch.scores);
        sink(row, first_key, keys, scratch.scores);
      }
    }
  }
}

inline constexpr int64_t kTasksPerWorker = 4;  // rows differ in length: several tasks each even out

// Rows of a task: few enough that all workers have tasks, but at least 4, so that decoding stays small beside scoring.
inline int64_t row_block_of(int64_t rows, int64_t workers) {
  return std::clamp<int64_t>(rows / (workers * kTasksPerWorker), std::min<int64_t>(rows, 4), kMaxRowBlock);
}

// Runs task(worker, index) for all indices, the last first: later rows of a request see more keys.
template <class Task>
void run_tasks(int64_t tasks, int64_t workers, const Task& task) {
  std::atomic<int64_t> next{0};
  torch::stable::parallel_for(0, workers, 1, [&](int64_t begin, int64_t end) {
    for (int64_t worker = begin; worker < end; ++worker)
      for (int64_t index; (index = next.fetch_add(1, std::memory_order_relaxed)) < tasks;)
        task(worker, tasks - 1 - index);
  });
}

}  // namespace sparse_cp_ops
