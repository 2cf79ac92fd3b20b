// Which rows are scored together, and who scores what: made on the device, since lengths live there.
#pragma once

#include <cuda_runtime.h>

#include "scoring.h"

namespace sparse_cp_ops {

inline constexpr int kBlockRows = 12;  // rows of one request that share a key tile
inline constexpr int kGroupRows = 4;   // rows of one warpgroup
inline constexpr int kTileKeys = 64;
inline constexpr int kPieceKeys = 16;  // what one copy brings: a tile is four pieces, anywhere in the request
inline constexpr int kMaxCtas = 1024;  // of the persistent scoring kernel: one a multiprocessor

// Keys of a pass. A sample takes one piece of `stride` and leaves the rest to another pass.
enum class Sweep { kAll, kSample, kRest };

struct ScoreBlock {
  int32_t slot, rows;  // slots slot, slot + 1, ... of the row set; all of one request
  int32_t end;         // behind the last key that one of the rows wants in this pass
  int32_t stride;      // power of two; 1: the sample is everything
};

// Device memory of a plan. Work is cut into steps, one after the other over all blocks; CTA c takes steps
// [total * c / ctas, total * (c + 1) / ctas).
struct ScorePlan {
  ScoreBlock* blocks;    // [slots]
  int32_t* first_steps;  // [slots + 1]: steps before a block; behind the last block the total
  int32_t* cta_blocks;   // [kMaxCtas]: the block of a CTA's first step
  int32_t* block_count;  // [1]
  int32_t* block_of;     // [slots]: the block of a slot

  static constexpr int64_t bytes(int64_t slots) {
    return slots * (sizeof(ScoreBlock) + 2 * sizeof(int32_t)) + (kMaxCtas + 4) * sizeof(int32_t);
  }
  static ScorePlan at(void* memory, int64_t slots) {  // memory aligned to 16 bytes
    ScorePlan plan;
    plan.blocks = static_cast<ScoreBlock*>(memory);
    plan.cta_blocks = reinterpret_cast<int32_t*>(plan.blocks + slots);
    plan.block_count = plan.cta_blocks + kMaxCtas;
    plan.block_of = plan.block_count + 1;
    plan.first_steps = plan.block_of + slots;
    return plan;
  }
};

struct PlanTask {
  IndexerInputs in;
  RowSet rows;
  int64_t first_key, key_count;  // first_key a multiple of kTileKeys
  int64_t skip_keys;             // rows with at most that many keys are left out
  Sweep sweep;
  int64_t sample_keys;  // most keys of a row in a sample
  int ctas;
  ScorePlan plan;
};

void launch_score_plan(const PlanTask& task, cudaStream_t stream);

}  // namespace sparse_cp_ops
