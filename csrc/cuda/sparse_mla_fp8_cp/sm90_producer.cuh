// Hopper kernel, producer warpgroup: lists -> slots -> key tiles in shared memory, two steps ahead of the consumers.
#pragma once

#include "../device/cp_async.cuh"
#include "sm90_tile.cuh"

namespace sparse_cp_ops {
namespace sm90 {

inline constexpr int kLanesPerRow = 8, kRowsAtOnce = kWarpgroup / kLanesPerRow, kRowsPerThread = kKeys / kRowsAtOnce;

// Slot (page * page_size + offset) of an entry, -1 if it is unused. 2^31 slots would be 1.4 TB.
__device__ __forceinline__ int find_slot(const SparseMlaParams& p, const RowKeys& keys, int page_shift, int32_t index) {
  if (index < 0) return -1;
  int page = index >> page_shift;
  if (p.paged) {
    if (index >= keys.kv_len || page >= p.table_width) return -1;
    page = keys.table[page];
    if (page < 0) return -1;
  }
  if (page >= p.num_pages) return -1;
  return (page << page_shift) + (index & ((1 << page_shift) - 1));
}

// Steps up to the last entry that may be used, agreed between the producer's warps and handed to the consumers.
__device__ __forceinline__ int count_steps(const SparseMlaParams& p, const RowKeys& keys, const Item& item,
                                           const Barriers& barriers) {
  const int thread = threadIdx.x % kWarpgroup;
  int last = -1;
  for (int i = thread; i < item.entries; i += kWarpgroup)
    if (keys.may_use(p, keys.list[item.begin + i])) last = i;
  last = __reduce_max_sync(~0u, last);
  named_barrier(kProducerBarrier, kWarpgroup);  // the scratch of the item before has been read
  if (thread % 32 == 0) set_shared(barriers.scan(thread / 32), static_cast<uint32_t>(last));
  named_barrier(kProducerBarrier, kWarpgroup);
#pragma unroll
  for (int warp = 0; warp < kWarpgroup / 32; ++warp)
    last = max(last, static_cast<int>(shared_u32(barriers.scan(warp))));
  return (last + kKeys) / kKeys;
}

__device__ __forceinline__ void prefetch_queries(const SparseMlaParams& p, const Item& item) {
  constexpr int kLines = kQkDim * 2 / 128;
  const auto* q = static_cast<const uint16_t*>(p.q) + item.row * p.q_row_stride + item.head0 * p.q_head_stride;
  for (int i = threadIdx.x % kWarpgroup; i < kHeads * kLines; i += kWarpgroup)
    prefetch_l2(q + i / kLines * p.q_head_stride + i % kLines * 64);
}

// 16-bit rows of the workspace, 128 bytes of a row by eight neighbouring lanes.
struct WorkspaceSource {
  Workspace workspace;

  __device__ bool uniform() const { return *workspace.mixed == 0; }

  // Half `half` of the latent dimensions; with part 0 the factors, with part 1 the RoPE chunk.
  template <int kPart>
  __device__ void load(const SparseMlaParams&, int, const int (&slots)[kRowsPerThread], int half, uint32_t tile,
                       uint32_t factors, uint32_t full) const {
    const int row0 = threadIdx.x % kWarpgroup / kLanesPerRow, lane = threadIdx.x % kLanesPerRow;
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      const int row = row0 + i * kRowsAtOnce;
      const bool used = slots[i] >= 0;
      const int64_t slot = max(slots[i], 0);
      const uint8_t* source = workspace.rows + slot * kWorkspaceRowBytes + lane * 16;
      const uint32_t target = tile + swizzled(row, lane);
#pragma unroll
      for (int j = 0; j < kLatentChunks / 2; ++j) {
        const int chunk = half * (kLatentChunks / 2) + j;
        cp_async_16(target + chunk * kChunkBytes, source + chunk * 128, used);
      }
      if (kPart == 1) cp_async_16(target + kRopeChunk * kChunkBytes, source + kRopeChunk * 128, used);
      else if (lane == 0) cp_async_16(factors + row * 16, workspace.factors + slot, used);
    }
    mbarrier_arrive_after_cp_async(full);
  }
};

__device__ __forceinline__ uint4 load_global(const uint8_t* address) {
  uint4 x;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(address));
  return x;
}

// Records of the cache, converted on the way; eight lanes share one.
struct DirectSource {
  __device__ bool uniform() const { return false; }

  struct Piece {
    uint4 latent[2], scales, rope;
  };

  template <int kPart>
  __device__ static void read(const SparseMlaParams& p, int page_shift, int slot, int half, Piece& x) {
    const int lane = threadIdx.x % kLanesPerRow;
    const int offset = slot & ((1 << page_shift) - 1);
    const uint8_t* record =
        p.kv_cache + (slot >> page_shift) * p.page_stride + offset * static_cast<int>(kMlaRecordBytes);
#pragma unroll
    for (int t = 0; t < 2; ++t) x.latent[t] = load_global(record + half * 256 + t * 128 + lane * 16);
    x.scales = load_global(record + kMlaScaleOffset);
    if (kPart == 1) x.rope = load_global(record + kMlaRopeOffset + lane * 16);
  }

  template <int kPart>
  __device__ static void write(int row, bool used, int half, const Piece& x, uint32_t tile, uint32_t factors) {
    const int lane = threadIdx.x % kLanesPerRow;
    const RecordScales scales = record_scales(reinterpret_cast<const float4&>(x.scales));
    const uint4 zero = make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      const uint4& v = x.latent[t];
      const uint32_t multiplier = half ? scales.multipliers[2 + t] : scales.multipliers[t];
      const uint4 low = used ? convert_latent(make_uint2(v.x, v.y), multiplier) : zero;
      const uint4 high = used ? convert_latent(make_uint2(v.z, v.w), multiplier) : zero;
      // Lanes 4 to 7 write the second chunk, other half first: eight lanes fall into eight bank groups.
      const int second = lane / 4, piece = lane % 4 * 2;
      const uint32_t chunk = tile + (half * (kLatentChunks / 2) + 2 * t + second) * kChunkBytes;
      set_shared(chunk + swizzled(row, piece + second), second ? high : low);
      set_shared(chunk + swizzled(row, piece + 1 - second), second ? low : high);
    }
    if (kPart == 1)
      set_shared(tile + kRopeChunk * kChunkBytes + swizzled(row, lane),
                 used ? convert_rope(x.rope, scales.rope_multiplier) : zero);
    else if (lane == 0) set_shared(factors + row * 16, used ? reinterpret_cast<const uint4&>(scales.factors) : zero);
  }

  template <int kPart>
  __device__ void load(const SparseMlaParams& p, int page_shift, const int (&slots)[kRowsPerThread], int half,
                       uint32_t tile, uint32_t factors, uint32_t full) const {
    const int row0 = threadIdx.x % kWarpgroup / kLanesPerRow;
#pragma unroll
    for (int i = 0; i < kRowsPerThread; i += 2) {  // the loads of two rows are in flight at a time
      Piece x[2] = {};
#pragma unroll
      for (int j = 0; j < 2; ++j)
        if (slots[i + j] >= 0) read<kPart>(p, page_shift, slots[i + j], half, x[j]);
#pragma unroll
      for (int j = 0; j < 2; ++j)
        write<kPart>(row0 + (i + j) * kRowsAtOnce, slots[i + j] >= 0, half, x[j], tile, factors);
    }
    mbarrier_arrive(full);
  }
};

template <class Source>
__device__ __forceinline__ void produce(const SparseMlaParams& p, const KeySplit& split, const Source& source,
                                        int page_shift, int64_t items, uint32_t base) {
  const Barriers barriers{base + kBarrierOffset};
  const int thread = threadIdx.x % kWarpgroup, row0 = thread / kLanesPerRow;
  int count = 0;      // of items
  uint32_t uses = 0;  // of the two tiles, modulo 2 in a bit each
  for (int64_t number = blockIdx.x; number < items; number += gridDim.x, ++count) {
    const Item item = work_item(p, split, number);
    const RowKeys keys = row_keys(p, item.row);
    int32_t entries[kRowsPerThread];
    auto load_entries = [&](int first) {
#pragma unroll
      for (int i = 0; i < kRowsPerThread; ++i) {
        const int entry = first + row0 + i * kRowsAtOnce;
        entries[i] = entry < item.entries && !keys.pad ? keys.list[item.begin + entry] : -1;
      }
    };
    load_entries(0);
    prefetch_queries(p, item);
    const int steps = count_steps(p, keys, item, barriers);
    if (thread == 0) {
      mbarrier_wait(barriers.item_empty(count & 1), (count >> 1 & 1) ^ 1);
      set_shared(barriers.steps(count & 1), static_cast<uint32_t>(steps));
      mbarrier_arrive(barriers.item_full(count & 1));
    }
    for (int i = 0; i < steps; ++i) {
      int slots[kRowsPerThread];
#pragma unroll
      for (int j = 0; j < kRowsPerThread; ++j) slots[j] = find_slot(p, keys, page_shift, entries[j]);
      load_entries((i + 1) * kKeys);
      const int tile = i & 1;
      const uint32_t parity = (uses >> tile & 1) ^ 1;
      uses ^= 1u << tile;
      const uint32_t address = base + kKeyOffset + tile * kTileBytes,
                     factors = base + kFactorOffset + tile * kKeys * 16;
      mbarrier_wait(barriers.empty(tile, 0), parity);
      source.template load<0>(p, page_shift, slots, tile, address, factors, barriers.full(tile, 0));
      mbarrier_wait(barriers.empty(tile, 1), parity);
      source.template load<1>(p, page_shift, slots, tile ^ 1, address, factors, barriers.full(tile, 1));
    }
  }
}

}  // namespace sm90
}  // namespace sparse_cp_ops
