from torch import Tensor


def write_cache_store(
    mla_cache: Tensor,
    indexer_cache: Tensor | None,
    page_ids: Tensor,
    store_slots: Tensor,
    mla_store: Tensor,
    indexer_store: Tensor | None,
) -> None:
    """See :func:`sparse_cp_ops.ops.write_cache_store`."""
    for page, slot in zip(page_ids.tolist(), store_slots.tolist(), strict=True):
        if 0 <= page < len(mla_cache) and 0 <= slot < len(mla_store):
            mla_store[slot] = mla_cache[page]
            if indexer_cache is not None and indexer_store is not None:
                indexer_store[slot] = indexer_cache[page]
