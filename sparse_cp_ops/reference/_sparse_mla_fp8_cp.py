import torch
from torch import Tensor

ROWS_AT_A_TIME = 8  # bounds the fp64 copy of the listed keys: 8 rows x 2048 keys x 576 values are 75 MB


def _records_as_fp64(records: Tensor) -> Tensor:
    """uint8 [..., 656] -> float64 [..., 576], exact: e4m3 * fp32 scale needs 28 bits of mantissa."""
    values = records[..., :512].contiguous().view(torch.float8_e4m3fn).double()
    scales = records[..., 512:528].contiguous().view(torch.float32).double()
    rope = records[..., 528:].contiguous().view(torch.bfloat16).double()
    return torch.cat([values * scales.repeat_interleave(128, dim=-1), rope], dim=-1)


def _slots(
    indices: Tensor,
    block_table: Tensor | None,
    req_ids: Tensor | None,
    kv_lens: Tensor | None,
    page_size: int,
    num_pages: int,
) -> Tensor:
    """int64 [L, K]: physical slot of every entry, -1 where the entry is not used."""
    index = indices.long()
    if block_table is None or req_ids is None or kv_lens is None:
        used = (index >= 0) & (index < num_pages * page_size)
        return torch.where(used, index, -1)
    requests, width = block_table.shape
    if requests == 0 or width == 0:
        return torch.full_like(index, -1)
    request = req_ids.long().unsqueeze(1)
    used = (request >= 0) & (request < requests) & (index >= 0) & (index < kv_lens.unsqueeze(1))
    used &= index < width * page_size
    page = block_table.long()[request.clamp(0, requests - 1), (index // page_size).clamp(0, width - 1)]
    used &= (page >= 0) & (page < num_pages)
    return torch.where(used, page * page_size + index % page_size, -1)


def sparse_mla_fp8_cp(
    q: Tensor,
    kv_cache: Tensor,
    indices: Tensor,
    block_table: Tensor | None,
    req_ids: Tensor | None,
    kv_lens: Tensor | None,
    softmax_scale: float,
    precision: str = "high",
    batch_invariant: bool = True,
) -> tuple[Tensor, Tensor]:
    """See :func:`sparse_cp_ops.ops.sparse_mla_fp8_cp`; computed over the dequantised cache and returned in fp64.

    ``precision`` and ``batch_invariant`` change nothing here: this is the exact value that every mode approximates.
    """
    rows, heads = q.shape[:2]
    num_pages, page_size = kv_cache.shape[:2]
    out = torch.zeros(rows, heads, 512, dtype=torch.float64, device=q.device)
    lse = torch.full((rows, heads), -torch.inf, dtype=torch.float64, device=q.device)
    slots = _slots(indices, block_table, req_ids, kv_lens, page_size, num_pages)
    if num_pages == 0 or indices.shape[1] == 0:
        return out, lse
    for start in range(0, rows, ROWS_AT_A_TIME):
        chunk = slice(start, start + ROWS_AT_A_TIME)
        used = slots[chunk] >= 0
        slot = slots[chunk].clamp(min=0)
        keys = _records_as_fp64(kv_cache[slot // page_size, slot % page_size])
        keys = torch.where(used.unsqueeze(-1), keys, 0.0)  # a NaN behind a hole is not read
        logits = softmax_scale * (q[chunk].double() @ keys.transpose(1, 2))
        logits = torch.where(used.unsqueeze(1), logits, -torch.inf)
        lse[chunk] = torch.logsumexp(logits, dim=-1)
        weights = torch.softmax(logits, dim=-1)
        empty = (logits == -torch.inf).all(-1, keepdim=True)
        out[chunk] = torch.where(empty, 0.0, weights) @ keys[..., :512]
    return out, torch.where(torch.isposinf(lse), torch.nan, lse)
