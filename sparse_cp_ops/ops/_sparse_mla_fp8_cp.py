import torch
from torch import Tensor

from sparse_cp_ops.ops import direct
from sparse_cp_ops.ops._fake import register_fake
from sparse_cp_ops.ops._types import (
    require_bools,
    require_floats,
    require_optional_tensors,
    require_strs,
    require_tensors,
)


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
    """Absorbed MLA of every row over its own list of keys, read from the FP8 paged cache.

    ``logits = softmax_scale * (q[:512] . k[:512] + q[512:] . k_rope)``; the values are ``k[:512]``. The bytes of the
    cache are dequantised on the way; products are summed in fp32.

    Index lists: any order, an index listed twice counts twice, unusable entries are skipped. With ``block_table`` the
    indices are positions of the row's request, used iff ``0 <= index < kv_lens[i]`` and the position has a page in the
    cache; a row whose ``req_ids`` entry is outside [0, B) is a pad. Without it they are physical slots
    (``page * page_size + offset``), used iff inside the cache.

    A row with no usable key gives out 0 and lse -inf; so do logits that are all -inf. A listed record or a query with
    a NaN, or a logit of +inf, gives NaN in that row's out and lse, nowhere else.

    Against fp64 over the dequantised cache (``precision="high"``): out within ``1e-3 + 2.01/128 * |out|`` and a cosine
    difference of 5e-6, lse within ``1e-5 + 8.01/65536 * |lse|``.

    Args:
        q: [L, H, 576] bfloat16, H = 8, 16, 32, 64 or 128; [absorbed latent part 512 | RoPE part 64], RoPE applied.
            Last dimension contiguous, other strides free (views are read in place).
        kv_cache: [num_pages, page_size, 656] uint8, page_size 16, 32, 64 or 128 (docs/kv_record.md). Pages may be
            spaced by any multiple of 16 bytes.
        indices: [L, K] int32, K a multiple of 64; -1 marks a hole.
        block_table: [B, W] int32 or None; page of tokens [i*page_size, (i+1)*page_size), negative: no page.
        req_ids: [L] int32 or None; None exactly if ``block_table`` is.
        kv_lens: [L] int32 or None; None exactly if ``block_table`` is.
        softmax_scale: factor of the logits, finite.
        precision: "high", or "fp8": a declared lower-precision mode (norm of the error below 0.1 of the result's, lse
            within 0.18 * |softmax_scale| * max_j norm(q * k_j) over the latent dimensions) that a device may answer
            in "high"; the CPU does.
        batch_invariant: True: a row's result depends on that row alone, bit for bit. False: a device may split the keys
            of few rows differently; results are still the same from run to run.

    Returns:
        out [L, H, 512] bfloat16 and lse [L, H] float32, the natural-log sum of exponentials of the logits.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: dtype, device, shape, stride or value does not fit. With SPARSE_CP_OPS_CHECK=1 also request ids and
            lengths out of range, a listed position below ``kv_lens`` that has no page, or a slot outside the cache.
        RuntimeError: an argument requires grad in grad mode.
    """
    require_tensors("sparse_mla_fp8_cp", q=q, kv_cache=kv_cache, indices=indices)
    require_optional_tensors("sparse_mla_fp8_cp", block_table=block_table, req_ids=req_ids, kv_lens=kv_lens)
    require_floats("sparse_mla_fp8_cp", softmax_scale=softmax_scale)
    require_strs("sparse_mla_fp8_cp", precision=precision)
    require_bools("sparse_mla_fp8_cp", batch_invariant=batch_invariant)
    out, lse = direct.sparse_mla_fp8_cp(
        q, kv_cache, indices, block_table, req_ids, kv_lens, softmax_scale, precision, batch_invariant
    )
    return out, lse


@register_fake("sparse_mla_fp8_cp")
def _fake(
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
    rows, heads = q.shape[:2]
    return q.new_empty((rows, heads, 512)), q.new_empty((rows, heads), dtype=torch.float32)
