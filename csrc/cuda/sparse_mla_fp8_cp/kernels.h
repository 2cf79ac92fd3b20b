// Launchers of sparse_mla_fp8_cp on CUDA; each heavy instantiation has a source file of its own.
#pragma once

#include <cuda_runtime.h>

#include "../../ops/sparse_mla_fp8_cp.h"
#include "../arch.h"

namespace sparse_cp_ops {

// Split-KV: part s of a row handles the entries [s * width, (s + 1) * width) of its list. One part writes the results
// themselves, more parts write partial states that merge_parts() joins.
struct KeySplit {
  int64_t parts = 1;
  int64_t width = 0;             // list entries of a part, a multiple of 64
  float* partial_out = nullptr;  // [parts, rows, heads, 512]
  float* partial_lse = nullptr;  // [parts, rows, heads]
};

struct PortableTile {
  int heads;          // heads of a block
  int blocks_per_sm;  // that run at the same time
};

// The tile that the portable kernel uses for this head count on this device.
PortableTile portable_tile(const DeviceArch& arch, int64_t heads);

void launch_portable(const SparseMlaParams& p, const KeySplit& split, const DeviceArch& arch, int32_t device_index,
                     cudaStream_t stream);
void launch_portable_16(const SparseMlaParams& p, const KeySplit& split, int32_t device_index, cudaStream_t stream);
void launch_portable_32(const SparseMlaParams& p, const KeySplit& split, int32_t device_index, cudaStream_t stream);
void launch_portable_64(const SparseMlaParams& p, const KeySplit& split, int32_t device_index, cudaStream_t stream);

// Records as 16-bit rows, ready for the tensor core (sm90_tile.cuh): those of each request by position, or, where that
// is less or there is no block table, the whole cache by slot.
struct Workspace {
  int64_t tokens;
  int per_request;  // positions of a request, table_width * page_size; 0: the whole cache
  uint8_t* rows;    // [tokens, 1152]: 512 f16, 64 bf16
  float4* factors;  // [tokens]
  int* mixed;       // not 0: some scale is no power of two
  int* lengths;     // [requests] keys that some row may see; with per_request only, behind `mixed`
};
inline constexpr int64_t kWorkspaceRowBytes = kQkDim * 2;

void fill_workspace(const SparseMlaParams& p, const Workspace& workspace, const DeviceArch& arch, cudaStream_t stream);

// The Hopper kernel, 64 or 128 heads. Both forms give the same bits: keys from a workspace, or from the records.
void launch_sm90(const SparseMlaParams& p, const KeySplit& split, const Workspace& workspace, const DeviceArch& arch,
                 int32_t device_index, cudaStream_t stream);
void launch_sm90_direct(const SparseMlaParams& p, const KeySplit& split, const DeviceArch& arch, int32_t device_index,
                        cudaStream_t stream);

// Both products in e4m3 (precision="fp8"), 64 or 128 heads, keys from the records.
void launch_sm90_fp8(const SparseMlaParams& p, const KeySplit& split, const DeviceArch& arch, int32_t device_index,
                     cudaStream_t stream);

// The Hopper kernel for few heads: 8, 16 or 32 a block, which divide p.heads. The split's parts are the blocks of a
// cluster and join in the launch: no partial states.
inline constexpr int64_t kFewHeads = 32, kFewHeadsParts = 16;  // at most
// Of a list: a block of 32 heads has room for the states of so many.
constexpr int64_t few_heads_parts(int64_t heads) { return heads == 32 ? 8 : kFewHeadsParts; }

struct FewHeadsChoice {
  int64_t heads;  // of a block
  KeySplit split;
};

// What takes the least time for this shape on this device. Another choice changes bits, so batch-invariant rows have
// one part and all heads in a block.
FewHeadsChoice choose_few_heads(const SparseMlaParams& p, const DeviceArch& arch, int32_t device_index);

// Clusters of so many blocks that the device runs at the same time.
int count_few_heads_clusters(int32_t device_index, int blocks);

void launch_few_heads_8(const SparseMlaParams& p, const KeySplit& split, const DeviceArch& arch, int32_t device_index,
                        cudaStream_t stream);
void launch_few_heads_16(const SparseMlaParams& p, const KeySplit& split, const DeviceArch& arch, int32_t device_index,
                         cudaStream_t stream);
void launch_few_heads_32(const SparseMlaParams& p, const KeySplit& split, const DeviceArch& arch, int32_t device_index,
                         cudaStream_t stream);

void merge_parts(const SparseMlaParams& p, const KeySplit& split, int32_t device_index, cudaStream_t stream);

}  // namespace sparse_cp_ops
