from torch import Tensor


def read_cache_store(
    mla_store: Tensor,
    indexer_store: Tensor | None,
    store_slots: Tensor,
    page_ids: Tensor,
    mla_cache: Tensor,
    indexer_cache: Tensor | None,
) -> None:
    """See :func:`sparse_cp_ops.ops.read_cache_store`."""
    for page, slot in zip(page_ids.tolist(), store_slots.tolist(), strict=True):
        if 0 <= page < len(mla_cache) and 0 <= slot < len(mla_store):
            mla_cache[page] = mla_store[slot]
            if indexer_cache is not None and indexer_store is not None:
                indexer_cache[page] = indexer_store[slot]
