// Hopper indexer scores: FP8 warpgroup products on keys that stream from the paged cache.
//
// One persistent CTA a multiprocessor. Four producer warps copy key tiles, a piece of 16 keys each, into a ring.
// Three consumer warpgroups hold four rows each: tile (64 keys) x (4 rows x heads), then relu, weights and the sum over
// heads in registers. All three take every tile; if a block has at most four rows, each takes every third tile.
//
// Column n of a product is row (n / 2) % 4 and head 2 * (n / 8) + n % 2, so that a lane's columns all belong to row
// lane % 4: no exchange between lanes, one output or list a lane.
#include "sm90_scores.h"

#include <cuda_fp16.h>

#include "../arch.h"
#include "../tensor_map.h"
#include "pieces.cuh"
#include "sm90_mma.cuh"

namespace sparse_cp_ops {
namespace {

constexpr int kConsumers = 3;  // warpgroups
constexpr int kThreads = (kConsumers + 1) * 128;
constexpr int kStages = 8;
constexpr int kPieces = kTileKeys / kPieceKeys;
constexpr int kLaneKeyDistance = 8;  // a lane's two keys of a product
constexpr int kTileBytes = kTileKeys * kIndexDim;
// Registers a thread: 64 accumulators, 64 weights and addresses; three warpgroups and the producer share 512.
constexpr int kConsumerRegisters = 160, kProducerRegisters = 32;

struct Stage {
  float scales[kTileKeys];
  int positions[kPieces];  // first key of a piece
};

template <int HEADS>
struct Shared {  // behind it nothing; the start is aligned to 1024 bytes for the swizzle
  uint8_t keys[kStages][kTileBytes];
  uint8_t queries[kConsumers][kGroupRows * HEADS * kIndexDim];
  Stage stages[kStages];
  uint64_t full[kStages], empty[kStages];
};

__device__ const float kNanScales[kPieceKeys] = {NAN, NAN, NAN, NAN, NAN, NAN, NAN, NAN,
                                                 NAN, NAN, NAN, NAN, NAN, NAN, NAN, NAN};

// A CTA's share of one block.
struct Segment {
  ScoreBlock block;
  int first, last;    // tiles
  int pieces;         // of the block's whole key range
  bool shared_tiles;  // every warpgroup takes every tile
};

template <class Body>
__device__ __forceinline__ void for_each_segment(const Sm90ScoreTask& task, const Body& body) {
  const int blocks = *task.plan.block_count;
  if (blocks == 0) return;
  const int64_t total = task.plan.first_steps[blocks];
  int step = static_cast<int>(total * blockIdx.x / gridDim.x);
  const int end = static_cast<int>(total * (blockIdx.x + 1) / gridDim.x);
  if (step == end) return;
  for (int b = task.plan.cta_blocks[blockIdx.x]; step < end; ++b) {
    const int first = task.plan.first_steps[b], last = min(end, task.plan.first_steps[b + 1]);
    if (last == first) continue;
    Segment segment{task.plan.blocks[b], step - first, last - first, 0, true};
    segment.pieces = ceil_div(segment.block.end - static_cast<int>(task.first_key), kPieceKeys);
    if (!shares_tiles(task.sweep, segment.block.rows)) {
      segment.shared_tiles = false;
      const int tiles = ceil_div(sweep_pieces(task.sweep, segment.block.stride, segment.pieces), kPieces);
      segment.first *= kConsumers;
      segment.last = min(segment.last * kConsumers, tiles);
    }
    body(segment);
    step = last;
  }
}

// Position of a stage in the ring and the parity of its current phase.
struct RingPosition {
  int stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

// Where a piece of keys lies; page -1: nowhere.
struct PiecePlace {
  int position;
  int page;
};

__device__ __forceinline__ PiecePlace find_piece(const Sm90ScoreTask& task, const Segment& segment,
                                                 const int32_t* table, int index) {
  const IndexerInputs& in = task.in;
  const int piece = sweep_piece(task.sweep, segment.block.stride, segment.pieces, index);
  PiecePlace place{static_cast<int>(task.first_key) + piece * kPieceKeys, -1};
  if (place.position >= segment.block.end) return place;
  const int page = table[place.position >> (__ffs(static_cast<int>(in.page_size)) - 1)];
  if (page >= 0 && page < in.pages) place.page = page;
  return place;
}

// One thread of each producer warp copies one piece of every tile: a single thread could not issue all in time.
template <int HEADS>
__device__ __forceinline__ void produce(const CUtensorMap& pages, const Sm90ScoreTask& task, Shared<HEADS>& shared,
                                        int lane_piece) {
  const IndexerInputs& in = task.in;
  RingPosition ring;
  ring.parity = 1;  // an empty ring: the wait for "the phase before" passes
  for_each_segment(task, [&](const Segment& segment) {
    // Rows of pads have no keys, so a block that has steps has a real request.
    const int64_t request = in.req_ids[row_of(task.rows, segment.block.slot)];
    const int32_t* table = in.block_table + request * in.table_stride;
    PiecePlace next = find_piece(task, segment, table, segment.first * kPieces + lane_piece);
    for (int tile = segment.first; tile < segment.last; ++tile, ring.advance()) {
      const PiecePlace place = next;
      if (tile + 1 < segment.last) next = find_piece(task, segment, table, (tile + 1) * kPieces + lane_piece);
      mbarrier_wait(shared_address(&shared.empty[ring.stage]), ring.parity);
      Stage& stage = shared.stages[ring.stage];
      const uint32_t full = shared_address(&shared.full[ring.stage]);
      stage.positions[lane_piece] = place.position;
      mbarrier_expect_bytes(full, kPieceKeys * (kIndexDim + 4));
      const uint32_t values = shared_address(shared.keys[ring.stage] + lane_piece * kPieceKeys * kIndexDim);
      const uint32_t scales = shared_address(stage.scales + lane_piece * kPieceKeys);
      if (place.page >= 0) {
        const int offset = place.position & static_cast<int>(in.page_size - 1);
        bulk_copy_box(values, &pages, 0, offset, place.page, full);
        bulk_copy(scales, in.cache + place.page * in.page_stride + index_scale_offset(in.page_size, offset),
                  kPieceKeys * 4, full);
      } else {  // a plane behind the last one reads as zeros; NaN scales make the scores NaN
        bulk_copy_box(values, &pages, 0, 0, max(static_cast<int>(in.pages), 1), full);
        bulk_copy(scales, kNanScales, kPieceKeys * 4, full);
      }
    }
  });
}

// Rows [slot0, slot0 + count) of the plan as a B operand; absent rows and heads are zeros.
template <int HEADS>
__device__ __forceinline__ void load_queries(const Sm90ScoreTask& task, uint8_t* queries, int slot0, int count) {
  const IndexerInputs& in = task.in;
  constexpr int kChunks = kIndexDim / 16, kBatch = HEADS * kChunks / 128;  // a row is a batch of loads
#pragma unroll
  for (int r = 0; r < kGroupRows; ++r) {
    uint4 bytes[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int at = threadIdx.x % 128 + i * 128, head = at / kChunks;
      bytes[i] = make_uint4(0, 0, 0, 0);
      if (r < count && head < in.heads)
        bytes[i] = __ldg(
            reinterpret_cast<const uint4*>(in.q_fp8 + (row_of(task.rows, slot0 + r) * in.heads + head) * kIndexDim) +
            at % kChunks);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int at = threadIdx.x % 128 + i * 128, head = at / kChunks, n = head / 2 * 8 + r * 2 + head % 2;
      *reinterpret_cast<uint4*>(queries + n * kIndexDim + ((at % kChunks ^ (n & 7)) << 4)) = bytes[i];
    }
  }
  fence_async_proxy();
}

// Relu, weights and the sum over heads of one product, for the two keys of a lane. One precision, one class.
template <int HEADS>
struct WeightsF32 {
  static constexpr int kProducts = HEADS / 32;  // of 128 columns
  static constexpr bool kDeferred = false;      // measured slower here
  float w[HEADS];
  float sums[2];

  __device__ __forceinline__ void load(const float* weights, int heads) {
#pragma unroll
    for (int h = 0; h < HEADS; ++h) w[h] = weights != nullptr && h < heads ? __ldg(weights + h) : 0.0f;
  }
  template <int PRODUCT>
  static __device__ __forceinline__ void multiply(uint64_t keys, uint64_t queries) {
    product_n128_f32(keys, queries + PRODUCT * 128 * kOperandRow);
  }
  __device__ __forceinline__ void clear() { sums[0] = sums[1] = 0.0f; }
  template <int PRODUCT>
  __device__ __forceinline__ void add() {
    unrolled<16>([&](auto group) {
      constexpr int kGroup = decltype(group)::value, kHead = PRODUCT * 32 + 2 * kGroup;
      sums[0] = fmaf(relu_f32<4 * kGroup>(), w[kHead], sums[0]);
      sums[1] = fmaf(relu_f32<4 * kGroup + 2>(), w[kHead], sums[1]);
      sums[0] = fmaf(relu_f32<4 * kGroup + 1>(), w[kHead + 1], sums[0]);
      sums[1] = fmaf(relu_f32<4 * kGroup + 3>(), w[kHead + 1], sums[1]);
    });
  }
  __device__ __forceinline__ float total(int key) const { return sums[key]; }
};

// Half-precision products and sums of eight heads, then fp32. Weights are brought to at most 1/8 by a power of two, so
// that with |q| <= 0.875 no partial sum passes 8 * (128 * 0.875 * 448) / 8 = 50176 < 65504.
template <int HEADS>
struct WeightsF16 {
  static constexpr int kProducts = 1;  // of 4 * HEADS columns
  static constexpr bool kDeferred = true;
  __half2 w[HEADS / 2];
  float power;
  float sums[2][2];

  __device__ __forceinline__ void load(const float* weights, int heads) {
    float peak = 0.0f;
    for (int h = 0; weights != nullptr && h < heads; ++h)
      if (fabsf(weights[h]) < INFINITY) peak = fmaxf(peak, fabsf(weights[h]));
    const int exponent = max(-126, min(127, ilogbf(fmaxf(peak, 1e-30f)) + 4));  // peak < 2^(exponent - 3)
    power = ldexpf(1.0f, exponent);
#pragma unroll
    for (int i = 0; i < HEADS / 2; ++i) {
      const bool real = weights != nullptr && 2 * i < heads;
      w[i] = __floats2half2_rn(real ? ldexpf(weights[2 * i], -exponent) : 0.0f,
                               real ? ldexpf(weights[2 * i + 1], -exponent) : 0.0f);
    }
  }
  template <int PRODUCT>
  static __device__ __forceinline__ void multiply(uint64_t keys, uint64_t queries) {
    if constexpr (HEADS == 64) product_n256_f16(keys, queries);
    else product_n128_f16(keys, queries);
  }
  __device__ __forceinline__ void clear() { sums[0][0] = sums[0][1] = sums[1][0] = sums[1][1] = 0.0f; }
  template <int PRODUCT>
  __device__ __forceinline__ void add() {
    unrolled<HEADS / 16>([&](auto part) {
      __half2 partial[2];
      unrolled<8>([&](auto in_part) {
        constexpr int kGroup = decltype(part)::value * 8 + decltype(in_part)::value;
        const uint32_t low = relu_f16x2<2 * kGroup>(), high = relu_f16x2<2 * kGroup + 1>();
        const __half2 key0 = reinterpret_cast<const __half2&>(low), key1 = reinterpret_cast<const __half2&>(high);
        if constexpr (decltype(in_part)::value == 0) {
          partial[0] = __hmul2(key0, w[kGroup]), partial[1] = __hmul2(key1, w[kGroup]);
        } else {
          partial[0] = __hfma2(key0, w[kGroup], partial[0]), partial[1] = __hfma2(key1, w[kGroup], partial[1]);
        }
      });
#pragma unroll
      for (int key = 0; key < 2; ++key) {
        const float2 pair = __half22float2(partial[key]);
        sums[key][0] += pair.x, sums[key][1] += pair.y;
      }
    });
  }
  __device__ __forceinline__ float total(int key) const { return (sums[key][0] + sums[key][1]) * power; }
};

// Stores every score at its place in the sweep.
struct StoreSink {
  float* out;  // of this lane's row and first key
  int end;     // behind the row's last key; 0 without a row

  __device__ __forceinline__ StoreSink(const Sm90ScoreTask& task, int slot, int in_tile, int end_)
      : out(task.scores + slot * task.score_stride + in_tile), end(end_) {}
  __device__ __forceinline__ void put(int tile, float score0, int key0, float score1, int key1) {
    float* at = out + static_cast<int64_t>(tile) * kTileKeys;
    if (key0 < end) at[0] = score0;
    if (key1 < end) at[kLaneKeyDistance] = score1;
  }
  __device__ __forceinline__ void finish(const Sm90ScoreTask&) const {}
};

// Appends the scores that reach the row's threshold to this lane's list.
struct ListSink {
  Survivor* next;
  int room;  // negative once the list is full
  int list;
  float threshold;
  int end;

  __device__ __forceinline__ ListSink(const Sm90ScoreTask& task, int slot, int in_tile, int end_) : end(end_) {
    const int lane = in_tile / 16 * 8 + in_tile % 8;  // of the 32 that share the row; it sees two keys of a tile
    list = (slot + kBlockRows * static_cast<int>(blockIdx.x)) * SurvivorLists::kLanes + lane;
    next = task.lists.entries + static_cast<int64_t>(list) * task.lists.capacity;
    room = task.lists.capacity;
    threshold = end > 0 ? task.lists.thresholds[slot] : INFINITY;
  }
  __device__ __forceinline__ void append(float score, int key) {
    if (key < end && score >= threshold) {
      if (room > 0) *next = {score, key};
      ++next, --room;
    }
  }
  __device__ __forceinline__ void put(int, float score0, int key0, float score1, int key1) {
    append(score0, key0);
    append(score1, key1);
  }
  __device__ __forceinline__ void finish(const Sm90ScoreTask& task) const {
    if (end > 0) task.lists.counts[list] = task.lists.capacity - room;
  }
};

// What a lane needs of a tile beside the products: its two keys and their scales.
struct TileFacts {
  float scale0, scale1;
  int key0, key1;
};

template <int HEADS>
__device__ __forceinline__ TileFacts tile_facts(const Shared<HEADS>& shared, int stage, int in_tile) {
  const Stage& s = shared.stages[stage];
  const int key = s.positions[in_tile / kPieceKeys] + in_tile % kPieceKeys;
  return {s.scales[in_tile], s.scales[in_tile + kLaneKeyDistance], key, key + kLaneKeyDistance};
}

template <int HEADS, class Weights, class Sink>
__device__ __forceinline__ void consume(const Sm90ScoreTask& task, Shared<HEADS>& shared) {
  const IndexerInputs& in = task.in;
  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0), lane = threadIdx.x % 32;
  const int in_tile = threadIdx.x % 128 / 32 * 16 + lane / 4;
  const uint64_t keys = swizzled_tile(shared_address(shared.keys));
  const uint64_t queries = swizzled_tile(shared_address(shared.queries[group]));
  RingPosition ring;
  Weights weights;

  const auto wait_full = [&] { mbarrier_wait(shared_address(&shared.full[ring.stage]), ring.parity); };
  const auto release = [&](int stage) {
    __syncwarp();
    if (lane == 0) mbarrier_arrive(shared_address(&shared.empty[stage]));
  };
  const auto operand = [&](int stage) { return keys + stage * (kTileBytes >> 4); };

  for_each_segment(task, [&](const Segment& segment) {
    const int first_row = segment.shared_tiles ? group * kGroupRows : 0;
    const int rows = max(0, min(segment.block.rows - first_row, kGroupRows)), mine = lane % 4;
    const int slot = segment.block.slot + first_row + mine;
    named_barrier(1 + group, 128);  // the last products with the old queries are done
    load_queries<HEADS>(task, shared.queries[group], segment.block.slot + first_row, rows);
    const int64_t row = mine < rows ? row_of(task.rows, slot) : -1;
    weights.load(row >= 0 ? in.q_weights + row * in.heads : nullptr, static_cast<int>(in.heads));
    const int end = row >= 0 ? wanted_end(in, row, task.skip_keys, task.first_key + task.key_count) : 0;
    Sink sink(task, slot, in_tile, end);
    named_barrier(1 + group, 128);

    const auto takes = [&](int tile) {
      return rows > 0 && (segment.shared_tiles || (tile - segment.first) % kConsumers == group);
    };
    const auto put = [&](int tile, const TileFacts& facts) {
      sink.put(tile, weights.total(0) * facts.scale0, facts.key0, weights.total(1) * facts.scale1, facts.key1);
    };
    if constexpr (Weights::kDeferred) {
      // The next product runs while this tile's scores are put.
      int tile = segment.first;
      const auto find = [&] {  // the next tile to take, landed
        for (; tile < segment.last; ++tile, ring.advance()) {
          wait_full();
          if (takes(tile)) return;
          release(ring.stage);
        }
      };
      find();
      if (tile < segment.last) {
        TileFacts facts = tile_facts(shared, ring.stage, in_tile);
        Weights::template multiply<0>(operand(ring.stage), queries);
        while (tile < segment.last) {
          const int current = tile;
          weights.clear();
          wgmma_wait<0>();
          release(ring.stage);
          ++tile, ring.advance();
          find();
          const TileFacts next = tile_facts(shared, ring.stage, in_tile);
          weights.template add<0>();
          // Behind the last tile this multiplies whatever the stage holds; nobody reads the result.
          Weights::template multiply<0>(operand(ring.stage), queries);
          put(current, facts);
          facts = next;
        }
        wgmma_wait<0>();
      }
    } else {
      for (int tile = segment.first; tile < segment.last; ++tile, ring.advance()) {
        wait_full();
        if (!takes(tile)) {
          release(ring.stage);
          continue;
        }
        TileFacts facts;
        weights.clear();
        unrolled<Weights::kProducts>([&](auto product) {
          constexpr int kProduct = decltype(product)::value;
          Weights::template multiply<kProduct>(operand(ring.stage), queries);
          if constexpr (kProduct == Weights::kProducts - 1) facts = tile_facts(shared, ring.stage, in_tile);
          wgmma_wait<0>();
          if constexpr (kProduct == Weights::kProducts - 1) release(ring.stage);
          weights.template add<kProduct>();
        });
        put(tile, facts);
      }
    }
    sink.finish(task);
  });
}

template <int HEADS, class Weights, class Sink>
__global__ __launch_bounds__(kThreads, 1) void sm90_scores_kernel(const __grid_constant__ CUtensorMap pages,
                                                                  const __grid_constant__ Sm90ScoreTask task) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ uint8_t smem[];
  Shared<HEADS>& shared = *reinterpret_cast<Shared<HEADS>*>((reinterpret_cast<uintptr_t>(smem) + 1023) / 1024 * 1024);
  SCO_DECLARE_ACCUMULATORS();
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      mbarrier_init(shared_address(&shared.full[s]), kPieces);          // one arrival a producer warp
      mbarrier_init(shared_address(&shared.empty[s]), kConsumers * 4);  // one arrival a warp
    }
    fence_mbarrier_init();
  }
  __syncthreads();
  if (threadIdx.x >= kConsumers * 128) {
    lower_registers<kProducerRegisters>();
    if (threadIdx.x % 32 == 0) produce<HEADS>(pages, task, shared, threadIdx.x / 32 - kConsumers * 4);
  } else {
    raise_registers<kConsumerRegisters>();
    consume<HEADS, Weights, Sink>(task, shared);
  }
#endif
}

template <int HEADS, class Weights, class Sink>
void launch(const CUtensorMap& pages, const Sm90ScoreTask& task, int ctas, int32_t device, cudaStream_t stream) {
  constexpr int kBytes = sizeof(Shared<HEADS>) + 1024;  // the start is rounded up
  allow_shared_bytes<sm90_scores_kernel<HEADS, Weights, Sink>>(device, kBytes);
  sm90_scores_kernel<HEADS, Weights, Sink><<<ctas, kThreads, kBytes, stream>>>(pages, task);
  check_launch("Hopper indexer scores");
}

template <int HEADS, class Weights>
void launch(const CUtensorMap& pages, const Sm90ScoreTask& task, int ctas, int32_t device, cudaStream_t stream) {
  if (task.scores != nullptr) launch<HEADS, Weights, StoreSink>(pages, task, ctas, device, stream);
  else launch<HEADS, Weights, ListSink>(pages, task, ctas, device, stream);
}

}  // namespace

void launch_sm90_scores(const Sm90ScoreTask& task, int ctas, int32_t device, cudaStream_t stream) {
  const IndexerInputs& in = task.in;
  // Without pages the map covers bytes that exist but are never copied: every key lies outside.
  const CUtensorMap pages = in.pages > 0
                                ? swizzled_rows_map(in.cache, in.pages, in.page_size, in.page_stride, kPieceKeys)
                                : swizzled_rows_map(in.q_fp8, 1, kPieceKeys, kPieceKeys * kIndexDim, kPieceKeys);
  if (in.heads <= 32) {
    if (in.f16) launch<32, WeightsF16<32>>(pages, task, ctas, device, stream);
    else launch<32, WeightsF32<32>>(pages, task, ctas, device, stream);
  } else {
    if (in.f16) launch<64, WeightsF16<64>>(pages, task, ctas, device, stream);
    else launch<64, WeightsF32<64>>(pages, task, ctas, device, stream);
  }
}

}  // namespace sparse_cp_ops
