// What becomes of a lane's scores: stored, or listed if they reach the row's threshold.
#pragma once

#include "sm90_ring.cuh"

namespace sparse_cp_ops {

// Stores every score at its place in the sweep.
struct StoreSink {
  static constexpr bool kStoresAll = true;
  float* out;  // of this lane's row and first key
  int end;     // behind the row's last key; 0 without a row

  __device__ __forceinline__ StoreSink(const Sm90ScoreTask& task, int slot, int in_tile, int end_)
      : out(task.scores + slot * task.score_stride + in_tile), end(end_) {}
  __device__ __forceinline__ void put(int tile, int which, float score, int key) {
    if (key < end) out[static_cast<int64_t>(tile) * kTileKeys + which * kLaneKeyDistance] = score;
  }
  __device__ __forceinline__ void finish() const {}
};

// Appends the scores that reach the row's threshold to this lane's list. Predicated instructions instead of branches:
// see KeyRing.
struct ListSink {
  static constexpr bool kStoresAll = false;  // a row's lists belong to one warpgroup
  Survivor* entries;
  int* count_out;
  int count, last_place;  // a list that is full counts on, and its last place no longer matters
  float threshold;
  int end;

  __device__ __forceinline__ ListSink(const Sm90ScoreTask& task, int slot, int in_tile, int end_)
      : count(0), last_place(task.lists.capacity - 1), end(end_) {
    const int lane = in_tile / 16 * 8 + in_tile % 8;  // of the 32 that share the row; it sees two keys of a tile
    const int list = (slot + kBlockRows * static_cast<int>(blockIdx.x)) * SurvivorLists::kLanes + lane;
    entries = task.lists.entries + static_cast<int64_t>(list) * task.lists.capacity;
    count_out = task.lists.counts + list;
    threshold = end > 0 ? task.lists.thresholds[slot] : INFINITY;
  }
  __device__ __forceinline__ void put(int, int, float score, int key) {
    asm volatile(
        "{\n.reg .pred seen, taken;\n.reg .b32 place;\n.reg .b64 at;\n"
        "setp.lt.s32 seen, %4, %5;\nsetp.ge.and.f32 taken, %3, %6, seen;\n"
        "min.s32 place, %0, %1;\nmad.wide.s32 at, place, 8, %2;\n"
        "@taken st.global.v2.b32 [at], {%7, %4};\n@taken add.s32 %0, %0, 1;\n}"
        : "+r"(count)
        : "r"(last_place), "l"(entries), "f"(score), "r"(key), "r"(end), "f"(threshold), "r"(__float_as_int(score))
        : "memory");
  }
  __device__ __forceinline__ void finish() const {
    asm volatile("{\n.reg .pred row;\nsetp.gt.s32 row, %2, 0;\n@row st.global.b32 [%0], %1;\n}" ::"l"(count_out),
                 "r"(count), "r"(end)
                 : "memory");
  }
};

}  // namespace sparse_cp_ops
