"""The attention layer's steps in plain PyTorch, without FP8 and Hadamard: what the kernels do, at full precision.

For comparisons with a reference (``MlaConfig.quantise=False``), not for speed: scores and attention weights of a
request are dense matrices, and lengths are read on the host.
"""

import torch
from torch import Tensor

from sparse_cp_ops.context_parallel.plan import CpPlan
from sparse_cp_ops.nn.mla_config import INDEX_HEAD_DIM, KV_LORA_RANK, ROPE_DIM


class UnquantisedKvCache:
    """Paged caches of unquantised values, addressed like those of ``PagedKvCache``; RoPE parts hold rotated values.

    Attributes:
        mla: a list, [num_pages, page_size, 576] a layer.
        indexer: a list, [num_pages, page_size, 128] a layer.
    """

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        page_size: int = 64,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.page_size = page_size
        self.num_pages = num_pages
        shapes = [(num_pages, page_size, width) for width in (KV_LORA_RANK + ROPE_DIM, INDEX_HEAD_DIM)]
        with torch.inference_mode(False):
            self.mla, self.indexer = (
                [torch.zeros(shape, device=device, dtype=dtype) for _ in range(num_layers)] for shape in shapes
            )


def rotate(x: Tensor, positions: Tensor, cos_sin_cache: Tensor, interleaved: bool) -> Tensor:
    """RoPE of x [L, ..., rope_dim], layout kept: pairs (2i, 2i+1) when interleaved, else (i, i + half)."""
    half = cos_sin_cache.shape[-1] // 2
    angles = cos_sin_cache[positions.long()].view(len(x), *[1] * (x.ndim - 2), 2 * half)
    cos, sin = angles.split(half, dim=-1)
    pairs = x.to(torch.promote_types(x.dtype, angles.dtype)).unflatten(-1, (half, 2) if interleaved else (2, half))
    a, b = pairs.unbind(-1 if interleaved else -2)
    rotated = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1 if interleaved else -2)
    return rotated.flatten(-2)


def write_rows(values: Tensor, pages: Tensor, plan: CpPlan) -> None:
    """Scatter the gathered rows' values [S*L, width] into pages [num_pages, page_size, width]; pads are skipped."""
    page_size = pages.shape[1]
    kept = plan.gathered_req_ids >= 0
    requests, positions = plan.gathered_req_ids[kept].long(), plan.gathered_positions[kept].long()
    page_ids = _block_table(plan)[requests, positions // page_size].long()
    pages[page_ids, positions % page_size] = values[kept].to(pages.dtype)


def select_topk(q: Tensor, weights: Tensor, pages: Tensor, plan: CpPlan, topk: int) -> Tensor:
    """Exact top-k of ``sum_h weights[i, h] * relu(q[i, h] . k[j])``, as i32 [L, topk]: ascending positions, then -1.

    Args:
        q: f32 [L, Hi, 128], rotated.
        weights: f32 [L, Hi], with every scale in them.
        pages: indexer pages of an UnquantisedKvCache.
        plan: whose rows those of q are.
        topk: width of the result.
    """
    picks = torch.full((len(q), topk), -1, dtype=torch.int32, device=q.device)
    for request, of_request, length in _requests(plan):
        keys = _read_request(pages, plan, request, length).to(q.dtype)
        scores = torch.einsum("ihd,jd->ihj", q[of_request], keys).relu()
        ranked = torch.einsum("ih,ihj->ij", weights[of_request], scores)
        visible = torch.arange(length, device=q.device) < plan.kv_lens[of_request, None]
        ranked = ranked.masked_fill(~visible, -torch.inf)
        # A stable descending sort: ties go to the smaller position.
        order = ranked.sort(dim=-1, descending=True, stable=True).indices[:, :topk]
        chosen = torch.where(visible.gather(1, order), order, length).sort(dim=-1).values
        picks[of_request, : chosen.shape[1]] = torch.where(chosen < length, chosen, -1).int()
    return picks


def attend(q: Tensor, pages: Tensor, indices: Tensor, plan: CpPlan, softmax_scale: float) -> Tensor:
    """Absorbed attention over the listed keys: q [L, H, 576] -> [L, H, 512]; rows without a key give zeros."""
    out = q.new_zeros(*q.shape[:2], KV_LORA_RANK)
    for request, of_request, length in _requests(plan):
        keys = _read_request(pages, plan, request, length).to(q.dtype)
        listed = indices[of_request]
        chosen = torch.zeros(len(listed), length + 1, dtype=torch.bool, device=q.device)
        chosen.scatter_(1, torch.where(listed >= 0, listed, length).long(), True)
        logits = torch.einsum("ihd,jd->ihj", q[of_request], keys) * softmax_scale
        logits = logits.masked_fill(~chosen[:, None, :length], -torch.inf)
        out[of_request] = logits.softmax(dim=-1) @ keys[:, :KV_LORA_RANK]
    return out


def _read_request(pages: Tensor, plan: CpPlan, request: int, length: int) -> Tensor:
    """The first ``length`` tokens of a request, [length, width]."""
    count = -(-length // pages.shape[1])
    return pages[_block_table(plan)[request, :count].long()].flatten(0, 1)[:length]


def _block_table(plan: CpPlan) -> Tensor:
    if plan.block_table is None:
        raise ValueError("plan: expected one with a block_table, got None")
    return plan.block_table


def _requests(plan: CpPlan) -> list[tuple[int, Tensor, int]]:
    """Every request with a row: its number, the numbers of its rows, the tokens its longest row sees."""
    found = []
    for request in range(plan.num_requests):
        of_request = (plan.req_ids == request).nonzero().flatten()
        if len(of_request):
            found.append((request, of_request, int(plan.kv_lens[of_request].max())))
    return found
