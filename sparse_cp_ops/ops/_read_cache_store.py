from torch import Tensor

from sparse_cp_ops.ops import direct
from sparse_cp_ops.ops._fake import register_fake
from sparse_cp_ops.ops._types import require_optional_tensors, require_tensors


def read_cache_store(
    mla_store: Tensor,
    indexer_store: Tensor | None,
    store_slots: Tensor,
    page_ids: Tensor,
    mla_cache: Tensor,
    indexer_cache: Tensor | None,
) -> None:
    """Copy slots of a store to pages of one layer's caches: slot ``store_slots[i]`` to page ``page_ids[i]``.

    The inverse of :func:`write_cache_store`, with the same rules for ids, strides, devices and errors; here the caches
    are written, and page ids must differ.

    Args:
        mla_store: [num_slots, page_size, 656] uint8.
        indexer_store: [num_slots, page_size * 132] uint8; None, together with ``indexer_cache``, for layers without
            an indexer.
        store_slots: [n] int64.
        page_ids: [n] int32.
        mla_cache: [num_pages, page_size, 656] uint8. Written.
        indexer_cache: [num_pages, page_size * 132] uint8. Written.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`write_cache_store`.
    """
    require_tensors(
        "read_cache_store", mla_store=mla_store, store_slots=store_slots, page_ids=page_ids, mla_cache=mla_cache
    )
    require_optional_tensors("read_cache_store", indexer_store=indexer_store, indexer_cache=indexer_cache)
    direct.read_cache_store(mla_store, indexer_store, store_slots, page_ids, mla_cache, indexer_cache)


@register_fake("read_cache_store")
def _fake(
    mla_store: Tensor,
    indexer_store: Tensor | None,
    store_slots: Tensor,
    page_ids: Tensor,
    mla_cache: Tensor,
    indexer_cache: Tensor | None,
) -> None:
    return None
