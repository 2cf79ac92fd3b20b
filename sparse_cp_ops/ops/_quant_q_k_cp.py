import torch
from torch import Tensor

from sparse_cp_ops.ops import direct
from sparse_cp_ops.ops._fake import register_fake
from sparse_cp_ops.ops._types import require_bools, require_floats, require_strs, require_tensors


def quant_q_k_cp(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    k_records: Tensor,
    interleaved: bool,
    hadamard: bool,
    weight_scale: float,
    scale_format: str,
    q_absmax: float = 448.0,
) -> tuple[Tensor, Tensor]:
    """Indexer q and k of the local rows, ready for scoring: RoPE, Hadamard and FP8 in one pass.

    RoPE rotates the first ``rope_dim`` of the 128 dimensions, the Walsh-Hadamard transform (Sylvester order) is scaled
    by 128^-0.5, and each vector gets one scale; everything in fp32 until the FP8 value, without bf16 in between.
    ``scale = max(amax, 1e-4) / absmax`` with absmax 448 for k and ``q_absmax`` for q, rounded up to a power of two for
    "ue8m0". A vector with NaN or inf (or at a position outside the table) gets scale 1 and bytes 0x7F (NaN).

    Args:
        q: [L, Hi, 128] bfloat16 before RoPE, last dimension contiguous, other strides free.
        k: [L, 128] bfloat16 after LayerNorm, before RoPE, last dimension contiguous.
        weights: [L, Hi] bfloat16 or float32, last dimension contiguous.
        positions: [L] int32, contiguous.
        cos_sin_cache: [max_positions, rope_dim] float32, contiguous; rope_dim even, at most 128.
        k_records: [L, 132] uint8, row stride a multiple of 4 bytes. Written: 128 e4m3fn bytes, then the fp32 scale.
        interleaved: pairs (2i, 2i+1), else (i, i + rope_dim/2).
        hadamard: apply the transform.
        weight_scale: usually ``128**-0.5 * Hi**-0.5``; rounded to float32 first.
        scale_format: "ue8m0" or "fp32".
        q_absmax: in (0, 448], rounded to float32 first; 0.875 for ``precision="f16"`` of the scores.

    Returns:
        q_fp8 [L, Hi, 128] uint8 (e4m3fn) and q_weights [L, Hi] float32 = ``weights * q_scale * weight_scale``.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: dtype, device, shape, stride or value does not fit; with SPARSE_CP_OPS_CHECK=1 also a position
            outside the table.
        RuntimeError: an argument requires grad in grad mode.
    """
    require_tensors(
        "quant_q_k_cp",
        q=q,
        k=k,
        weights=weights,
        positions=positions,
        cos_sin_cache=cos_sin_cache,
        k_records=k_records,
    )
    require_bools("quant_q_k_cp", interleaved=interleaved, hadamard=hadamard)
    require_floats("quant_q_k_cp", weight_scale=weight_scale, q_absmax=q_absmax)
    require_strs("quant_q_k_cp", scale_format=scale_format)
    q_fp8, q_weights = direct.quant_q_k_cp(
        q, k, weights, positions, cos_sin_cache, k_records, interleaved, hadamard, weight_scale, scale_format, q_absmax
    )
    return q_fp8, q_weights


@register_fake("quant_q_k_cp")
def _fake(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    k_records: Tensor,
    interleaved: bool,
    hadamard: bool,
    weight_scale: float,
    scale_format: str,
    q_absmax: float = 448.0,
) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape, dtype=torch.uint8), q.new_empty(q.shape[:2], dtype=torch.float32)
