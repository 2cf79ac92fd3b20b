"""Modules that put the ops into a model: the attention layer, its parts, and the paged cache."""

from sparse_cp_ops.nn.mla_config import MlaConfig, YarnScaling, mla_softmax_scale
from sparse_cp_ops.nn.rope import build_cos_sin_cache

__all__ = [
    "MlaConfig",
    "YarnScaling",
    "build_cos_sin_cache",
    "mla_softmax_scale",
]
