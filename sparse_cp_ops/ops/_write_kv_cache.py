from torch import Tensor

from sparse_cp_ops.ops import direct
from sparse_cp_ops.ops._fake import register_fake
from sparse_cp_ops.ops._types import require_optional_tensors, require_tensors


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
    """Scatter R gathered records to their places in the paged caches.

    The place of a row is ``block_table[req_id, position // page_size] * page_size + position % page_size``, or its
    entry of ``slots``. Rows are dropped, and touch no memory, whose req_id is outside [0, B) (pads), whose position is
    outside the table, whose page or slot is outside the cache, or whose slot is negative. Two rows on one slot: either
    of them, whole.

    Args:
        mla_records: [R, 656] or [S, L, 656] uint8 with R = S * L, last dimension contiguous, 16-byte aligned, other
            strides multiples of 16 bytes: views of the gathered bytes are read in place.
        k_records: [R, 132] or [S, L, 132] uint8, 4-byte aligned, strides multiples of 4 bytes; None, together with
            ``indexer_cache``, for layers without an indexer.
        req_ids: [R] int32, -1 for pads.
        positions: [R] int32, request-local.
        block_table: [B, pages] int32, negative where there is no page; row stride free.
        mla_cache: [num_pages, page_size, 656] uint8, page_size 16, 32, 64 or 128; page stride free. Written.
        indexer_cache: [num_pages, page_size * 132] uint8: the values of all tokens of a page, then their scales;
            page stride free. Written.
        slots: [R] int64 physical slots, -1 skips; instead of ``req_ids``, ``positions`` and ``block_table``.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: dtype, device, shape or stride does not fit, or a group of arguments is half given; with
            SPARSE_CP_OPS_CHECK=1 also a row that is no pad and has no place (row, request, position and value named).
        RuntimeError: an argument requires grad in grad mode.
    """
    require_tensors("write_kv_cache", mla_records=mla_records, mla_cache=mla_cache)
    require_optional_tensors(
        "write_kv_cache",
        k_records=k_records,
        req_ids=req_ids,
        positions=positions,
        block_table=block_table,
        indexer_cache=indexer_cache,
        slots=slots,
    )
    direct.write_kv_cache(mla_records, k_records, req_ids, positions, block_table, mla_cache, indexer_cache, slots)


@register_fake("write_kv_cache")
def _fake(
    mla_records: Tensor,
    k_records: Tensor | None,
    req_ids: Tensor | None,
    positions: Tensor | None,
    block_table: Tensor | None,
    mla_cache: Tensor,
    indexer_cache: Tensor | None,
    slots: Tensor | None = None,
) -> None:
    return None
