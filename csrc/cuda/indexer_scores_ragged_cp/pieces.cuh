// Which keys a sweep visits, in which order: arithmetic shared by planning, scoring and selection.
#pragma once

#include "score_plan.h"

namespace sparse_cp_ops {

__device__ __forceinline__ int64_t row_of(const RowSet& rows, int slot) {
  return rows.list == nullptr ? rows.first + slot : rows.list[rows.first + slot];
}

__device__ __forceinline__ int row_count_of(const RowSet& rows) {
  if (rows.list == nullptr) return static_cast<int>(rows.count);
  const int64_t listed = *rows.list_length - rows.first;
  return static_cast<int>(listed < 0 ? 0 : (listed < rows.count ? listed : rows.count));
}

// Behind the last key in [first_key, first_key + key_count) that the row wants scored; first_key or less: none.
__device__ __forceinline__ int wanted_end(const IndexerInputs& in, int64_t row, int64_t skip_keys, int64_t key_end) {
  const int64_t visible = visible_keys(in, row);
  return visible > skip_keys ? static_cast<int>(visible < key_end ? visible : key_end) : 0;
}

__device__ __forceinline__ int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Group g of a sweep is pieces [g * stride, (g + 1) * stride); one of them is the sample. Its place varies, so that no
// page offset is sampled always or never; a group that the end cuts gives its first piece.
__device__ __forceinline__ int sampled_piece(int group, int stride, int pieces) {
  const int shift = (group + 1) * stride <= pieces ? (group * 5 + 3) & (stride - 1) : 0;
  return group * stride + shift;
}

__device__ __forceinline__ int sweep_pieces(Sweep sweep, int stride, int pieces) {
  const int sampled = ceil_div(pieces, stride);
  return sweep == Sweep::kAll ? pieces : sweep == Sweep::kSample ? sampled : pieces - sampled;
}

// The i-th piece of a sweep over `pieces` pieces; pieces or more if there is none.
__device__ __forceinline__ int sweep_piece(Sweep sweep, int stride, int pieces, int i) {
  if (sweep == Sweep::kAll || stride == 1) return sweep == Sweep::kRest ? pieces : i;
  if (sweep == Sweep::kSample) return i < ceil_div(pieces, stride) ? sampled_piece(i, stride, pieces) : pieces;
  const int group = i / (stride - 1), piece = group * stride + i % (stride - 1);
  return piece + (piece >= sampled_piece(group, stride, pieces));
}

// Whether the block's tiles go to all warpgroups, four rows each. A block that one warpgroup can hold gives each of
// them every third tile instead; not when survivors are listed, whose lists belong to a row's one warpgroup.
__device__ __forceinline__ bool shares_tiles(Sweep sweep, int rows) {
  return sweep != Sweep::kAll || rows > kGroupRows;
}

// Steps of a block of `pieces` pieces: a tile for all three warpgroups, or, if one warpgroup holds all rows, a tile for
// each of them.
__device__ __forceinline__ int steps_of(Sweep sweep, const ScoreBlock& block, int pieces) {
  const int tiles = ceil_div(sweep_pieces(sweep, block.stride, pieces), kTileKeys / kPieceKeys);
  return shares_tiles(sweep, block.rows) ? tiles : ceil_div(tiles, kBlockRows / kGroupRows);
}

// How many columns of a sample lie before the position `end`.
__device__ __forceinline__ int sample_columns(int stride, int pieces, int end) {
  if (end <= 0) return 0;
  const int group = (end - 1) / (kPieceKeys * stride);
  const int in_piece = end - sampled_piece(group, stride, pieces) * kPieceKeys;
  return group * kPieceKeys + max(0, min(in_piece, kPieceKeys));
}

// Position of a column of a sample.
__device__ __forceinline__ int sample_position(int stride, int pieces, int column) {
  return sampled_piece(column / kPieceKeys, stride, pieces) * kPieceKeys + column % kPieceKeys;
}

}  // namespace sparse_cp_ops
