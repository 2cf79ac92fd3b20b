import torch
from torch import Tensor


def write_kv_cache(
    mla_records: Tensor,
    k_records: Tensor | None,
    req_ids: Tensor | None,
    positions: Tensor | None,
    block_table: Tensor | None,
    mla_cache: Tensor,
    indexer_cache: Tensor | None,
    slots: Tensor | None = None,
) -> None:
    """See :func:`sparse_cp_ops.ops.write_kv_cache`; of two rows on one slot the later one stays."""
    num_pages, page_size, _ = mla_cache.shape
    if slots is None:
        assert req_ids is not None
        assert positions is not None
        assert block_table is not None
        requests, width = block_table.shape
        column = positions.long().div(page_size, rounding_mode="floor")
        has_page = (req_ids >= 0) & (req_ids < requests) & (positions >= 0) & (column < width)
        page = torch.full_like(column, -1)
        page[has_page] = block_table[req_ids.long()[has_page], column[has_page]].long()
        slots = torch.where(page < 0, -1, page * page_size + positions % page_size)
    for row, slot in enumerate(slots.tolist()):
        if not 0 <= slot < num_pages * page_size:
            continue
        page_id, offset = divmod(slot, page_size)
        mla_cache[page_id, offset] = mla_records.reshape(-1, 656)[row]
        if k_records is not None and indexer_cache is not None:
            record = k_records.reshape(-1, 132)[row]
            indexer_cache[page_id, offset * 128 : (offset + 1) * 128] = record[:128]
            scale_start = page_size * 128 + offset * 4
            indexer_cache[page_id, scale_start : scale_start + 4] = record[128:]
