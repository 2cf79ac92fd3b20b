from torch import Tensor

from sparse_cp_ops.ops import direct
from sparse_cp_ops.ops._fake import register_fake
from sparse_cp_ops.ops._types import require_optional_tensors, require_tensors


def write_cache_store(
    mla_cache: Tensor,
    indexer_cache: Tensor | None,
    page_ids: Tensor,
    store_slots: Tensor,
    mla_store: Tensor,
    indexer_store: Tensor | None,
) -> None:
    """Copy pages of one layer's caches to slots of a store: page ``page_ids[i]`` to slot ``store_slots[i]``.

    A pair with an id outside its tensor is skipped. Targets must differ: a slot that is named twice may end up with
    parts of both pages. The store is on the caches' device, or, beside CUDA caches, in pinned host memory, which the
    kernel writes directly; the copy is done when the stream has passed it.

    Args:
        mla_cache: [num_pages, page_size, 656] uint8, page_size 16, 32, 64 or 128; pages contiguous, page stride a
            multiple of 16 bytes.
        indexer_cache: [num_pages, page_size * 132] uint8, strides likewise; None, together with ``indexer_store``,
            for layers without an indexer.
        page_ids: [n] int32.
        store_slots: [n] int64.
        mla_store: [num_slots, page_size, 656] uint8, strides likewise. Written.
        indexer_store: [num_slots, page_size * 132] uint8, strides likewise. Written.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: dtype, device, shape or stride does not fit, only one indexer tensor is given, or the store is in
            host memory that is not pinned beside CUDA caches; with SPARSE_CP_OPS_CHECK=1 also for an id that is
            neither -1 nor in its tensor, and for a target that is named twice.
        RuntimeError: an argument requires grad in grad mode.
    """
    require_tensors(
        "write_cache_store", mla_cache=mla_cache, page_ids=page_ids, store_slots=store_slots, mla_store=mla_store
    )
    require_optional_tensors("write_cache_store", indexer_cache=indexer_cache, indexer_store=indexer_store)
    direct.write_cache_store(mla_cache, indexer_cache, page_ids, store_slots, mla_store, indexer_store)


@register_fake("write_cache_store")
def _fake(
    mla_cache: Tensor,
    indexer_cache: Tensor | None,
    page_ids: Tensor,
    store_slots: Tensor,
    mla_store: Tensor,
    indexer_store: Tensor | None,
) -> None:
    return None
