"""The lightning indexer: which keys each row attends to."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sparse_cp_ops.context_parallel.plan import CpPlan
from sparse_cp_ops.kv_cache import PagedKvCache
from sparse_cp_ops.nn.linear_fp32 import linear_fp32
from sparse_cp_ops.nn.mla_config import MlaConfig
from sparse_cp_ops.nn.sparse_mla import require_current, require_indexer_pages
from sparse_cp_ops.ops import direct
from sparse_cp_ops.reference._quant_q_k_cp import transform_qk

# Of the LayerNorm over the keys; the models' code fixes it, their configs don't hold it.
K_NORM_EPS = 1e-6


class Indexer(nn.Module):
    """Projections, quantisation and top-k of one layer's indexer; parameters are named as in Hugging Face models.

    ``score[i, j] = k_scale[j] * sum_h weights[i, h] * relu(q[i, h] . k[j])`` (DeepSeek-V3.2-Exp, inference/model.py).
    One precision drives how queries are encoded and how they are scored. L = local rows, Hi = index heads.
    """

    def __init__(
        self, mla_config: MlaConfig, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.mla_config = mla_config
        # Of attend_new_rows, in its order; read once, because each field of a config costs the host.
        self.settings = (
            mla_config.indexer_interleaved,
            mla_config.index_weight_scale,
            mla_config.q_absmax,
            mla_config.scale_format,
            mla_config.index_topk,
            mla_config.workspace_bytes,
            mla_config.precision,
        )
        heads, dim = mla_config.index_n_heads, mla_config.index_head_dim
        self.wq_b = nn.Linear(mla_config.q_lora_rank, heads * dim, bias=False, device=device, dtype=dtype)
        self.wk = nn.Linear(mla_config.hidden_size, dim, bias=False, device=device, dtype=dtype)
        self.k_norm = nn.LayerNorm(dim, eps=K_NORM_EPS, device=device, dtype=dtype)
        self.weights_proj = nn.Linear(mla_config.hidden_size, heads, bias=False, device=device, dtype=torch.float32)

    def project_queries(self, q_resid: Tensor) -> Tensor:
        """Queries before RoPE.

        Args:
            q_resid: [L, q_lora_rank], the query latent after its norm.

        Returns:
            [L, Hi, 128] in the dtype of the weights.
        """
        return self.wq_b(q_resid).view(-1, self.mla_config.index_n_heads, self.mla_config.index_head_dim)  # type: ignore[no-any-return]

    def project_keys(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Keys before RoPE, and the weights of the heads.

        Args:
            hidden: [L, hidden_size].

        Returns:
            k [L, 128] in the dtype of the weights, weights float32 [L, Hi].
        """
        # fp32 whatever the parameters are stored in: the weights decide between keys of close scores.
        return self.k_norm(self.wk(hidden)), linear_fp32(hidden, self.weights_proj.weight)

    def apply_rope_and_rotate_q_k_cp(
        self, q: Tensor, k: Tensor, positions: Tensor, cos_sin_cache: Tensor
    ) -> tuple[Tensor, Tensor]:
        """RoPE and, in a quantising model, the Hadamard rotation: what :meth:`quant_q_k_cp` does ahead of FP8.

        In plain PyTorch, for the unquantised path and for looking inside; :meth:`quant_q_k_cp` takes ``q`` and ``k`` as
        the projections return them and does everything in one kernel.

        Args:
            q: [L, Hi, 128].
            k: [L, 128].
            positions: int32 [L].
            cos_sin_cache: float32 [max_positions, 64].

        Returns:
            q and k in float32, the same shapes.
        """
        config = self.mla_config
        rotated = [
            transform_qk(x.float(), positions, cos_sin_cache, config.indexer_interleaved, config.quantise)
            for x in (q, k)
        ]
        return rotated[0], rotated[1]

    def quant_q_k_cp(
        self, q: Tensor, k: Tensor, weights: Tensor, positions: Tensor, cos_sin_cache: Tensor, k_records: Tensor
    ) -> tuple[Tensor, Tensor]:
        """RoPE, Hadamard and FP8 of queries and keys, see :func:`sparse_cp_ops.ops.quant_q_k_cp`.

        Args:
            q: bf16 [L, Hi, 128].
            k: bf16 [L, 128].
            weights: float32 [L, Hi].
            positions: int32 [L].
            cos_sin_cache: float32 [max_positions, 64].
            k_records: uint8 [L, 132], written.

        Returns:
            q_fp8 uint8 [L, Hi, 128] and q_weights float32 [L, Hi], all scales in them.
        """
        config = self.mla_config
        q_fp8, q_weights = direct.quant_q_k_cp(
            q,
            k,
            weights,
            positions,
            cos_sin_cache,
            k_records,
            config.indexer_interleaved,
            True,  # Hadamard
            config.index_weight_scale,
            config.scale_format,
            config.q_absmax,
        )
        return q_fp8, q_weights

    def _get_topk_ragged_cp(
        self, q_fp8: Tensor, q_weights: Tensor, cache: PagedKvCache, layer_id: int, plan: CpPlan
    ) -> Tensor:
        """The picks of this rank's rows among prefix and new keys; the layer's keys are in the cache by now.

        Args:
            q_fp8: uint8 [L, Hi, 128].
            q_weights: float32 [L, Hi].
            cache: the model's caches.
            layer_id: which layer's pages to read.
            plan: the forward's plan.

        Returns:
            int32 [L, index_topk], request-local positions, ascending, then -1.

        Raises:
            ValueError: a missing or stale plan, or a layer without indexer pages.
        """
        plan = require_current(plan)
        cache.require_layer(layer_id)
        pages, block_table = require_indexer_pages(cache, layer_id, plan)
        config = self.mla_config
        picks: Tensor = direct.indexer_topk_ragged_cp(
            q_fp8,
            q_weights,
            pages,
            block_table,
            plan.req_ids,
            plan.kv_lens,
            config.index_topk,
            config.workspace_bytes,
            config.precision,
        )
        return picks
