"""Every op on CUDA at small shapes, each of its kernels at least once: what ``make sanitize`` runs.

Prints one line a call. Torch's caching allocator must be off (PYTORCH_NO_CUDA_MEMORY_CACHING=1), so that the tool sees
every tensor as an allocation of its own.
"""

import argparse
import os
from collections.abc import Callable, Iterator
from typing import Any

import attention_cases
import indexer_cases
import torch
from op_samples import sample

from sparse_cp_ops import ops
from sparse_cp_ops._autograd import OP_NAMES

Call = tuple[str, Callable[..., Any], tuple[Any, ...]]


def samples() -> Iterator[Call]:
    """The shared samples: every op, few rows and enough rows for the variants that want many."""
    for name in OP_NAMES:
        for count in (1, 10, 37):
            yield f"{name} {count} rows", getattr(torch.ops.sparse_cp_ops, name), sample(name, "cuda", count)
    mla, index, pages, slots, *stores = sample("write_cache_store", "cuda")
    pinned = [store.cpu().pin_memory() for store in stores]
    yield "write_cache_store pinned", ops.write_cache_store, (mla, index, pages, slots, *pinned)
    yield "read_cache_store pinned", ops.read_cache_store, (*pinned, slots, pages, mla, index)


def record_ops() -> Iterator[Call]:
    """Head counts and row counts at which the record ops change their kernel."""
    angles = torch.rand(64, 32, device="cuda")
    table = torch.cat([angles.cos(), angles.sin()], 1)
    for count, heads in ((3, 64), (300, 32), (300, 64), (5000, 32)):
        position = torch.randint(0, 64, (count,), device="cuda", dtype=torch.int32)
        q = torch.randn(count, heads, 128, device="cuda").bfloat16()
        k = torch.randn(count, 128, device="cuda").bfloat16()
        weights = torch.randn(count, heads, device="cuda")
        records = torch.zeros(count, 132, dtype=torch.uint8, device="cuda")
        for interleaved, q_absmax in ((False, 448.0), (True, 0.875)):
            arguments = (q, k, weights, position, table, records, interleaved, True, 0.03, "fp32", q_absmax)
            yield f"quant_q_k_cp {count} rows, {heads} heads", ops.quant_q_k_cp, arguments
        strided = torch.randn(count, heads, 576, device="cuda").bfloat16()[..., 512:]
        for interleaved in (False, True):
            arguments = (strided, position, table, interleaved)
            yield f"rope_ {count} rows, {heads} heads", ops.rope_, arguments
    count = 17_000
    shapes = ((count, 656), (count, 132), (300, 64, 656), (300, 64 * 132))
    mla, index, mla_cache, index_cache = (torch.zeros(s, dtype=torch.uint8, device="cuda") for s in shapes)
    slots = torch.randperm(300 * 64)[:count].cuda()
    arguments = (mla, index, None, None, None, mla_cache, index_cache, slots)
    yield f"write_kv_cache {count} rows", ops.write_kv_cache, arguments


def attention() -> Iterator[Call]:
    """Each tile of heads, equal and unequal scales, one part and several, few rows and many."""
    for heads in (8, 16, 32, 64, 128):
        for scale_kind in ("ue8m0", "fp32"):
            for count, width in ((3, 512), (70, 128)):
                lists = [(0, 300, min(width, 250)), (1, 90, 65), (-1, 0, 0)]
                case = attention_cases.random_case((lists * count)[:count], heads, width, scale_kind=scale_kind)
                for batch_invariant in (True, False):
                    arguments = (*case.to("cuda").tensors, 0.05, "high", batch_invariant)
                    yield (
                        f"sparse_mla_fp8_cp {heads} heads, {scale_kind}, {count} rows, {batch_invariant=}",
                        ops.sparse_mla_fp8_cp,
                        arguments,
                    )


def indexer() -> Iterator[Call]:
    """Narrow and wide block tables, few rows and many, both precisions, a small workspace."""
    shapes = {
        "narrow": [(0, 500 + n) for n in range(40)] + [(1, 70), (-1, 0)],
        "few rows of many keys": [(0, 20_000), (1, 17_001), (-1, 0)],
    }
    if os.environ.get("SPARSE_CP_OPS_ARCH") != "portable":  # which has no path of its own for them
        shapes["many rows of many keys"] = [(0, 16_500 + n % 7) for n in range(1030)]
    for shape, rows in shapes.items():
        for heads, precision in ((8, "fp32"), (64, "fp32"), (32, "f16")):
            case = indexer_cases.random_case(rows, heads)
            case = (case.encoded_for_f16() if precision == "f16" else case).to("cuda")
            for workspace in (0, 2**20):
                arguments = (*case.tensors, 256, workspace, precision)
                yield (
                    f"indexer_topk_ragged_cp {shape}, {heads} heads, {precision}, workspace {workspace}",
                    ops.indexer_topk_ragged_cp,
                    arguments,
                )
            if shape != "many rows of many keys":
                arguments = (*case.tensors, 600, precision)
                yield (
                    f"indexer_scores_ragged_cp {shape}, {heads} heads, {precision}",
                    ops.indexer_scores_ragged_cp,
                    arguments,
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--match", default="", help="only calls whose line contains this text")
    match = parser.parse_args().match
    torch.manual_seed(0)
    calls = 0
    for group in (samples, record_ops, attention, indexer):
        for name, call, arguments in group():
            if match in name:
                print(name, flush=True)
                call(*arguments)
                torch.cuda.synchronize()
                calls += 1
    print(f"{calls} calls")


if __name__ == "__main__":
    main()
