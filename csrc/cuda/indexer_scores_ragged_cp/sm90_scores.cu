// Hopper indexer scores: FP8 warpgroup products on keys that stream from the paged cache.
//
// One persistent CTA a multiprocessor. Four producer warps copy key tiles into a ring, in turns.
// Three consumer warpgroups hold four rows each: tile (64 keys) x (4 rows x heads), then relu, weights and the sum over
// heads in registers. All three take every tile; if a block has at most four rows, each takes every third tile, and if
// it has at most two rows of 64 heads, the product is half as wide.
// The ring's rules are in sm90_ring.cuh.
//
// Column n of a product belongs to lanes c = (n / 2) % 4 of each quad: row c and head 2 * (n / 8) + n % 2, so that a
// lane's columns all belong to one row: no exchange between lanes, one output or list a lane. With two rows a product,
// lane c has row c % 2 and of its heads the half c / 2.
#include <algorithm>

#include "../device/chained_launch.cuh"
#include "../tensor_map.h"
#include "sm90_ring.cuh"
#include "sm90_sinks.cuh"
#include "sm90_weights.cuh"

namespace sparse_cp_ops {
namespace {

constexpr int kThreads = (kConsumers + 1) * 128;
// Registers a thread: 64 accumulators, 64 weights and addresses; three warpgroups and the producer share 512.
constexpr int kConsumerRegisters = 160, kProducerRegisters = 32;
constexpr int kPairRows = 2;
constexpr int kMeeting = 1 + kConsumers;  // number of a barrier; each warpgroup has one of its own before

#define SCO_NAN_16 NAN, NAN, NAN, NAN, NAN, NAN, NAN, NAN, NAN, NAN, NAN, NAN, NAN, NAN, NAN, NAN
__device__ const float kNanScales[kTileKeys] = {SCO_NAN_16, SCO_NAN_16, SCO_NAN_16, SCO_NAN_16};
#undef SCO_NAN_16

// Where a piece of keys lies; a page that there isn't: nowhere. Not looked at before the copy: that would wait for it.
struct PiecePlace {
  int position;
  int page;
};

__device__ __forceinline__ PiecePlace find_piece(const Sm90ScoreTask& task, const Segment& segment,
                                                 const int32_t* table, int index) {
  const IndexerInputs& in = task.in;
  const int piece = sweep_piece(task.sweep, segment.block.stride, segment.pieces, index);
  PiecePlace place{static_cast<int>(task.first_key) + piece * kPieceKeys, -1};
  if (place.position < segment.block.end)
    place.page = table[place.position >> (__ffs(static_cast<int>(in.page_size)) - 1)];
  return place;
}

// Boxes of a piece, and of a tile that lies in one page (smaller pages: unused).
struct KeyPages {
  CUtensorMap pieces, tiles;
};

// Into an empty stage, by a converged warp whose lanes have the same arguments but for `mine`: lane p's is piece p.
template <int HEADS>
__device__ __forceinline__ void copy_tile(const KeyPages& pages, const IndexerInputs& in, bool whole,
                                          const PiecePlace& mine, Shared<HEADS>& shared, int ring_stage,
                                          uint64_t policy) {
  Stage& stage = shared.stages[ring_stage];
  const uint32_t full = shared_address(&shared.full[ring_stage]);
  const int lane = threadIdx.x % 32;
  if (lane < kPieces) stage.positions[lane] = mine.position;
  __syncwarp();
  if (lane == 0) mbarrier_expect_bytes(full, kTileKeys * (kIndexDim + 4));
  const uint32_t values = shared_address(shared.keys[ring_stage]), scales = shared_address(stage.scales);
  const auto copy = [&](const CUtensorMap& map, int keys, int piece) {
    const PiecePlace place{__shfl_sync(~0u, mine.position, piece), __shfl_sync(~0u, mine.page, piece)};
    const int offset = place.position & static_cast<int>(in.page_size - 1);
    const bool there = place.page >= 0 && place.page < in.pages;
    // A plane behind the last one reads as zeros; NaN scales make the scores NaN.
    bulk_copy_box_by_warp(values + piece * kPieceKeys * kIndexDim, &map, 0, there ? offset : 0,
                          there ? place.page : max(static_cast<int>(in.pages), 1), full, policy);
    const void* scales_at = in.cache + place.page * in.page_stride + index_scale_offset(in.page_size, offset);
    bulk_copy_by_warp(scales + piece * kPieceKeys * 4, there ? scales_at : kNanScales, keys * 4, full, policy);
  };
  if (whole) {
    copy(pages.tiles, kTileKeys, 0);
  } else {
#pragma unroll
    for (int p = 0; p < kPieces; ++p) copy(pages.pieces, kPieceKeys, p);
  }
}

// Each producer warp copies every fourth tile; its pages are looked up a turn ahead, without which decode waits for the
// block table.
template <int HEADS, class Sink>
__device__ __forceinline__ void produce(const KeyPages& pages, const Sm90ScoreTask& task, Shared<HEADS>& shared,
                                        int warp) {
  const IndexerInputs& in = task.in;
  const bool whole = task.sweep == Sweep::kAll && in.page_size >= kTileKeys;
  int ring_stage = warp, skipped = warp;  // of the segment's tiles, those before this warp's next one
  uint32_t parity = 1;                    // an empty ring: the wait for "the phase before" passes
  for_each_segment<Sink::kStoresAll>(task, shared.plan, [&](const Segment& segment) {
    // Rows of pads have no keys, so a block that has steps has a real request.
    const int64_t request = in.req_ids[row_of(task.rows, segment.block.slot)];
    const int32_t* table = in.block_table + request * in.table_stride;
    // Few rows of a request: no other block reads its keys, so they make room for scores in the L2 cache.
    const uint64_t policy = segment.shared_tiles ? usual_cache_policy() : read_once_cache_policy();
    const int piece = threadIdx.x % kPieces;
    const auto find = [&](int tile) { return find_piece(task, segment, table, tile * kPieces + piece); };
    int tile = segment.first + skipped;
    PiecePlace ahead = find(tile);
    for (; tile < segment.last; tile += kProducers) {
      const PiecePlace place = ahead;
      ahead = find(tile + kProducers);
      mbarrier_wait(shared_address(&shared.empty[ring_stage]), parity);
      copy_tile(pages, in, whole, place, shared, ring_stage, policy);
      ring_stage += kProducers;
      if (ring_stage >= kStages) ring_stage -= kStages, parity ^= 1;
    }
    skipped = tile - segment.last;
  });
}

// Queries of rows [slot0, slot0 + count) of the plan as a B operand for ROWS rows a product, and their weights, in
// place of the old ones; absent rows and heads are zeros. All loads are in flight before the warpgroup waits for its
// last products.
template <int HEADS, int ROWS>
__device__ __forceinline__ void replace_queries(const Sm90ScoreTask& task, uint8_t* queries, RowWeights<HEADS>& weights,
                                                int slot0, int count, int barrier) {
  const IndexerInputs& in = task.in;
  constexpr int kChunks = kIndexDim / 16, kBatch = HEADS * kChunks / 128, kLaneHeads = HEADS * ROWS / kGroupRows;
  constexpr int kWeights = HEADS * ROWS / 128;  // a thread
  const int thread = threadIdx.x % 128;
  uint4 bytes[ROWS][kBatch];
  float values[kWeights];
#pragma unroll
  for (int i = 0; i < kWeights; ++i) {
    const int at = thread + i * 128, r = at / HEADS, head = at % HEADS;
    values[i] = 0.0f;
    if (r < count && head < in.heads) values[i] = __ldg(in.q_weights + row_of(task.rows, slot0 + r) * in.heads + head);
  }
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int at = thread + i * 128, head = at / kChunks;
      bytes[r][i] = make_uint4(0, 0, 0, 0);
      if (r < count && head < in.heads)
        bytes[r][i] = __ldg(
            reinterpret_cast<const uint4*>(in.q_fp8 + (row_of(task.rows, slot0 + r) * in.heads + head) * kIndexDim) +
            at % kChunks);
    }
  }
  named_barrier(barrier, 128);
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int at = thread + i * 128, head = at / kChunks;
      const int c = r + head / kLaneHeads * ROWS, h = head % kLaneHeads, n = h / 2 * 8 + c * 2 + h % 2;
      *reinterpret_cast<uint4*>(queries + n * kIndexDim + ((at % kChunks ^ (n & 7)) << 4)) = bytes[r][i];
    }
  }
#pragma unroll
  for (int i = 0; i < kWeights; ++i) {
    const int at = thread + i * 128, r = at / HEADS, head = at % HEADS;
    weights.of[r + head / kLaneHeads * ROWS][head % kLaneHeads] = values[i];
  }
  fence_async_proxy();
  named_barrier(barrier, 128);
}

// Every STEP-th tile of [first, last), first < last; put(tile, facts) takes what `weights` holds. The ring goes on by
// as many tiles; those in between are for others, and a tile is released for as many warpgroups as pass it over.
template <int STEP, class Weights, int HEADS, class Put>
__device__ __forceinline__ void score_tiles(KeyRing<HEADS>& ring, uint64_t queries, Weights& weights, int first,
                                            int last, const Put& put) {
  ring.make_uniform();
  first = uniform(first);
  last = uniform(last);
  if constexpr (STEP == 1 ? Weights::kDeferred : Weights::kHeads == kHalfHeads) {
    // The next product runs while this tile's scores are put.
    ring.wait();
    TileFacts facts = ring.facts();
    Weights::template multiply<0>(ring.operand(), queries);
    for (int tile = first; tile < last; tile += STEP) {
      wgmma_wait<0>();
      ring.template release<STEP>();
      ring.advance(STEP);
      if (tile + STEP < last) ring.wait();
      const TileFacts next = ring.facts();
      weights.template add<0>();
      // Behind the last tile this multiplies whatever the stage holds; nobody reads the result.
      Weights::template multiply<0>(ring.operand(), queries);
      put(tile, facts);
      facts = next;
    }
    wgmma_wait<0>();
  } else {
    for (int tile = first; tile < last; tile += STEP) {
      ring.wait();
      TileFacts facts;
      unrolled<Weights::kProducts>([&](auto product) {
        constexpr int kProduct = decltype(product)::value;
        constexpr bool kLast = kProduct == Weights::kProducts - 1;
        Weights::template multiply<kProduct>(ring.operand(), queries);
        if constexpr (kLast) facts = ring.facts();
        wgmma_wait<0>();
        if constexpr (kLast) ring.template release<STEP>();
        weights.template add<kProduct>();
      });
      put(tile, facts);
      ring.advance(STEP);
    }
  }
}

// This warpgroup's tiles of [first, last): those in stages whose number is its own modulo kConsumers.
template <class Weights, int HEADS, class Put>
__device__ __forceinline__ void score_own_tiles(KeyRing<HEADS>& ring, uint64_t queries, Weights& weights, int group,
                                                int first, int last, const Put& put) {
  const int passed = (group + kStages - uniform(ring.stage)) % kConsumers;
  int tile = first + passed;
  ring.advance(passed);
  if (tile < last) {
    score_tiles<kConsumers>(ring, queries, weights, tile, last, put);
    tile += ceil_div(last - tile, kConsumers) * kConsumers;
  }
  ring.go_back(tile - last);
}

template <int HEADS, class Weights, class Sink>
__device__ __forceinline__ void consume(const Sm90ScoreTask& task, Shared<HEADS>& shared) {
  const IndexerInputs& in = task.in;
  const int group = uniform(threadIdx.x / 128), lane = threadIdx.x % 32;
  const int in_tile = threadIdx.x % 128 / 32 * 16 + lane / 4;
  const uint64_t queries = swizzled_tile(shared_address(shared.queries[group]));
  KeyRing<HEADS> ring{shared, in_tile};

  bool apart = false;  // the warpgroups last had tiles of their own
  for_each_segment<Sink::kStoresAll>(task, shared.plan, [&](const Segment& segment) {
    if constexpr (Sink::kStoresAll) {
      if (apart && segment.shared_tiles) named_barrier(kMeeting, kConsumers * 128);
      apart = !segment.shared_tiles;
    }
    const int first_row = segment.shared_tiles ? group * kGroupRows : 0;
    const int rows = max(0, min(segment.block.rows - first_row, kGroupRows)), slot0 = segment.block.slot + first_row;
    if (rows == 0) {
      for (int tile = segment.first; tile < segment.last; ++tile) {
        ring.wait();
        ring.release();
        ring.advance();
      }
      return;
    }
    const auto row_at = [&](int r) { return r < rows ? row_of(task.rows, slot0 + r) : -1; };
    const auto end_of = [&](int64_t row) {
      return row >= 0 ? wanted_end(in, row, task.skip_keys, task.first_key + task.key_count) : 0;
    };
    if constexpr (HEADS > kHalfHeads && Sink::kStoresAll) {
      if (!segment.shared_tiles && rows <= kPairRows) {
        const int row_in_pair = lane % kPairRows, half = lane / kPairRows % 2;
        const int64_t row = row_at(row_in_pair);
        Sink sink(task, slot0 + row_in_pair, in_tile, end_of(row));
        replace_queries<HEADS, kPairRows>(task, shared.queries[group], shared.weights[group], slot0, rows, 1 + group);
        typename Weights::Half weights;
        weights.template load<kPairRows>(shared.weights[group].of[lane % kGroupRows]);
        score_own_tiles(
            ring, queries, weights, group, segment.first, segment.last, [&](int tile, const TileFacts& facts) {
              float sums[2];
#pragma unroll
              for (int key = 0; key < 2; ++key)
                sums[key] = weights.sum(key) + __shfl_xor_sync(~0u, weights.sum(key), kPairRows);
              // Both halves have both sums; each puts one.
              sink.put(tile, half,
                       weights.scaled(half == 0 ? sums[0] : sums[1]) * (half == 0 ? facts.scale0 : facts.scale1),
                       facts.key + half * kLaneKeyDistance);
            });
        return;
      }
    }
    const int end = end_of(row_at(lane % kGroupRows));
    replace_queries<HEADS, kGroupRows>(task, shared.queries[group], shared.weights[group], slot0, rows, 1 + group);
    Weights weights;
    weights.template load<kGroupRows>(shared.weights[group].of[lane % kGroupRows]);
    Sink sink(task, slot0 + lane % kGroupRows, in_tile, end);
    const auto put = [&](int tile, const TileFacts& facts) {
      sink.put(tile, 0, weights.scaled(weights.sum(0)) * facts.scale0, facts.key);
      sink.put(tile, 1, weights.scaled(weights.sum(1)) * facts.scale1, facts.key + kLaneKeyDistance);
    };
    if constexpr (Sink::kStoresAll) {
      if (!segment.shared_tiles) {
        score_own_tiles(ring, queries, weights, group, segment.first, segment.last, put);
        return;
      }
    }
    score_tiles<1>(ring, queries, weights, segment.first, segment.last, put);
    sink.finish();
  });
}

template <int HEADS, class Weights, class Sink>
__global__ __launch_bounds__(kThreads, 1) void sm90_scores_kernel(const __grid_constant__ KeyPages pages,
                                                                  const __grid_constant__ Sm90ScoreTask task) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t smem[];
  Shared<HEADS>& shared = *reinterpret_cast<Shared<HEADS>*>(smem);
  SCO_DECLARE_ACCUMULATORS();
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      mbarrier_init(shared_address(&shared.full[s]), 1);                // of the warp that copies the tile
      mbarrier_init(shared_address(&shared.empty[s]), kConsumers * 4);  // one arrival a warp
    }
    fence_mbarrier_init();
    prefetch_tensor_map(&pages.pieces);
    prefetch_tensor_map(&pages.tiles);
  }
  __syncthreads();
  if constexpr (Sink::kStoresAll) {
    if (plans_itself(task)) {
      wait_for_earlier_kernels();
      make_own_plan(task, shared.plan, reinterpret_cast<int*>(shared.queries));
    }
  }
  if (threadIdx.x < kConsumers * 128) {
    raise_registers<kConsumerRegisters>();
    wait_for_earlier_kernels();
    consume<HEADS, Weights, Sink>(task, shared);
  } else {
    lower_registers<kProducerRegisters>();
    wait_for_earlier_kernels();
    produce<HEADS, Sink>(pages, task, shared, uniform(threadIdx.x / 32) - kConsumers * 4);
  }
#endif
}

template <int HEADS, class Weights, class Sink>
void launch(const KeyPages& pages, const Sm90ScoreTask& task, int ctas, int32_t device, cudaStream_t stream) {
  constexpr int kBytes = sizeof(Shared<HEADS>);
  allow_shared_bytes<sm90_scores_kernel<HEADS, Weights, Sink>>(device, kBytes);
  launch_chained("Hopper indexer scores", sm90_scores_kernel<HEADS, Weights, Sink>, {ctas, kThreads, kBytes}, device,
                 stream, pages, task);
}

template <int HEADS, class Weights>
void launch(const KeyPages& pages, const Sm90ScoreTask& task, int ctas, int32_t device, cudaStream_t stream) {
  if (task.scores != nullptr) launch<HEADS, Weights, StoreSink>(pages, task, ctas, device, stream);
  else launch<HEADS, Weights, ListSink>(pages, task, ctas, device, stream);
}

}  // namespace

void launch_sm90_scores(const Sm90ScoreTask& task, int ctas, int32_t device, cudaStream_t stream) {
  const IndexerInputs& in = task.in;
  // Without pages the map covers bytes that exist but are never copied: every key lies outside.
  const auto map = [&](int64_t keys) {
    return in.pages > 0 ? swizzled_rows_map(in.cache, in.pages, in.page_size, in.page_stride, keys)
                        : swizzled_rows_map(in.q_fp8, 1, kPieceKeys, kPieceKeys * kIndexDim, kPieceKeys);
  };
  const KeyPages pages{map(kPieceKeys), map(std::min<int64_t>(in.page_size, kTileKeys))};
  if (in.heads <= 32) {
    if (in.f16) launch<32, WeightsF16<32>>(pages, task, ctas, device, stream);
    else launch<32, WeightsF32<32>>(pages, task, ctas, device, stream);
  } else {
    if (in.f16) launch<64, WeightsF16<64>>(pages, task, ctas, device, stream);
    else launch<64, WeightsF32<64>>(pages, task, ctas, device, stream);
  }
}

}  // namespace sparse_cp_ops
