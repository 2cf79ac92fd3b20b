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

// How a pass is cut over the CTAs: into steps, one after the other over all blocks; CTA c takes steps
// [total * c / ctas, total * (c + 1) / ctas).
struct StepTable {
  int32_t* first_steps;  // [slots + 1]: steps before a block; behind the last block the total
  int32_t* cta_blocks;   // [kMaxCtas]: the block of a CTA's first step
};

struct CtaRange {
  int32_t first, end;
};

// Device memory of a plan.
struct ScorePlan {
  ScoreBlock* blocks;     // [slots]
  int32_t* block_count;   // [1]
  int32_t* block_of;      // [slots]: the block of a slot
  CtaRange* ctas_of;      // [slots]: who scores the slot in the pass over the rest
  StepTable first, rest;  // of the pass over all keys or the sample, and of the one over what a sample leaves

  __host__ __device__ const StepTable& steps(Sweep sweep) const { return sweep == Sweep::kRest ? rest : first; }

  static constexpr int64_t bytes(int64_t slots) {
    return slots * (sizeof(ScoreBlock) + sizeof(CtaRange) + 3 * sizeof(int32_t)) + (2 * kMaxCtas + 3) * sizeof(int32_t);
  }
  static ScorePlan at(void* memory, int64_t slots) {  // memory aligned to 16 bytes
    ScorePlan plan;
    plan.blocks = static_cast<ScoreBlock*>(memory);
    plan.ctas_of = reinterpret_cast<CtaRange*>(plan.blocks + slots);
    plan.block_of = reinterpret_cast<int32_t*>(plan.ctas_of + slots);
    plan.block_count = plan.block_of + slots;
    plan.first = {plan.block_count + 1, plan.block_count + 1 + slots + 1};
    plan.rest = {plan.first.cta_blocks + kMaxCtas, plan.first.cta_blocks + kMaxCtas + slots + 1};
    return plan;
  }
};

struct PlanTask {
  IndexerInputs in;
  RowSet rows;
  int64_t first_key, key_count;  // first_key a multiple of kTileKeys
  int64_t skip_keys;             // rows with at most that many keys are left out
  int64_t sample_keys;           // most keys of a row in a sample; 0: one pass over all keys
  int ctas;
  ScorePlan plan;
};

void launch_score_plan(const PlanTask& task, int32_t device, cudaStream_t stream);

}  // namespace sparse_cp_ops
