from torch import Tensor

from sparse_cp_ops.ops import direct
from sparse_cp_ops.ops._fake import register_fake
from sparse_cp_ops.ops._types import require_bools, require_strs, require_tensors


def pack_mla_kv(
    compressed_kv: Tensor,
    k_pe: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    records: Tensor,
    interleaved: bool,
    scale_format: str,
) -> None:
    """Write the 656-byte MLA record of each row: FP8 latent with 4 scales, rotated k_pe in bf16.

    Per tile of 128 values ``scale = max(amax, 1e-4) / 448``, rounded up to a power of two for "ue8m0"; values are
    divided by it in fp32, rounded to nearest even and saturated to +-448. A tile with NaN or inf gets scale 1 and
    bytes 0x7F (NaN). k_pe is rotated in fp32 and rounded to bf16 once; it is NaN at a position outside the table.

    Args:
        compressed_kv: [L, 512] bfloat16 after kv_a_layernorm, last dimension contiguous, row stride free.
        k_pe: [L, 64] bfloat16 before RoPE, last dimension contiguous, row stride free.
        positions: [L] int32, contiguous.
        cos_sin_cache: [max_positions, 64] float32, contiguous: 32 cosines, then 32 sines.
        records: [L, 656] uint8, 16-byte aligned, row stride a multiple of 16 bytes. Written.
        interleaved: pairs (2i, 2i+1), else (i, i + 32).
        scale_format: "ue8m0" or "fp32".

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: dtype, device, shape, stride or value does not fit; with SPARSE_CP_OPS_CHECK=1 also a position
            outside the table.
        RuntimeError: an argument requires grad in grad mode.
    """
    require_tensors(
        "pack_mla_kv",
        compressed_kv=compressed_kv,
        k_pe=k_pe,
        positions=positions,
        cos_sin_cache=cos_sin_cache,
        records=records,
    )
    require_bools("pack_mla_kv", interleaved=interleaved)
    require_strs("pack_mla_kv", scale_format=scale_format)
    direct.pack_mla_kv(compressed_kv, k_pe, positions, cos_sin_cache, records, interleaved, scale_format)


@register_fake("pack_mla_kv")
def _fake(
    compressed_kv: Tensor,
    k_pe: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    records: Tensor,
    interleaved: bool,
    scale_format: str,
) -> None:
    return None
