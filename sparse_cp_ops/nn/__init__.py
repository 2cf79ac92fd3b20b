"""Modules that put the ops into a model: the attention layer, its parts, and the paged cache."""

from sparse_cp_ops.context_parallel import init_user_buffers_environment
from sparse_cp_ops.kv_cache import PagedKvCache
from sparse_cp_ops.nn.indexer import Indexer
from sparse_cp_ops.nn.inputs import AttentionInputs
from sparse_cp_ops.nn.mla_attention import MlaAttention
from sparse_cp_ops.nn.mla_config import MlaConfig, YarnScaling, mla_softmax_scale
from sparse_cp_ops.nn.rope import build_cos_sin_cache
from sparse_cp_ops.nn.sparse_mla import (
    KvRecords,
    PendingKvWrite,
    SparseMlaCpImpl,
    SparseMlaFp8CPOp,
    SparseMlaImpl,
    get_mla_impl,
)
from sparse_cp_ops.nn.unquantised import UnquantisedKvCache

__all__ = [
    "AttentionInputs",
    "Indexer",
    "KvRecords",
    "MlaAttention",
    "MlaConfig",
    "PagedKvCache",
    "PendingKvWrite",
    "SparseMlaCpImpl",
    "SparseMlaFp8CPOp",
    "SparseMlaImpl",
    "UnquantisedKvCache",
    "YarnScaling",
    "build_cos_sin_cache",
    "get_mla_impl",
    "init_user_buffers_environment",
    "mla_softmax_scale",
]
