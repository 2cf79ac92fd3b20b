// One thread block a row: a filter if one chunk has all scores, and where it fails radix steps over the scores in
// global memory until winners and undecided fit the list in shared memory, the rest of the bits there.
#include "selection.h"

#include <algorithm>

#include "../arch.h"
#include "../device/chained_launch.cuh"
#include "../indexer_scores_ragged_cp/pieces.cuh"
#include "row_filter.cuh"
#include "selection.cuh"

namespace sparse_cp_ops {
namespace {

constexpr int kListSize = 6144;  // winners (2048 at most) and 4096 undecided: 48 KiB, with the bins 65 KiB a block

struct Scratch : SelectScratch {
  uint32_t ranks[kListSize];
  int32_t positions[kListSize];
};

using FilterScratch = SurvivorScratch<kSelectThreads>;
constexpr int kScratchBytes = std::max<int>(sizeof(Scratch), kFilterBytes<kSelectThreads>);
constexpr int kAhead = 4;  // steps of the filter: what fits the shared memory of compute capability 9.0
template <int AHEAD>
constexpr int kBytes = kScratchBytes + ScoreSteps<kSelectThreads, AHEAD>::kBytes;

// The keys kept from earlier chunks, then the scores of this one: in position order.
struct ChunkSource {
  const uint32_t* kept_ranks;
  const int32_t* kept_positions;
  const float* scores;
  int kept, size, first_key;  // kept is a multiple of 64

  __device__ __forceinline__ void load(int first, uint32_t (&ranks)[kVector]) const {
#pragma unroll
    for (int v = 0; v < kVector; v += 4) {
      if (first < kept) {
        const uint4 four = *reinterpret_cast<const uint4*>(kept_ranks + first + v);
        ranks[v] = four.x, ranks[v + 1] = four.y, ranks[v + 2] = four.z, ranks[v + 3] = four.w;
      } else if (first + v + 4 <= size) {
        const float4 four = *reinterpret_cast<const float4*>(scores + (first - kept) + v);
        ranks[v] = rank_of_score(four.x), ranks[v + 1] = rank_of_score(four.y);
        ranks[v + 2] = rank_of_score(four.z), ranks[v + 3] = rank_of_score(four.w);
      } else {
#pragma unroll
        for (int e = v; e < v + 4; ++e)
          if (first + e < size) ranks[e] = rank_of_score(scores[first - kept + e]);
      }
    }
  }
  __device__ __forceinline__ int position(int i) const { return i < kept ? kept_positions[i] : first_key + i - kept; }
};

struct ListSource {
  const uint32_t* list;
  int size;

  __device__ __forceinline__ void load(int first, uint32_t (&ranks)[kVector]) const {
#pragma unroll
    for (int v = 0; v < kVector; v += 4) {
      const uint4 four = *reinterpret_cast<const uint4*>(list + first + v);  // kListSize is a multiple of kVector
      ranks[v] = four.x, ranks[v + 1] = four.y, ranks[v + 2] = four.z, ranks[v + 3] = four.w;
    }
  }
};

template <int AHEAD>
__device__ void select_row(const SelectTask& task, int slot, void* memory) {
  Scratch& scratch = *static_cast<Scratch*>(memory);
  const int64_t row = row_of(task.rows, slot), at = slot * task.op.topk;
  const int topk = static_cast<int>(task.op.topk);
  const int keys = static_cast<int>(visible_keys(task.op.in, row)), first_key = static_cast<int>(task.first_key);
  int32_t* indices = task.op.indices + row * topk;
  if (keys <= topk) {
    for (int i = threadIdx.x; first_key == 0 && i < topk; i += kSelectThreads) indices[i] = i < keys ? i : -1;
    return;
  }
  if (keys <= first_key) return;
  const bool last = keys <= task.first_key + task.key_count;
  if (last && first_key == 0 && keys <= kFilteredKeys &&
      select_by_filter<kSelectThreads, AHEAD>(task.scores + slot * task.score_stride, keys, topk, indices,
                                              *static_cast<FilterScratch*>(memory),
                                              reinterpret_cast<float4*>(static_cast<char*>(memory) + kScratchBytes)))
    return;
  const int fresh = last ? keys - first_key : static_cast<int>(task.key_count), kept = first_key > 0 ? topk : 0;
  const ChunkSource source{task.before.ranks + at,
                           task.before.positions + at,
                           task.scores + slot * task.score_stride,
                           kept,
                           kept + fresh,
                           first_key};

  Cut cut{0, 0, topk, source.size};
  do cut = narrow(source, cut, scratch);
  while (!cut.settled() && topk - cut.need + cut.undecided > kListSize);

  const auto write = [&](int slot, int position, uint32_t rank) {
    if (last) {
      indices[slot] = position;
    } else {
      task.after.ranks[at + slot] = rank;
      task.after.positions[at + slot] = position;
    }
  };
  if (cut.settled()) {
    compact(source, cut, cut.need, scratch,
            [&](int slot, int i, uint32_t rank) { write(slot, source.position(i), rank); });
    return;
  }
  compact(source, cut, cut.undecided, scratch, [&](int slot, int i, uint32_t rank) {
    scratch.ranks[slot] = rank;
    scratch.positions[slot] = source.position(i);
  });
  const ListSource list{scratch.ranks, topk - cut.need + cut.undecided};
  while (!cut.settled()) cut = narrow(list, cut, scratch);
  compact(list, cut, cut.need, scratch,
          [&](int slot, int i, uint32_t rank) { write(slot, scratch.positions[i], rank); });
}

template <int AHEAD>
__global__ __launch_bounds__(kSelectThreads,
                             AHEAD > 0 ? 1 : 2) void selection_kernel(const __grid_constant__ SelectTask task) {
  extern __shared__ __align__(16) char smem[];
  wait_for_earlier_kernels();
  const int rows = row_count_of(task.rows);
  for (int slot = blockIdx.x; slot < rows; slot += gridDim.x) {
    select_row<AHEAD>(task, slot, smem);
    __syncthreads();  // the next row's writes come after this row's reads
  }
}

template <int AHEAD>
void launch(const SelectTask& task, int64_t blocks, int32_t device, cudaStream_t stream) {
  allow_shared_bytes<selection_kernel<AHEAD>>(device, kBytes<AHEAD>);
  launch_chained("indexer selection", selection_kernel<AHEAD>, {blocks, kSelectThreads, kBytes<AHEAD>}, device, stream,
                 task);
}

}  // namespace

void launch_selection(const SelectTask& task, int32_t device, cudaStream_t stream) {
  if (task.rows.count == 0) return;
  const DeviceArch& arch = device_arch(device);
  const bool filtered =
      task.first_key == 0 && task.key_count >= task.op.in.capacity() && task.key_count <= kFilteredKeys;
  // A row a multiprocessor: it has all the shared memory.
  if (filtered && task.rows.count <= arch.multiprocessors && kBytes<kAhead> <= arch.shared_bytes)
    return launch<kAhead>(task, task.rows.count, device, stream);
  constexpr int64_t kResident = 3;  // blocks a multiprocessor, by shared memory
  launch<0>(task, std::min(task.rows.count, kResident * arch.multiprocessors), device, stream);
}

}  // namespace sparse_cp_ops
