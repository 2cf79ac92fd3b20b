// rope_ on CUDA: a thread rotates one piece of several heads of a row with the same cosines and sines.
#include "../../ops/rope_.h"

#include <torch/csrc/stable/library.h>

#include "../../ops/op_functions.h"
#include "../device/bf16.cuh"
#include "../device/rope.cuh"
#include "../launch.h"
#include "../rows.h"
#include "../value_checks.h"

namespace sparse_cp_ops {
namespace {

constexpr int kThreads = 256;
constexpr int kHeadsPerThread = 4;  // as many vector loads under way in each layout: 4 heads of 1 piece, 2 of 2
constexpr int kHeadsPerThreadOfHalves = 2;

// Where the items of a row go: several rows a block or several blocks a row.
struct RopeGrid {
  uint32_t pieces;  // of a head
  uint32_t items;   // of a row: groups of heads times pieces
  uint32_t rows_per_block, blocks_per_row;
};

// Eight values of x (bf16 or f32), read and written in vectors.
__device__ void load8(const uint16_t* x, float* v) { unpack_bf16x8(*reinterpret_cast<const uint4*>(x), v); }
__device__ void load8(const float* x, float* v) {
#pragma unroll
  for (int i = 0; i < 2; ++i) reinterpret_cast<float4*>(v)[i] = reinterpret_cast<const float4*>(x)[i];
}
__device__ void store8(uint16_t* x, const float* v) { *reinterpret_cast<uint4*>(x) = pack_bf16x8(v); }
__device__ void store8(float* x, const float* v) {
#pragma unroll
  for (int i = 0; i < 2; ++i) reinterpret_cast<float4*>(x)[i] = reinterpret_cast<const float4*>(v)[i];
}

struct Item {
  int64_t row;
  uint32_t head_group, piece;
};

__device__ bool find_item(const RopeParams& p, const RopeGrid& grid, Item& item) {
  const uint32_t block_row = blockIdx.x / grid.blocks_per_row, part = blockIdx.x % grid.blocks_per_row;
  const uint32_t thread = part * kThreads + threadIdx.x;
  const uint32_t row_in_block = grid.rows_per_block > 1 ? thread / grid.items : 0;
  const uint32_t index = thread - row_in_block * grid.items;
  item.row = static_cast<int64_t>(block_row) * grid.rows_per_block + row_in_block;
  item.head_group = index / grid.pieces;
  item.piece = index % grid.pieces;
  return row_in_block < grid.rows_per_block && index < grid.items && item.row < p.rows;
}

// A piece is 8 neighbouring values and their 4 pairs (interleaved), or 8 values of each half and their 8 pairs.
// In place has an instance of its own: with two addresses four blocks fit a multiprocessor instead of five, and 8192
// rows of 128 heads took 97.6 us instead of 82.7.
template <class T, bool kInterleaved, bool kInPlace>
__global__ void __launch_bounds__(kThreads) rope_kernel(RopeParams p, RopeGrid grid) {
  constexpr int kParts = kInterleaved ? 1 : 2, kPairs = kInterleaved ? 4 : 8;
  constexpr int kHeads = kInterleaved ? kHeadsPerThread : kHeadsPerThreadOfHalves;
  Item item;
  if (!find_item(p, grid, item)) return;
  const int64_t half = p.table.dim / 2;
  const uint32_t first_head = item.head_group * kHeads;
  T* x = static_cast<T*>(p.x) + item.row * p.row_stride + first_head * p.head_stride + item.piece * 8;
  const T* source = x;
  if constexpr (!kInPlace)
    source = static_cast<const T*>(p.source) + item.row * p.source_row_stride + first_head * p.source_head_stride +
             item.piece * 8;
  const int64_t source_head_stride = kInPlace ? p.head_stride : p.source_head_stride;

  float v[kHeads][kParts][8];
#pragma unroll
  for (int h = 0; h < kHeads; ++h)
    if (first_head + h < p.heads)
#pragma unroll
      for (int part = 0; part < kParts; ++part) load8(source + h * source_head_stride + part * half, v[h][part]);
  float cosines[kPairs], sines[kPairs];
  const float* cos_sin = cos_sin_row(p.table, item.row);
#pragma unroll
  for (int i = 0; i < kPairs; i += 4) {
    load_cos_sin4(cos_sin, item.piece * kPairs + i, cosines + i);
    load_cos_sin4(cos_sin, half + item.piece * kPairs + i, sines + i);
  }
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    if (first_head + h >= p.heads) break;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      if constexpr (kInterleaved) rotate(v[h][0][2 * i], v[h][0][2 * i + 1], cosines[i], sines[i]);
      else rotate(v[h][0][i], v[h][kParts - 1][i], cosines[i], sines[i]);
    }
#pragma unroll
    for (int part = 0; part < kParts; ++part) store8(x + h * p.head_stride + part * half, v[h][part]);
  }
}

__device__ float load(const uint16_t* x) { return bf16_to_float(*x); }
__device__ float load(const float* x) { return *x; }
__device__ void store(uint16_t* x, float v) { *x = float_to_bf16(v); }
__device__ void store(float* x, float v) { *x = v; }

// Any dim and stride: a piece is one pair.
template <class T>
__global__ void __launch_bounds__(kThreads) rope_pairs_kernel(RopeParams p, RopeGrid grid) {
  Item item;
  if (!find_item(p, grid, item)) return;
  const int64_t half = p.table.dim / 2, i = item.piece;
  const float* cos_sin = cos_sin_row(p.table, item.row);
  const float cosine = load_cos_sin(cos_sin, i), sine = load_cos_sin(cos_sin, half + i);
  const int64_t first = p.table.interleaved ? 2 * i : i, second = p.table.interleaved ? first + 1 : first + half;
  for (int64_t h = 0; h < kHeadsPerThread; ++h) {
    const int64_t head = static_cast<int64_t>(item.head_group) * kHeadsPerThread + h;
    if (head >= p.heads) return;
    T* x = static_cast<T*>(p.x) + item.row * p.row_stride + head * p.head_stride;
    const T* source = static_cast<const T*>(p.source) + item.row * p.source_row_stride + head * p.source_head_stride;
    float a = load(source + first), b = load(source + second);
    rotate(a, b, cosine, sine);
    store(x + first, a);
    store(x + second, b);
  }
}

template <class T>
auto choose_kernel(bool vectors, bool interleaved, bool in_place) {
  if (!vectors) return rope_pairs_kernel<T>;
  if (in_place) return interleaved ? rope_kernel<T, true, true> : rope_kernel<T, false, true>;
  return interleaved ? rope_kernel<T, true, false> : rope_kernel<T, false, false>;
}

}  // namespace

void rope_(Tensor x, const Tensor& positions, const Tensor& cos_sin_cache, bool interleaved,
           std::optional<Tensor> source) {
  const int32_t device = x.get_device_index();
  torch::stable::accelerator::DeviceGuard guard(device);
  const RopeParams p = prepare_rope_(x, positions, cos_sin_cache, interleaved, source);
  cudaStream_t stream = current_stream(device);
  if (value_checks_possible(stream)) check_rope_positions(positions, cos_sin_cache);
  if (p.rows == 0 || p.heads == 0 || p.table.dim == 0) return;

  const int64_t piece = interleaved ? 8 : 16;  // values
  const bool vectors = has_vector_rows(x, p.is_bf16 ? 2 : 4) &&
                       (!source || has_vector_rows(*source, p.is_bf16 ? 2 : 4)) && has_vector_rows(cos_sin_cache, 4) &&
                       p.table.dim % piece == 0;
  RopeGrid grid;
  const int64_t pieces = p.table.dim / (vectors ? piece : 2);
  const int64_t heads = vectors && !interleaved ? kHeadsPerThreadOfHalves : kHeadsPerThread;
  const int64_t items = (p.heads + heads - 1) / heads * pieces;
  SCO_CHECK(items <= std::numeric_limits<int32_t>::max(), "x: expected at most 2^31 - 1 values a row, got shape ",
            shape_string(x));
  grid.pieces = static_cast<uint32_t>(pieces);
  grid.items = static_cast<uint32_t>(items);
  grid.rows_per_block = std::max<uint32_t>(1, kThreads / grid.items);
  grid.blocks_per_row = (grid.items + kThreads - 1) / kThreads;
  const unsigned blocks = grid_size(grid_size(p.rows, grid.rows_per_block) * int64_t{grid.blocks_per_row}, 1);
  const auto kernel = p.is_bf16 ? choose_kernel<uint16_t>(vectors, interleaved, !source)
                                : choose_kernel<float>(vectors, interleaved, !source);
  kernel<<<blocks, kThreads, 0, stream>>>(p, grid);
  check_launch("rope_");
}

}  // namespace sparse_cp_ops

STABLE_TORCH_LIBRARY_IMPL(sparse_cp_ops, CUDA, m) { m.impl("rope_", TORCH_BOX(&sparse_cp_ops::rope_)); }
