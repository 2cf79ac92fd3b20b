// write_kv_cache on CUDA: a warp moves one or four rows to their slots, each under the lock of its slot.
#include "../../ops/write_kv_cache.h"

#include <torch/csrc/stable/library.h>

#include "../../ops/op_functions.h"
#include "../launch.h"
#include "../rows.h"
#include "../value_checks.h"

namespace sparse_cp_ops {
namespace {

constexpr int kWarpsPerBlock = 4;
constexpr int kPieces = kMlaRecordBytes / 16;  // 41: one for each lane and a second one for the first nine
constexpr int kScaleLane = 31;                 // has no second piece and moves the scale of the indexer record
static_assert(kPieces > 32 && kPieces - 32 <= kScaleLane);

// Two rows on one slot: without a lock their pieces could mix. Every lock is free again when the kernel ends, whatever
// it did, so that the table has no state between launches. Slots of one page never share a lock, nor do those of a
// cache of up to 2^20 slots.
constexpr uint32_t kSlotLocks = 1u << 20;
__device__ uint32_t slot_locks[kSlotLocks];

__device__ bool try_acquire(uint32_t* lock) {
  uint32_t before;
  asm volatile("atom.acquire.gpu.global.cas.b32 %0, [%1], 0, 1;" : "=r"(before) : "l"(lock) : "memory");
  return before == 0;
}

__device__ void release(uint32_t* lock) { asm volatile("st.release.gpu.global.u32 [%0], 0;" : : "l"(lock) : "memory"); }

// Records are read once, and many written ones leave the L2 cache before anybody reads them: kStream passes them
// through.
template <bool kStream>
__device__ uint4 load_piece(const uint4* source) {
  return kStream ? __ldcs(source) : __ldg(source);
}
template <bool kStream>
__device__ void store_piece(uint4* target, uint4 piece) {
  if constexpr (kStream) __stcs(target, piece);
  else *target = piece;
}

// A lane's part of a row.
struct RowPieces {
  uint4 first, second;   // of the MLA record
  uint32_t word, scale;  // of the indexer record
};

template <bool kStream>
__device__ void load_row(const WriteKvCacheParams& p, uint32_t block, uint32_t in_block, int lane, RowPieces& row) {
  const auto* mla = reinterpret_cast<const uint4*>(p.mla_records.data + block * p.mla_records.block_stride +
                                                   in_block * p.mla_records.row_stride);
  row.first = load_piece<kStream>(mla + lane);
  if (lane < kPieces - 32) row.second = load_piece<kStream>(mla + 32 + lane);
  if (p.k_records.data != nullptr) {
    const auto* key = reinterpret_cast<const uint32_t*>(p.k_records.data + block * p.k_records.block_stride +
                                                        in_block * p.k_records.row_stride);
    row.word = __ldg(key + lane);
    if (lane == kScaleLane) row.scale = __ldg(key + kIndexDim / 4);
  }
}

template <bool kStream>
__device__ void store_row(const WriteKvCacheParams& p, int64_t slot, int lane, const RowPieces& row) {
  const int64_t page = slot >> p.page_shift, offset = slot & (p.page_size - 1);
  auto* mla = reinterpret_cast<uint4*>(p.mla_cache + page * p.mla_page_stride + offset * kMlaRecordBytes);
  store_piece<kStream>(mla + lane, row.first);
  if (lane < kPieces - 32) store_piece<kStream>(mla + 32 + lane, row.second);
  if (p.k_records.data == nullptr) return;
  uint8_t* index_page = p.indexer_cache + page * p.indexer_page_stride;
  reinterpret_cast<uint32_t*>(index_page + index_values_offset(offset))[lane] = row.word;
  if (lane == kScaleLane)
    *reinterpret_cast<uint32_t*>(index_page + index_scale_offset(p.page_size, offset)) = row.scale;
}

// All lanes load the pieces of all rows of the warp; lane i finds the slot of row i and holds its lock. Rows whose lock
// another warp holds wait for the next round: no warp waits for a lock while it holds one.
template <int kRows, bool kStream>
__global__ void __launch_bounds__(kWarpsPerBlock * 32) write_kernel(WriteKvCacheParams p) {
  constexpr uint32_t kAllLanes = 0xFFFFFFFF;
  const uint32_t first = (blockIdx.x * kWarpsPerBlock + threadIdx.x / 32) * kRows;
  const int lane = threadIdx.x % 32;
  const bool has_row = lane < kRows && first + lane < p.rows;
  WriteKvCacheParams::Target target;  // before the rows: the block table's entry waits for it
  if (has_row) target = p.target_of(first + lane);
  RowPieces rows[kRows];
  const auto block_rows = static_cast<uint32_t>(p.mla_records.block_rows);
  uint32_t block = first / block_rows, in_block = first - block * block_rows;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    if (first + i < p.rows) load_row<kStream>(p, block, in_block, lane, rows[i]);
    if (++in_block == block_rows) in_block = 0, ++block;
  }
  const int64_t slot = has_row ? p.slot_of(target) : -1;
  uint32_t* lock = slot_locks + (slot & (kSlotLocks - 1));
  bool waiting = slot >= 0;
  while (__any_sync(kAllLanes, waiting)) {
    const bool holding = waiting && try_acquire(lock);
    const uint32_t held = __ballot_sync(kAllLanes, holding);
    if (held == 0) __nanosleep(64);
    __syncwarp();  // the locks before the stores of all lanes
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int64_t row_slot = __shfl_sync(kAllLanes, slot, i);
      if (held >> i & 1) store_row<kStream>(p, row_slot, lane, rows[i]);
    }
    __syncwarp();  // the stores of all lanes before the locks
    if (holding) release(lock);
    waiting = waiting && !holding;
  }
}

}  // namespace

void write_kv_cache(const Tensor& mla_records, std::optional<Tensor> k_records, std::optional<Tensor> req_ids,
                    std::optional<Tensor> positions, std::optional<Tensor> block_table, Tensor mla_cache,
                    std::optional<Tensor> indexer_cache, std::optional<Tensor> slots) {
  const int32_t device = mla_records.get_device_index();
  torch::stable::accelerator::DeviceGuard guard(device);
  const WriteKvCacheParams p =
      prepare_write_kv_cache(mla_records, k_records, req_ids, positions, block_table, mla_cache, indexer_cache, slots);
  cudaStream_t stream = current_stream(device);
  if (value_checks_possible(stream)) check_write_targets(p, req_ids, positions, block_table, slots);
  if (p.rows == 0) return;
  SCO_CHECK(p.rows <= std::numeric_limits<int32_t>::max(), "mla_records: expected at most 2^31 - 1 rows, got ", p.rows);
  // Many rows: several a warp, so that more loads are under way in each SM and fewer warps wait for locks. From
  // kStreamedRows on the records of both sides, 1576 bytes a row, exceed the L2 cache of an H200.
  constexpr int64_t kManyRows = 2048, kStreamedRows = 32768;
  constexpr int kRowsPerWarp = 4;
  const int64_t rows_per_warp = p.rows < kManyRows ? 1 : kRowsPerWarp;
  const auto kernel = p.rows < kManyRows       ? write_kernel<1, false>
                      : p.rows < kStreamedRows ? write_kernel<kRowsPerWarp, false>
                                               : write_kernel<kRowsPerWarp, true>;
  kernel<<<grid_size(p.rows, rows_per_warp * kWarpsPerBlock), kWarpsPerBlock * 32, 0, stream>>>(p);
  check_launch("write_kv_cache");
}

}  // namespace sparse_cp_ops

STABLE_TORCH_LIBRARY_IMPL(sparse_cp_ops, CUDA, m) {
  m.impl("write_kv_cache", TORCH_BOX(&sparse_cp_ops::write_kv_cache));
}
