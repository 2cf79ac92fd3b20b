"""Registers the fake kernels: what torch.compile and meta tensors run instead of the kernels."""

import functools
from collections.abc import Callable
from typing import Any

import torch

HOST_STORES = ("mla_store", "indexer_store")  # may lie on the host beside CUDA caches


def register_fake(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator of the fake kernel of an op.

    torch sends a call to it as soon as one argument is a meta tensor, the others real ones or not. A fake kernel would
    answer with results that nobody wrote, so it first refuses tensors of different devices, as the real kernels do.
    """
    names = [argument.name for argument in getattr(torch.ops.sparse_cp_ops, name).default._schema.arguments]

    def decorate(fake: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fake)
        def checked(*args: Any, **kwargs: Any) -> Any:
            _require_one_device(dict(zip(names, args, strict=False)) | kwargs)
            return fake(*args, **kwargs)

        torch.library.register_fake(f"sparse_cp_ops::{name}", checked)
        return checked

    return decorate


def _require_one_device(arguments: dict[str, Any]) -> None:
    tensors = {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}
    like = next(name for name in tensors if name not in HOST_STORES)
    device = tensors[like].device
    for name, tensor in tensors.items():
        host_store = name in HOST_STORES and device.type == "cuda" and tensor.device.type == "cpu"
        if tensor.device != device and not host_store:
            raise ValueError(f"{name}: expected device {device} (that of {like}), got {tensor.device}")
