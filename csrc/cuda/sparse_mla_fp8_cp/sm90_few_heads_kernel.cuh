// Few heads: the kernel and its launch. A block a multiprocessor; with a split list a cluster of blocks per row and
// head group, one item a block.
#pragma once

#include <algorithm>

#include "../device/chained_launch.cuh"
#include "sm90_few_heads_join.cuh"
#include "sm90_few_heads_producer.cuh"

namespace sparse_cp_ops {
namespace few_heads {

// Registers of a thread, from those that it was launched with.
template <int kRegisters, int kBefore>
__device__ __forceinline__ void set_registers() {
  if constexpr (kRegisters > kBefore) raise_registers<kRegisters>();
  else if constexpr (kRegisters < kBefore) lower_registers<kRegisters>();
}

template <class S>
__global__ __launch_bounds__(S::kThreads, 1) void attend(SparseMlaParams p, KeySplit split, int page_shift,
                                                         int64_t items) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t memory[];
  const uint32_t base = shared_address(memory);
  const int thread = threadIdx.x;
  if (thread < S::kSlots) {
    mbarrier_init(S::full(base, thread), 1);
    mbarrier_init(S::empty(base, thread), S::kAdderThreads / 32);
  } else if (thread >= 32 && thread < 32 + S::kScorers) {
    mbarrier_init(S::weights_full(base, thread - 32), kWarpgroup / 32);
    mbarrier_init(S::weights_empty(base, thread - 32), S::kAdderThreads / 32);
    mbarrier_init(S::settled(base, thread - 32), 1);
  } else if (thread == 64) {
    mbarrier_init(S::final_full(base), 1);
    mbarrier_init(S::stated(base), 1);
    mbarrier_init(S::joined(base), 1);
    mbarrier_init(S::final_empty(base), S::kAdderThreads / 32);
  }
  if (thread < 96) fence_mbarrier_init();
  __syncthreads();
  wait_for_earlier_kernels();
  if (split.parts > 1) cluster_arrive();
  if (threadIdx.x < S::kScorerThreads) {
    set_registers<S::kScorerRegisters, S::kLaunchRegisters>();
    score<S>(p, split, items, base);
    if (split.parts > 1) cluster_wait();
  } else if (threadIdx.x < S::kScorerThreads + S::kAdderThreads) {
    set_registers<S::kAdderRegisters, S::kLaunchRegisters>();
    add<S>(p, split, items, base);
  } else {
    lower_registers<S::kProducerRegisters>();
    produce<S>(p, split, page_shift, items, base);
    if (split.parts > 1) cluster_wait();
  }
#endif
}

template <class S>
void allow_cluster(int32_t device_index, int64_t blocks) {
  allow_shared_bytes<attend<S>>(device_index, S::kSharedBytes);
  if (blocks > 8)  // not on every device that has clusters
    check_cuda(cudaFuncSetAttribute(attend<S>, cudaFuncAttributeNonPortableClusterSizeAllowed, 1), "large clusters");
}

template <class S>
void launch(const SparseMlaParams& p, const KeySplit& split, const DeviceArch& arch, int32_t device_index,
            cudaStream_t stream) {
  allow_cluster<S>(device_index, split.parts);
  const int64_t items = p.rows * split.parts * (p.heads / S::kHeads);
  const LaunchShape shape{split.parts == 1 ? std::min<int64_t>(items, arch.multiprocessors) : items, S::kThreads,
                          S::kSharedBytes, static_cast<int>(split.parts)};
  launch_chained("sparse_mla_fp8_cp: Hopper kernel for few heads", attend<S>, shape, device_index, stream, p, split,
                 page_shift_of(p.page_size), items);
}

// Clusters of so many blocks that the device runs at the same time; 0 if it runs none.
template <class S>
int count_clusters(int32_t device_index, int blocks) {
  allow_cluster<S>(device_index, blocks);
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {static_cast<unsigned>(blocks), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = static_cast<unsigned>(blocks);
  config.blockDim = S::kThreads;
  config.dynamicSmemBytes = S::kSharedBytes;
  config.attrs = &cluster;
  config.numAttrs = 1;
  int clusters = 0;
  if (cudaOccupancyMaxActiveClusters(&clusters, attend<S>, &config) == cudaSuccess) return clusters;
  cudaGetLastError();  // a size that it doesn't know
  return 0;
}

}  // namespace few_heads
}  // namespace sparse_cp_ops
