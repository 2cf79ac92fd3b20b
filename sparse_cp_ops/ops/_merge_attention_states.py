from torch import Tensor

from sparse_cp_ops.ops import direct
from sparse_cp_ops.ops._fake import register_fake
from sparse_cp_ops.ops._types import require_tensors


def merge_attention_states(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Merge P partial attention states over disjoint key sets into the state over their union.

    ``lse = logsumexp_p(lses)``, ``out = sum_p exp(lses[p] - lse) * outs[p]``, accumulated in fp32.
    A state with lse -inf weighs nothing, whatever its ``outs`` hold; if all are -inf the result is 0 and -inf.
    A NaN lse gives NaN in that row and head.

    Args:
        outs: [P, L, H, D] bfloat16 or float32, contiguous.
        lses: [P, L, H] float32, natural logarithm, contiguous.

    Returns:
        out [L, H, D] in the dtype of ``outs`` and lse [L, H] float32.

    Raises:
        TypeError: an argument is not a tensor.
        ValueError: dtype, device, shape or stride does not fit.
        RuntimeError: an argument requires grad in grad mode.
    """
    require_tensors("merge_attention_states", outs=outs, lses=lses)
    out, lse = direct.merge_attention_states(outs, lses)
    return out, lse


@register_fake("merge_attention_states")
def _fake(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    return outs.new_empty(outs.shape[1:]), lses.new_empty(lses.shape[1:])
