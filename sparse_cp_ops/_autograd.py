"""Inference only: in grad mode an input that requires grad is refused instead of losing its gradient silently."""

from collections.abc import Callable
from typing import Any

import torch

OP_NAMES = (
    "rope_",
    "quant_q_k_cp",
    "pack_mla_kv",
    "write_kv_cache",
    "dequantize_kv",
    "indexer_topk_ragged_cp",
    "indexer_scores_ragged_cp",
    "sparse_mla_fp8_cp",
    "attend_new_rows",
    "merge_attention_states",
    "expand_cp_plan",
    "write_cache_store",
    "read_cache_store",
)

_library = torch.library.Library("sparse_cp_ops", "IMPL")


def refuse_grad(op: torch._ops.OpOverload) -> Callable[..., Any]:
    """The kernel for the Autograd key of an op without a derivative."""
    names = [argument.name for argument in op._schema.arguments]
    mutated = [
        (i, argument.name)
        for i, argument in enumerate(op._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            for name, value in (*zip(names, args, strict=False), *kwargs.items()):
                if isinstance(value, torch.Tensor) and value.requires_grad:
                    raise RuntimeError(
                        f"{op.namespace}.{op._opname} is inference only, but {name} requires grad: "
                        "call it under torch.no_grad() or torch.inference_mode(), or detach the argument"
                    )
        with torch._C._AutoDispatchBelowAutograd():
            result = op(*args, **kwargs)
        for i, name in mutated:
            value = args[i] if i < len(args) else kwargs.get(name)
            if value is not None and not value.is_inference():
                torch.autograd.graph.increment_version(value)
        return result

    return kernel


for _name in OP_NAMES:
    _op = getattr(torch.ops.sparse_cp_ops, _name).default
    _library.impl(_name, refuse_grad(_op), "Autograd")
