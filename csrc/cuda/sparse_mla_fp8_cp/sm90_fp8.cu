// precision="fp8" on Hopper: the kernel, one persistent block a multiprocessor, and its launch.
#include <algorithm>

#include "../device/bulk_copy.cuh"
#include "sm90_fp8_producer.cuh"
#include "sm90_fp8_scores.cuh"
#include "sm90_fp8_values.cuh"

namespace sparse_cp_ops {
namespace fp8_mode {

__global__ __launch_bounds__(kThreads, 1) void attend(SparseMlaParams p, KeySplit split, int page_shift,
                                                      int64_t items) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t memory[];
  const uint32_t base = shared_address(memory);
  const Barriers barriers{base + kBarrierOffset};
  if (threadIdx.x == 0) {
    for (int tile = 0; tile < kTiles; ++tile) {
      mbarrier_init(barriers.full(tile), kWarpgroup);
      mbarrier_init(barriers.message(tile), kWarpgroup);
      mbarrier_init(barriers.empty(tile), kValueWarps);
    }
    for (int slot = 0; slot < 2; ++slot) {
      mbarrier_init(barriers.item_full(slot), 1);
      mbarrier_init(barriers.item_empty(slot), kConsumerWarps);
    }
  }
  __syncthreads();
  const int warpgroup = threadIdx.x / kWarpgroup;
  if (warpgroup < kScorer) {
    raise_registers<kValueRegisters>();
    add_values(p, split, items, base);
  } else if (warpgroup == kScorer) {
    raise_registers<kScoreRegisters>();
    score(p, split, items, base);
  } else {
    lower_registers<kProducerRegisters>();
    produce(p, split, page_shift, items, base);
  }
#endif
}

}  // namespace fp8_mode

void launch_sm90_fp8(const SparseMlaParams& p, const KeySplit& split, const DeviceArch& arch, int32_t device_index,
                     cudaStream_t stream) {
  allow_shared_bytes<fp8_mode::attend>(device_index, fp8_mode::kSharedBytes);
  const int64_t items = p.rows * split.parts * (p.heads / sm90::kHeads);
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(items, arch.multiprocessors));
  fp8_mode::attend<<<blocks, fp8_mode::kThreads, fp8_mode::kSharedBytes, stream>>>(p, split, page_shift_of(p.page_size),
                                                                                   items);
  check_launch("sparse_mla_fp8_cp: Hopper kernel for precision=fp8");
}

}  // namespace sparse_cp_ops
