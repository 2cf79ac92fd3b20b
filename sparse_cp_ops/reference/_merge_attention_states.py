import torch
from torch import Tensor


def merge_attention_states(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """See :func:`sparse_cp_ops.ops.merge_attention_states`; computed in fp64."""
    if outs.shape[0] == 0:
        return outs.new_zeros(outs.shape[1:]), lses.new_full(lses.shape[1:], -torch.inf)
    peak = lses.double().amax(0)
    shift = torch.where(torch.isinf(peak), torch.zeros_like(peak), peak)
    weights = torch.exp(lses.double() - shift).unsqueeze(-1)
    total = weights.sum(0)
    states = torch.where(weights == 0, torch.zeros_like(outs, dtype=torch.float64), outs.double())
    out = (weights * states).sum(0) / torch.where(total == 0, torch.ones_like(total), total)
    return out.to(outs.dtype), (shift + torch.log(total.squeeze(-1))).float()
