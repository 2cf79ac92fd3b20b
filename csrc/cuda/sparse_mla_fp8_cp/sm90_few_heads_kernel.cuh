// Few heads: the kernel and its launch. A block a multiprocessor; with a split list a cluster of blocks per row and
// head group, one item a block.
#pragma once

#include <algorithm>

#include "sm90_few_heads_join.cuh"
#include "sm90_few_heads_producer.cuh"

namespace sparse_cp_ops {
namespace few_heads {

template <class S>
__global__ __launch_bounds__(S::kThreads, 1) void attend(SparseMlaParams p, KeySplit split, int page_shift,
                                                         int64_t items) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t memory[];
  const uint32_t base = shared_address(memory);
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < S::kSlots; ++slot) {
      mbarrier_init(S::full(base, slot), 1);
      mbarrier_init(S::empty(base, slot), kWarpgroup / 32);
      set_shared(S::mask(base, slot), kNoTag << kTagShift);
    }
    fence_mbarrier_init();
  }
  __syncthreads();
  if (threadIdx.x < S::kConsumers) {
    raise_registers<S::kConsumerRegisters>();
    consume<S>(p, split, items, base);
  } else {
    lower_registers<S::kProducerRegisters>();
    produce<S>(p, split, page_shift, items, base);
  }
#endif
}

template <class S>
void launch(const SparseMlaParams& p, const KeySplit& split, const DeviceArch& arch, int32_t device_index,
            cudaStream_t stream) {
  allow_shared_bytes<attend<S>>(device_index, S::kSharedBytes);
  const int64_t items = p.rows * split.parts * (p.heads / S::kHeads);
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {static_cast<unsigned>(split.parts), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = static_cast<unsigned>(split.parts == 1 ? std::min<int64_t>(items, arch.multiprocessors) : items);
  config.blockDim = S::kThreads;
  config.dynamicSmemBytes = S::kSharedBytes;
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = split.parts == 1 ? 0 : 1;
  check_cuda(cudaLaunchKernelEx(&config, attend<S>, p, split, page_shift_of(p.page_size), items),
             "sparse_mla_fp8_cp: Hopper kernel for few heads");
}

}  // namespace few_heads
}  // namespace sparse_cp_ops
