// Hopper kernel, two producer warpgroups: lists -> records -> key tiles in shared memory.
#pragma once

#include "sm90_producer.cuh"

namespace sparse_cp_ops {
namespace sm90 {

// Waits until at most `groups` of this thread's last copies are on their way.
__device__ __forceinline__ void wait_for_copies(int groups) {
  if (groups <= 0) cp_async_wait<0>();
  else if (groups == 1) cp_async_wait<1>();
  else if (groups == 2) cp_async_wait<2>();
  else cp_async_wait<3>();
}

// Records of the cache. Their bytes are copied into a free part of a tile, 16 of them to one of the two places that
// their values will take, and converted there. A thread converts what it has copied itself, so it waits for its own
// copies only. The instructions of a part, not the copies, are what a step takes: parts of the two tiles are constants,
// and what eight lanes need once (look-ups, scales) each does for one of the eight.
struct DirectSource {
  static constexpr int kProducers = 2 * kWarpgroup, kRows = kRowsPerThread<kProducers>;
  static constexpr int kArrivals = kProducers / 32;
  using Entries = StepEntries<1>;
  // Eight lanes look up their rows of so many steps at a time: lane l row l % kRows of step l / kRows.
  static constexpr int kSteps = kLanesPerRow / kRows;
  static_assert(kRows * kLatentTiles == kLanesPerRow);  // and of a step's scales each takes one

  __device__ static int first_entry(int thread) {
    const int lane = thread % kLanesPerRow;
    return lane / kRows * kKeys + thread / kLanesPerRow + lane % kRows * kRowsAtOnce<kRows>;
  }

  __device__ bool may_mix() const { return true; }

  // The parts of an item's tiles in turn: part k % 2 of step k / 2; kPart is k % 4.
  struct Walk {
    const SparseMlaParams& p;
    const Barriers& barriers;
    Entries& next;
    Lookup lookup;
    uint32_t uses;
    int page_shift;
    // This thread's 16 bytes of latent values in a tile lie where the first or the second half of their values will:
    // lanes 4 to 7 have the second chunk of a scale tile, other place first, so that eight lanes fall into eight bank
    // groups. `halves`: of the bytes, that of the values which take their place, and the other one.
    uint32_t latent, halves[2], rope, factor;
    int scale_offset;               // of this lane's scale, from the place in its row's record that `sources` name
    int pages[1];                   // of the steps that are looked up next
    const uint8_t* record;          // this lane's row of the present steps
    uint32_t exist;                 // which lanes' rows exist, a bit each
    const uint8_t* sources[kRows];  // of the step whose copies come next
    uint32_t used = 0;              // whether the row of this lane's scale exists, a bit a tile
    uint32_t multiplier, rope_multiplier;

    __device__ static int lane() { return threadIdx.x % kLanesPerRow; }
    __device__ static int scale_row() { return lane() / kLatentTiles; }
    __device__ Walk(const SparseMlaParams& params, const Barriers& b, Entries& entries, uint32_t base,
                    uint32_t used_tiles, int shift)
        : p(params),
          barriers(b),
          next(entries),
          lookup(params, entries.keys, shift, 0),
          uses(used_tiles),
          page_shift(shift) {
      const int row = (threadIdx.x - kConsumers) / kLanesPerRow, second = lane() / 4;
      latent = base + kKeyOffset + second * kChunkBytes + swizzled(row, lane() % 4 * 2 + second);
      halves[0] = latent + second * 8;
      halves[1] = latent + (second ^ 1) * 8;
      rope = base + kKeyOffset + kRopeChunk * kChunkBytes + swizzled(row, lane());
      factor = base + kFactorOffset + (row + scale_row() * kRowsAtOnce<kRows>)*16 + lane() % kLatentTiles * 4;
      scale_offset = static_cast<int>(kMlaScaleOffset) + lane() % kLatentTiles * 4 - lane() * 16;
      lookup.find_pages(next.entries, pages);
    }

    __device__ static constexpr int half(int part) { return (part >> 1 ^ part) & 1; }
    __device__ static constexpr uint32_t row_offset(int part, int i) {
      return (part >> 1) * kTileBytes + i * kRowsAtOnce<kRows> * 128;
    }
    __device__ static constexpr uint32_t latent_offset(int part, int i, int t) {
      return row_offset(part, i) + (half(part) * (kLatentChunks / 2) + 2 * t) * kChunkBytes;
    }
    // The last quarter is freed last.
    __device__ uint32_t empty(int k) const { return barriers.empty(k >> 1 & 1, k & 1, kQuarters - 1); }
    __device__ uint32_t parity(int k) const { return (uses >> (k >> 1 & 1) ^ k >> 2 ^ 1) & 1; }
    __device__ bool is_free(int k) const { return __all_sync(~0u, mbarrier_test(empty(k), parity(k))) != 0; }

    // At the first part of each step: kSteps of them are looked up together, their pages a step after their entries.
    __device__ void look_up(int step) {
      if (static_cast<uint32_t>(step) % kSteps == 0) {
        int slot[1];
        lookup.find_rows(next.entries, pages, slot);
        const int found = max(slot[0], 0), in_page = found & ((1 << page_shift) - 1);
        record = p.kv_cache + (found >> page_shift) * p.page_stride + in_page * static_cast<int>(kMlaRecordBytes);
        exist = __ballot_sync(~0u, slot[0] >= 0) >> (threadIdx.x % 32 / kLanesPerRow * kLanesPerRow);
        next.load(step + kSteps);
      } else if (static_cast<uint32_t>(step) % kSteps == 1) {
        lookup.find_pages(next.entries, pages);
      }
    }

    template <int kPart>
    __device__ void copy(int step) {
      if constexpr (kPart % 2 == 0) {
        constexpr int kTile = kPart >> 1;
        look_up(step);
        const uint32_t rows = exist >> (static_cast<uint32_t>(step) % kSteps * kRows);
#pragma unroll
        for (int i = 0; i < kRows; ++i)
          sources[i] = reinterpret_cast<const uint8_t*>(__shfl_sync(~0u, reinterpret_cast<unsigned long long>(record),
                                                                    static_cast<uint32_t>(step) % kSteps * kRows + i,
                                                                    kLanesPerRow)) +
                       lane() * 16;
        const bool exists = rows >> scale_row() & 1;
        used = (used & ~(1u << kTile)) | static_cast<uint32_t>(exists) << kTile;
        static_assert(kRows == 2);
        cp_async_4(factor + kTile * kKeys * 16, (scale_row() == 0 ? sources[0] : sources[1]) + scale_offset, exists);
        copy_latent<kPart>(rows);
      } else {
        copy_latent<kPart>(exist >> (static_cast<uint32_t>(step) % kSteps * kRows));
      }
      cp_async_commit();
    }
    template <int kPart>
    __device__ void copy_latent(uint32_t rows) const {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const bool exists = rows >> i & 1;
#pragma unroll
        for (int t = 0; t < 2; ++t)
          cp_async_16(latent + latent_offset(kPart, i, t), sources[i] + half(kPart) * 256 + t * 128, exists);
        if constexpr (kPart % 2 == 1) cp_async_16(rope + row_offset(kPart, i), sources[i] + kMlaRopeOffset, exists);
      }
    }

    // One scale of a step by each lane. An unused row has bytes and scales of 0, so values of 0.
    template <int kTile>
    __device__ void convert_scale() {
      const uint32_t place = factor + kTile * kKeys * 16, scale = shared_u32(place);
      uint32_t largest = finite_power(scale);
      largest = max(largest, __shfl_xor_sync(~0u, largest, 1));
      largest = max(largest, __shfl_xor_sync(~0u, largest, 2));
      const int exponent = exponent_of(largest);
      const float inverse = power_of_two(-exponent), ratio = multiplier_of(scale, inverse);
      multiplier = pack_f16x2(ratio, ratio);
      rope_multiplier = rope_multiplier_of(inverse);
      const float mantissa = mantissa_of_scale(scale);
      const float next_mantissa = __shfl_down_sync(~0u, mantissa, 1, kLanesPerRow);
      const bool last = lane() % kLatentTiles == kLatentTiles - 1;
      const float result = last ? last_factor(mantissa, exponent) : __fdividef(mantissa, next_mantissa);
      set_shared(place, (used >> kTile & 1) != 0 ? result : 0.0f);
    }

    // 16 bytes of a row and what they are multiplied by.
    struct Piece {
      uint2 first, last;
      uint32_t factors;
    };
    template <int kPart>
    __device__ Piece load(int i, int t) const {
      const uint32_t offset = latent_offset(kPart, i, t);
      const uint32_t factors = __shfl_sync(~0u, multiplier, i * kLatentTiles + half(kPart) * 2 + t, kLanesPerRow);
      return {shared_u32x2(halves[0] + offset), shared_u32x2(halves[1] + offset), factors};
    }
    // The next piece is loaded before this one is converted: there are two warps a scheduler to hide a load.
    template <int kPart>
    __device__ void convert() {
      if constexpr (kPart % 2 == 0) convert_scale<(kPart >> 1)>();
      Piece ahead = load<kPart>(0, 0);
#pragma unroll
      for (int n = 0; n < 2 * kRows; ++n) {
        const Piece piece = ahead;
        if (n + 1 < 2 * kRows) ahead = load<kPart>((n + 1) / 2, (n + 1) % 2);
        const uint32_t offset = latent_offset(kPart, n / 2, n % 2);
        set_shared(latent + offset, convert_latent(piece.first, piece.factors));
        set_shared((latent ^ 16) + offset, convert_latent(piece.last, piece.factors));
      }
      if constexpr (kPart % 2 == 1) {
        uint4 rope_part[kRows];
#pragma unroll
        for (int i = 0; i < kRows; ++i) rope_part[i] = shared_u32x4(rope + row_offset(kPart, i));
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          const uint32_t factors = __shfl_sync(~0u, rope_multiplier, i * kLatentTiles, kLanesPerRow);
          set_shared(rope + row_offset(kPart, i), convert_rope(rope_part[i], factors));
        }
      }
      __syncwarp();
      mbarrier_arrive_if(threadIdx.x % 32 == 0, barriers.full(kPart >> 1, kPart & 1));
    }

    __device__ void copy_any(int k) {
      const int step = k >> 1;
      switch (k & 3) {
        case 0: return copy<0>(step);
        case 1: return copy<1>(step);
        case 2: return copy<2>(step);
        default: return copy<3>(step);
      }
    }
    // Starts the copies of part k, and of those behind it that are free.
    template <int kPart>
    __device__ void copy_ahead(int k, int parts, int& copied) {
      if (copied == k) {
        mbarrier_wait(empty(k), parity(k));
        copy<kPart>(k >> 1);
        ++copied;
      }
      while (copied < parts && is_free(copied)) copy_any(copied++);
    }
    template <int kPart>
    __device__ void fill_part(int k, int parts, int& copied) {
      copy_ahead<kPart>(k, parts, copied);
      wait_for_copies(copied - k - 1);
      convert<kPart>();
    }
  };

  __device__ void fill(const SparseMlaParams& p, int page_shift, Entries& next, int steps, uint32_t base,
                       const Barriers& barriers, uint32_t& uses) const {
    const QueryLoader<kProducers> queries(p, base);
    queries.copy(next.item);
    Walk walk(p, barriers, next, base, uses, page_shift);
    const int parts = 2 * steps;
    int copied = 0;
    // The first keys are on their way before the queries are converted.
    if (parts > 0) walk.copy_ahead<0>(0, parts, copied);
    queries.convert(barriers.item_full());
    for (int k = 0; k < parts; k += 2) {
      walk.fill_part<0>(k, parts, copied);
      walk.fill_part<1>(k + 1, parts, copied);
      if ((k += 2) >= parts) break;
      walk.fill_part<2>(k, parts, copied);
      walk.fill_part<3>(k + 1, parts, copied);
    }
    uses ^= (static_cast<uint32_t>(steps + 1) >> 1 & 1) | (static_cast<uint32_t>(steps) >> 1 & 1) << 1;
  }
};

}  // namespace sm90
}  // namespace sparse_cp_ops
