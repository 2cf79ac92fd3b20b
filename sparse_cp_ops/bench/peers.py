"""Kernels of other packages beside ours, where they can be imported; otherwise their columns stay empty.

They are looked for as installed packages (``flash_mla``, ``deep_gemm``, ``flashinfer``) and in the folder that
SPARSE_CP_OPS_PEERS names: released builds unpacked side by side, with FlashMLA's and DeepGEMM's as a vLLM wheel
carries them (``vllm/_flashmla_C.abi3.so``, ``vllm/third_party/deep_gemm``).
"""

import functools
import importlib
import importlib.metadata
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Runners = list[Callable[[], object]]  # run one after the other; their times add up


def _peer_folder() -> Path | None:
    folder = os.environ.get("SPARSE_CP_OPS_PEERS")
    if folder is None:
        return None
    path = Path(folder)
    if not path.is_dir():
        raise SystemExit(f"SPARSE_CP_OPS_PEERS: no folder {folder!r}")
    return path


# Packages that bring the peers along.
DISTRIBUTIONS = ("vllm", "flash_mla", "deep_gemm", "flashinfer_python")


def versions() -> dict[str, str]:
    """Those of the packages that can be found, without importing them."""
    folder = _peer_folder()
    places = [*([str(folder)] if folder else []), *sys.path]
    found: dict[str, str] = {}
    for package in importlib.metadata.distributions(path=places):
        name = str(package.metadata["Name"]).lower().replace("-", "_")
        if name in DISTRIBUTIONS:
            found.setdefault(name, package.version)  # the first one in the search order is imported
    return found


def _module(name: str) -> Any | None:
    try:
        return importlib.import_module(name)
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        print(f"peer {name}: not used ({type(error).__name__}: {str(error)[:120]})", file=sys.stderr)
        return None


def _flash_mla_ops() -> Any | None:
    folder = _peer_folder()
    library = folder / "vllm" / "_flashmla_C.abi3.so" if folder else None
    if library is None or not library.is_file():
        return None
    torch.ops.load_library(str(library))
    return torch.ops._flashmla_C


@dataclass(frozen=True)
class Peers:
    """What was found. Each method returns named runners, none where a peer is missing.

    Nothing of a peer runs before its runner is called: first calls compile for minutes.
    """

    flash_mla: Any | None = None  # torch.ops namespace of a released build
    flash_mla_package: Any | None = None
    deep_gemm: Any | None = None
    flashinfer: Any | None = None

    def sparse_mla(
        self, q: Tensor, cache: Tensor, slots: Tensor, bf16_kv: Tensor, scale: float, queries: int = 1
    ) -> dict[str, Runners]:
        """q [L,H,576] bf16, cache [pages,page,656] u8, slots [L,K] i32 physical, bf16_kv [tokens,576].

        Rows are ``queries`` neighbours of a request each. Other kernels want 64 or 128 heads: fewer are padded.
        """
        if q.shape[1] < 64:
            q = torch.nn.functional.pad(q, (0, 0, 0, 64 - q.shape[1]))
        rows, heads, _ = q.shape
        requests = rows // queries
        q_decode, paged = q.view(requests, queries, heads, 576), cache.view(torch.float8_e4m3fn).unsqueeze(2)
        decode_slots, kv = slots.view(requests, queries, -1), bf16_kv.unsqueeze(1)
        prefill_slots = slots.unsqueeze(1)
        if self.flash_mla is not None:
            ops, state = self.flash_mla, {"meta": None, "splits": None}

            def fp8_kernel() -> object:
                out, lse, state["meta"], state["splits"] = ops.sparse_decode_fwd(
                    q_decode, paged, decode_slots, None, None, state["meta"], state["splits"],
                    None, None, None, 512, scale, None,
                )  # fmt: skip
                return out, lse

            return {
                "FlashMLA bf16 prefill": [
                    lambda: ops.sparse_prefill_fwd(q, kv, prefill_slots, scale, 512, None, None, None)
                ],
                "FlashMLA FP8": [fp8_kernel],
            }
        if self.flash_mla_package is not None:
            package = self.flash_mla_package
            return {"FlashMLA bf16 prefill": [lambda: package.flash_mla_sparse_fwd(q, kv, prefill_slots, scale)]}
        return {}

    def indexer(
        self, q8: Tensor, k8: Tensor, k_scale: Tensor, weights: Tensor, kv_lens: Tensor, topk: int
    ) -> dict[str, Runners]:
        """q8 [L,Hi,128] and k8 [S,128] u8, k_scale [S], weights [L,Hi] f32, kv_lens [L] i32: scores, then top-k."""
        if self.deep_gemm is None:
            return {}
        gemm, q, k = self.deep_gemm, q8.view(torch.float8_e4m3fn), k8.view(torch.float8_e4m3fn)
        start = torch.zeros_like(kv_lens)

        def scores() -> Tensor:
            return gemm.fp8_mqa_logits(q, (k, k_scale), weights, start, kv_lens, False)  # type: ignore[no-any-return]

        if self.flashinfer is None:
            return {"DeepGEMM scores": [scores]}
        infer = self.flashinfer

        @functools.cache
        def logits() -> Tensor:  # rows are padded; the copy is left out of the peers' time
            return scores().contiguous()

        def select(deterministic: bool) -> object:
            return infer.top_k_ragged_transform(logits(), start, kv_lens, topk, deterministic=deterministic)

        return {
            "DeepGEMM + FlashInfer top-k": [scores, lambda: select(False)],
            "DeepGEMM + FlashInfer deterministic top-k": [scores, lambda: select(True)],
        }

    def indexer_decode(
        self, q8: Tensor, cache: Tensor, weights: Tensor, block_table: Tensor, kv_lens: Tensor, topk: int
    ) -> dict[str, Runners]:
        """Paged scores of two queries a request, then top-k; the scores' schedule is made once, outside the time.

        q8 [2B,Hi,128] u8, cache [pages,64*132] u8, weights [2B,Hi] f32, block_table [B,pages] i32, kv_lens [2B] i32.
        """
        if self.deep_gemm is None or self.flashinfer is None:
            return {}
        gemm, infer = self.deep_gemm, self.flashinfer
        q = q8.view(torch.float8_e4m3fn).view(-1, 2, *q8.shape[1:])
        pages, lengths = cache.view(cache.shape[0], 64, 1, 132), kv_lens.view(-1, 2)
        longest = int(kv_lens.max())
        processors = torch.cuda.get_device_properties(q8.device).multi_processor_count

        @functools.cache
        def schedule() -> Tensor:
            return gemm.get_paged_mqa_logits_metadata(lengths, 64, processors)  # type: ignore[no-any-return]

        def scores() -> Tensor:
            return gemm.fp8_paged_mqa_logits(  # type: ignore[no-any-return]
                q, pages, weights, lengths, block_table, schedule(), longest, False
            )

        @functools.cache
        def logits() -> Tensor:  # rows are padded; the copy is left out of the peers' time
            return scores().contiguous()

        start = torch.zeros_like(kv_lens)

        def select(deterministic: bool) -> object:
            return infer.top_k_ragged_transform(logits(), start, kv_lens, topk, deterministic=deterministic)

        return {
            "DeepGEMM paged + FlashInfer top-k": [scores, lambda: select(False)],
            "DeepGEMM paged + FlashInfer deterministic top-k": [scores, lambda: select(True)],
        }


def find_peers() -> Peers:
    """Look the peers up once a process; what is missing is named on stderr."""
    if folder := _peer_folder():
        sys.path[:0] = [str(folder / "vllm" / "third_party"), str(folder)]
    flash_mla = _flash_mla_ops()
    return Peers(
        flash_mla,
        None if flash_mla is not None else _module("flash_mla"),
        _module("deep_gemm"),
        _module("flashinfer"),
    )
