// The two ways to a row's top-k, by what is kept of the scores.
#pragma once

#include <cuda_runtime.h>

#include "../../ops/indexer_topk_ragged_cp.h"
#include "../indexer_scores_ragged_cp/score_plan.h"

namespace sparse_cp_ops {

struct Workspace {
  uint8_t* memory;
  int64_t bytes;
};

// All scores of a chunk of rows (and, if need be, keys), then selection. Any shape, any device, any workspace.
int64_t dense_topk_bytes(const IndexerTopkParams& p, int64_t rows, int64_t budget, int32_t device);
void dense_topk(const IndexerTopkParams& p, const RowSet& rows, const Workspace& workspace, int32_t device,
                cudaStream_t stream);

// Thresholds from a sample, then lists of survivors; failing rows by dense_topk. Hopper, many rows with many keys.
bool streamed_topk_fits(const IndexerTopkParams& p, int64_t budget, int32_t device);
int64_t streamed_topk_bytes(const IndexerTopkParams& p, int64_t budget, int32_t device);
void streamed_topk(const IndexerTopkParams& p, const Workspace& workspace, int32_t device, cudaStream_t stream);

}  // namespace sparse_cp_ops
