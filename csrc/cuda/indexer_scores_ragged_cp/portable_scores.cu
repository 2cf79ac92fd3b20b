// Portable indexer scores: FP8 widened exactly to f16 in shared memory, mma.sync with fp32 accumulation.
//
// A CTA owns kRows rows with all their heads and walks kSpan keys in tiles of kTile. Warp w takes row w % kRows and
// half of the tile's keys: D[key, head] = K . Q^T, then relu, weights and the sum over heads in registers.
#include <cuda_fp16.h>

#include "../arch.h"
#include "../device/mma_sync.cuh"
#include "../launch.h"
#include "pieces.cuh"

namespace sparse_cp_ops {
namespace {

constexpr int kThreads = 256;
constexpr int kRows = 4;
constexpr int kTile = 64;                    // keys
constexpr int kSpan = 1024;                  // keys a CTA: Q is widened once for 16 tiles
constexpr int kVectorBytes = kIndexDim * 2;  // one head or key as f16
constexpr int kTileBytes = kTile * kVectorBytes;
constexpr float kWidening = 256.0f;  // the bit placement below leaves values * 2^-8

template <int HEADS>
constexpr int kSharedBytes = kRows * HEADS * kVectorBytes + 2 * kTileBytes + 2 * kTile * 4 + kRows * HEADS * 4;

// Positions fit 32 bits (the checks bound the block table), and registers are what limits this kernel.
struct RowSpan {
  int request;
  int end;  // behind the last key of this CTA that the row wants scored; 0 if there is none
};

// Four e4m3 bytes b0..b3 -> halves (b0, b2) and (b1, b3), each value * 2^-8, exact for every finite byte: exponent and
// mantissa move to the low end of the wider exponent field. The order along the contraction is the same for q and k.
__device__ __forceinline__ void widen(uint32_t bytes, uint32_t& even, uint32_t& odd) {
  even = ((bytes << 8) & 0x80008000u) | ((bytes << 7) & 0x3F803F80u);
  odd = (bytes & 0x80008000u) | ((bytes >> 1) & 0x3F803F80u);
}

// Whether one of the four bytes is e4m3's NaN (0x7F or 0xFF), which the widening would turn into 480.
__device__ __forceinline__ bool has_nan(uint32_t bytes) { return ((bytes & 0x7F7F7F7Fu) + 0x01010101u) & 0x80808080u; }
__device__ __forceinline__ bool has_nan(uint4 v) {
  return has_nan(v.x) || has_nan(v.y) || has_nan(v.z) || has_nan(v.w);
}

// Sixteen bytes become two 16-byte chunks; chunks are swizzled over the eight rows of an ldmatrix.
__device__ __forceinline__ void store_widened(char* matrix, int row, int piece, uint4 v) {
  uint32_t h[8];
  widen(v.x, h[0], h[1]);
  widen(v.y, h[2], h[3]);
  widen(v.z, h[4], h[5]);
  widen(v.w, h[6], h[7]);
  char* base = matrix + row * kVectorBytes;
  *reinterpret_cast<uint4*>(base + (((2 * piece) ^ (row & 7)) << 4)) = make_uint4(h[0], h[1], h[2], h[3]);
  *reinterpret_cast<uint4*>(base + (((2 * piece + 1) ^ (row & 7)) << 4)) = make_uint4(h[4], h[5], h[6], h[7]);
}

__device__ __forceinline__ float relu(float x) { return x < 0.0f ? 0.0f : x; }  // passes NaN on

// The part of a key tile that one thread carries from global memory: 32 of a key's 128 bytes, and its scale.
struct KeyPiece {
  uint4 low, high;
  float scale;
};

__device__ __forceinline__ KeyPiece load_keys(const IndexerInputs& in, int request, int key, int end) {
  KeyPiece piece{make_uint4(0, 0, 0, 0), make_uint4(0, 0, 0, 0), NAN};
  if (key >= end) return piece;
  const int page_size = static_cast<int>(in.page_size), shift = __ffs(page_size) - 1;
  const int64_t page = in.block_table[request * in.table_stride + (key >> shift)];
  if (page < 0 || page >= in.pages) return piece;  // a key without a page scores NaN
  const int offset = key & (page_size - 1);
  const uint8_t* base = in.cache + page * in.page_stride;
  const uint4* values = reinterpret_cast<const uint4*>(base + index_values_offset(offset));
  piece.low = __ldg(values + threadIdx.x % 4);
  piece.high = __ldg(values + threadIdx.x % 4 + 4);
  piece.scale = __ldg(reinterpret_cast<const float*>(base + index_scale_offset(page_size, offset)));
  return piece;
}

__device__ __forceinline__ void store_keys(char* tile, float* scales, const KeyPiece& piece) {
  const int key = threadIdx.x / 4, part = threadIdx.x % 4;
  store_widened(tile, key, part, piece.low);
  store_widened(tile, key, part + 4, piece.high);
  bool bad = has_nan(piece.low) || has_nan(piece.high);
  bad |= __shfl_xor_sync(~0u, bad, 1);
  bad |= __shfl_xor_sync(~0u, bad, 2);
  if (part == 0) scales[key] = bad ? NAN : piece.scale;
}

template <int HEADS>
__global__ __launch_bounds__(kThreads, 2) void scores_kernel(const __grid_constant__ ScoreTask task) {
  extern __shared__ __align__(128) char smem[];
  __shared__ RowSpan spans[kRows];
  char* queries = smem;
  char* keys = queries + kRows * HEADS * kVectorBytes;
  float* scales = reinterpret_cast<float*>(keys + 2 * kTileBytes);
  float* weights = scales + 2 * kTile;

  const IndexerInputs& in = task.in;
  const int64_t row_groups = (task.rows.count + kRows - 1) / kRows;
  const int slot0 = static_cast<int>(blockIdx.x % row_groups * kRows);
  const int slots = min(row_count_of(task.rows) - slot0, kRows);
  const int key0 = static_cast<int>(task.first_key + blockIdx.x / row_groups * kSpan);
  const int key_end = static_cast<int>(min(key0 + int64_t{kSpan}, task.first_key + task.key_count));
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  if (threadIdx.x < kRows) {
    const int64_t row = static_cast<int>(threadIdx.x) < slots ? row_of(task.rows, slot0 + threadIdx.x) : -1;
    const int64_t visible = row >= 0 ? visible_keys(in, row) : 0;
    const bool wanted = visible > task.skip_keys && visible > key0;
    spans[threadIdx.x] = {wanted ? in.req_ids[row] : -1, wanted ? static_cast<int>(min(visible, int64_t{key_end})) : 0};
  }
  if (task.fill) {
    for (int slot = slot0; slot < slot0 + slots; ++slot) {
      float* out = task.scores + slot * task.score_stride - task.first_key;
      const int64_t visible = visible_keys(in, row_of(task.rows, slot));
      for (int64_t key = max(visible, int64_t{key0}) + threadIdx.x; key < key_end; key += kThreads)
        out[key] = -INFINITY;
    }
  }
  __syncthreads();
  if (max(max(spans[0].end, spans[1].end), max(spans[2].end, spans[3].end)) == 0) return;

  // Queries and weights; a NaN byte makes its head's weight NaN and with it every score of the row.
  for (int v = threadIdx.x; v < kRows * HEADS; v += kThreads) {
    const bool real = v / HEADS < slots && v % HEADS < in.heads;
    weights[v] = real ? in.q_weights[row_of(task.rows, slot0 + v / HEADS) * in.heads + v % HEADS] : 0.0f;
  }
  __syncthreads();
  for (int v = threadIdx.x; v < kRows * HEADS * 8; v += kThreads) {
    const int head = v / 8 % HEADS, r = v / 8 / HEADS;
    uint4 bytes = make_uint4(0, 0, 0, 0);
    if (r < slots && head < in.heads) {
      const int64_t row = row_of(task.rows, slot0 + r);
      bytes = __ldg(reinterpret_cast<const uint4*>(in.q_fp8 + (row * in.heads + head) * kIndexDim) + v % 8);
    }
    store_widened(queries, v / 8, v % 8, bytes);
    if (has_nan(bytes)) weights[v / 8] = NAN;
  }
  __syncthreads();

  const int my_row = warp % kRows, key_half = warp / kRows * (kTile / 2);
  // Weights of heads 8j + 2c and 8j + 2c + 1, this lane's accumulator columns.
  const float2* my_weights = reinterpret_cast<const float2*>(weights + my_row * HEADS) + lane % 4;
  const RowSpan mine = spans[my_row];
  float* out = task.scores + (slot0 + my_row) * task.score_stride - task.first_key;

  // Rows of a CTA may belong to several requests: one walk over the keys of each.
  for (int leader = 0; leader < kRows; ++leader) {
    const int request = spans[leader].request;
    int first = leader, end = 0;
    for (int r = kRows - 1; r >= 0; --r) {
      if (spans[r].request != request) continue;
      first = r;
      end = max(end, spans[r].end);
    }
    if (request < 0 || first < leader) continue;

    int stage = 0;
    KeyPiece next = load_keys(in, request, key0 + threadIdx.x / 4, end);
    for (int tile0 = key0; tile0 < end; tile0 += kTile, stage ^= 1) {
      char* tile = keys + stage * kTileBytes;
      store_keys(tile, scales + stage * kTile, next);
      if (tile0 + kTile < end) next = load_keys(in, request, tile0 + kTile + threadIdx.x / 4, end);
      __syncthreads();  // the other stage was read before this barrier, so one barrier a tile is enough
      if (mine.request != request || mine.end <= tile0 + key_half) continue;

      float acc[2][HEADS / 8][4] = {};
#pragma unroll
      for (int k = 0; k < kIndexDim / 16; ++k) {
        uint32_t a[2][4];
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          const int key = key_half + m * 16 + lane % 16;
          ldmatrix_x4(a[m], shared_address(tile + key * kVectorBytes + (((2 * k + lane / 16) ^ (key & 7)) << 4)));
        }
#pragma unroll
        for (int n = 0; n < HEADS / 16; ++n) {
          uint32_t b[4];
          const int head = my_row * HEADS + n * 16 + lane / 16 * 8 + lane % 8;
          ldmatrix_x4(b, shared_address(queries + head * kVectorBytes + (((2 * k + lane / 8 % 2) ^ (head & 7)) << 4)));
#pragma unroll
          for (int m = 0; m < 2; ++m) {
            mma_m16n8k16_f16(acc[m][2 * n], a[m], b[0], b[1]);
            mma_m16n8k16_f16(acc[m][2 * n + 1], a[m], b[2], b[3]);
          }
        }
      }
      float sums[4] = {};  // keys g, g + 8, g + 16, g + 24 of this half, g = lane / 4
#pragma unroll
      for (int n = 0; n < HEADS / 8; ++n) {
        const float2 w = my_weights[4 * n];
#pragma unroll
        for (int s = 0; s < 4; ++s) {
          sums[s] = fmaf(w.x, relu(acc[s / 2][n][s % 2 * 2]), sums[s]);
          sums[s] = fmaf(w.y, relu(acc[s / 2][n][s % 2 * 2 + 1]), sums[s]);
        }
      }
#pragma unroll
      for (int s = 0; s < 4; ++s) {
        sums[s] += __shfl_xor_sync(~0u, sums[s], 1);
        sums[s] += __shfl_xor_sync(~0u, sums[s], 2);
      }
      const int c = lane % 4, in_tile = key_half + c * 8 + lane / 4;
      const float sum = c == 0 ? sums[0] : c == 1 ? sums[1] : c == 2 ? sums[2] : sums[3];
      if (tile0 + in_tile < mine.end)
        out[tile0 + in_tile] = sum * (kWidening * kWidening) * scales[stage * kTile + in_tile];
    }
    __syncthreads();  // before another request's keys overwrite the tiles
  }
}

template <int HEADS>
void launch(const ScoreTask& task, int64_t blocks, int32_t device, cudaStream_t stream) {
  allow_shared_bytes<scores_kernel<HEADS>>(device, kSharedBytes<HEADS>);
  scores_kernel<HEADS><<<static_cast<unsigned>(blocks), kThreads, kSharedBytes<HEADS>, stream>>>(task);
  check_launch("portable indexer scores");
}

}  // namespace

void launch_portable_scores(const ScoreTask& task, int32_t device, cudaStream_t stream) {
  const int64_t spans = (task.key_count + kSpan - 1) / kSpan;
  const int64_t row_groups = (task.rows.count + kRows - 1) / kRows;
  // Few enough rows a launch that the grid fits its 31 bits.
  const int64_t most_groups = (int64_t{1} << 30) / (spans > 0 ? spans : 1);
  for (int64_t group = 0; spans > 0 && group < row_groups; group += most_groups) {
    ScoreTask part = task;
    part.rows.first += group * kRows;
    part.scores += group * kRows * task.score_stride;
    part.rows.count = std::min(task.rows.count - group * kRows, most_groups * kRows);
    const int64_t blocks = (part.rows.count + kRows - 1) / kRows * spans;
    if (task.in.heads <= 32) launch<32>(part, blocks, device, stream);
    else launch<64>(part, blocks, device, stream);
  }
}

}  // namespace sparse_cp_ops
