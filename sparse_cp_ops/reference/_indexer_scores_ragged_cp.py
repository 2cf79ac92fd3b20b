import torch
from torch import Tensor

INDEX_DIM = 128
RECORD_BYTES = INDEX_DIM + 4


def indexer_scores_ragged_cp(
    q_fp8: Tensor,
    q_weights: Tensor,
    indexer_cache: Tensor,
    block_table: Tensor,
    req_ids: Tensor,
    kv_lens: Tensor,
    width: int,
    precision: str = "fp32",
) -> Tensor:
    """See :func:`sparse_cp_ops.ops.indexer_scores_ragged_cp`; computed in fp64 whatever the precision."""
    pages, page_bytes = indexer_cache.shape
    page_size = page_bytes // RECORD_BYTES
    values = indexer_cache[:, : page_size * INDEX_DIM].reshape(pages, page_size, INDEX_DIM)
    keys = values.view(torch.float8_e4m3fn).double()
    scales = indexer_cache[:, page_size * INDEX_DIM :].contiguous().view(torch.float32).double()
    scores = q_weights.new_full((q_fp8.shape[0], width), -torch.inf)
    lengths = visible_keys(block_table, req_ids, kv_lens, page_size)
    for row, (request, length) in enumerate(zip(req_ids.tolist(), lengths, strict=True)):
        count = min(length, width)
        if count == 0:
            continue
        page_ids = block_table[request, : -(-count // page_size)].long()
        exists = (page_ids >= 0) & (page_ids < pages)
        row_keys = keys.new_full((len(page_ids), page_size, INDEX_DIM), torch.nan)
        row_scales = scales.new_full((len(page_ids), page_size), torch.nan)
        row_keys[exists] = keys[page_ids[exists]]
        row_scales[exists] = scales[page_ids[exists]]
        query = q_fp8[row].view(torch.float8_e4m3fn).double()
        dots = torch.relu(query @ row_keys.reshape(-1, INDEX_DIM)[:count].T)  # torch.relu passes NaN on
        scores[row, :count] = (row_scales.reshape(-1)[:count] * (q_weights[row].double() @ dots)).float()
    return scores


def visible_keys(block_table: Tensor, req_ids: Tensor, kv_lens: Tensor, page_size: int) -> list[int]:
    """Number of keys that each row sees: 0 for a pad, else kv_len cut to what the block table can hold."""
    requests, table_width = block_table.shape
    is_pad = (req_ids < 0) | (req_ids >= requests)
    lengths: list[int] = kv_lens.clamp(0, table_width * page_size).masked_fill(is_pad, 0).tolist()
    return lengths
