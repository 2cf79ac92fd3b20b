// The Hopper kernel: one persistent block a multiprocessor, two consumer warpgroups and one or two that produce.
#pragma once

#include <algorithm>

#include "sm90_consumer.cuh"
#include "sm90_producer.cuh"

namespace sparse_cp_ops {
namespace sm90 {

template <class Source>
inline constexpr int kThreads = kConsumers + Source::kProducers;

template <class Source, bool kMayMix>
__global__ __launch_bounds__(kThreads<Source>, 1) void attend(SparseMlaParams p, KeySplit split, Source source,
                                                              int page_shift, int64_t items) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  if (source.may_mix() != kMayMix) return;
  extern __shared__ __align__(1024) uint8_t memory[];
  const uint32_t base = shared_address(memory);
  const Barriers barriers{base + kBarrierOffset};
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; ++i) {
      for (int part = 0; part < 2; ++part) {
        mbarrier_init(barriers.full(i, part), Source::kArrivals);
        for (int quarter = 0; quarter < kQuarters; ++quarter)
          mbarrier_init(barriers.empty(i, part, quarter), kWarpgroup / 32);
      }
      mbarrier_init(barriers.weights(i), kWarpgroup);
    }
    mbarrier_init(barriers.item_full(), Source::kProducers);
    mbarrier_init(barriers.item_empty(), kConsumers / 32);
  }
  __syncthreads();
  if (threadIdx.x < kConsumers) {
    raise_registers<kConsumerRegisters>();
    consume<kMayMix>(p, split, items, base);
  } else {
    lower_registers<kProducerRegisters<Source::kProducers>>();
    produce(p, split, source, page_shift, items, base);
  }
#endif
}

template <class Source, bool kMayMix>
void launch(const SparseMlaParams& p, const KeySplit& split, const Source& source, const DeviceArch& arch,
            int32_t device_index, cudaStream_t stream) {
  allow_shared_bytes<attend<Source, kMayMix>>(device_index, kSharedBytes);
  const int64_t items = p.rows * split.parts * (p.heads / kHeads);
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(items, arch.multiprocessors));
  attend<Source, kMayMix>
      <<<blocks, kThreads<Source>, kSharedBytes, stream>>>(p, split, source, page_shift_of(p.page_size), items);
  check_launch("sparse_mla_fp8_cp: Hopper kernel");
}

}  // namespace sm90

}  // namespace sparse_cp_ops
