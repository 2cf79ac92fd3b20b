"""transformers' own attention as the reference of the demo and of the tests: small random models, given picks, FP8.

Nothing here uses this package.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DeepseekV32Config, DeepseekV32ForCausalLM, GlmMoeDsaConfig, GlmMoeDsaForCausalLM

KINDS = {
    "deepseek_v32": (DeepseekV32Config, DeepseekV32ForCausalLM),
    "glm_moe_dsa": (GlmMoeDsaConfig, GlmMoeDsaForCausalLM),
}
# rope_scaling of DeepSeek-V3.2's published config.json
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
# The first three layers of both published models have a dense MLP, so three layers need no experts.
SMALL = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 3,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "index_n_heads": 8,
    "index_topk": 64,
    "max_position_embeddings": 163840,
    "attn_implementation": "sdpa",
}


def small_config(kind: str, **fields: Any) -> Any:
    """A config of the given architecture that runs in milliseconds; RoPE as published, 512 + 64 + 128 as fixed."""
    config_class, _ = KINDS[kind]
    rope = {"rope_parameters": dict(YARN)} if kind == "deepseek_v32" else {}
    return config_class(**{**SMALL, **rope, **fields})


def small_model(kind: str, seed: int = 0, dtype: torch.dtype = torch.float32, **fields: Any) -> Any:
    """A model with random weights, the same for every process that asks with the same arguments."""
    _, model_class = KINDS[kind]
    model = model_class(small_config(kind, **fields)).eval()
    randomise(model, seed)
    return model.to(dtype)


def randomise(module: nn.Module, seed: int = 0) -> None:
    """Weights that keep the size of activations, so that attention and indexer have clear preferences.

    The usual initialisation with 0.02 would make every attention weight of a small model equal.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.ndim >= 2:
                spread = 1.0 if "embed" in name else parameter.shape[-1] ** -0.5
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread)
            elif "norm" in name:
                is_bias = name.endswith("bias")
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1 + (0.0 if is_bias else 1.0))
            else:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)


@torch.no_grad()
def relate_indexers(model: Any) -> None:
    """Let random indexers prefer related tokens, as trained ones do: near ones, and those like the query's own.

    A query becomes the key of its own token plus as much noise. All tokens share a first feature: RoPE turns what keys
    have in common into a preference for near ones, and the heads get positive weights from it.
    """
    model.model.embed_tokens.weight[:, 0] = 16
    for attention in attentions_of(model):
        indexer = attention.indexer
        own_key = indexer.wk.weight @ torch.linalg.pinv(attention.q_a_proj.weight)
        own_key = own_key.repeat(indexer.n_heads, 1)
        noise = indexer.wq_b.weight
        noise.copy_(own_key + noise * (own_key.norm() / noise.norm()))
        indexer.weights_proj.weight[:, 0] = 1


@contextmanager
def given_picks(attentions: Sequence[nn.Module], picks: Sequence[Tensor | None]) -> Iterator[None]:
    """Let transformers' attention modules attend to given keys instead of those of their indexers.

    Args:
        attentions: transformers' modules; those without an indexer take the picks of the one before.
        picks: of each, int [rows, topk] of one sequence, -1 behind the last.
    """
    handles = []
    for attention, chosen in zip(attentions, picks, strict=True):
        if attention.indexer is not None:
            assert chosen is not None
            # An index may be listed twice: the mask that transformers makes of them is the same.
            filled = torch.where(chosen < 0, chosen[:, :1], chosen)
            handles.append(attention.indexer.register_forward_hook(lambda _m, _i, _o, picks=filled: picks[None]))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True)
class IndexerCall:
    """One call of transformers' indexer on one sequence: its picks, int [rows, topk] in no order, and its inputs."""

    picks: Tensor
    indexer: nn.Module
    hidden: Tensor
    query_latent: Tensor
    cos: Tensor
    sin: Tensor

    @torch.no_grad()
    def scores(self) -> Tensor:
        """DeepSeek-V3.2's scores of all keys for all rows in float64, [rows, rows]; keys behind a row included."""
        cos, sin = (table[0, :, None, :32].double() for table in (self.cos, self.sin))  # the halves are equal

        def rotate(x: Tensor) -> Tensor:  # [rows, heads, 128]: pairs (i, i + 32) of the first 64
            a, b, rest = x.split([32, 32, 64], dim=-1)
            return torch.cat(
                [a * cos[..., :32] - b * sin[..., :32], b * cos[..., :32] + a * sin[..., :32], rest], dim=-1
            )

        indexer, weight = self.indexer, {name: p.double() for name, p in self.indexer.named_parameters()}
        hidden = self.hidden.double()
        q = rotate((self.query_latent.double() @ weight["wq_b.weight"].T).unflatten(-1, (indexer.n_heads, -1)))
        k = hidden @ weight["wk.weight"].T
        k = nn.functional.layer_norm(k, k.shape[-1:], weight["k_norm.weight"], weight["k_norm.bias"], 1e-6)
        k = rotate(k[:, None])[:, 0]
        heads = hidden @ weight["weights_proj.weight"].T
        scale = k.shape[-1] ** -0.5 * indexer.n_heads**-0.5
        return sum((q[:, h] @ k.T).relu() * heads[:, h, None] for h in range(indexer.n_heads)) * scale


@contextmanager
def recorded_indexers(attentions: Sequence[nn.Module]) -> Iterator[list[IndexerCall]]:
    """The calls of transformers' own indexers, appended one by one."""
    calls: list[IndexerCall] = []

    def record(indexer: nn.Module, inputs: tuple[Any, ...], picks: Tensor) -> None:
        hidden, query_latent, (cos, sin) = inputs[:3]
        calls.append(IndexerCall(picks[0], indexer, hidden[0], query_latent[0], cos, sin))

    indexers = [attention.indexer for attention in attentions if attention.indexer is not None]
    handles = [indexer.register_forward_hook(record) for indexer in indexers]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def fp8_latents(attentions: Sequence[nn.Module]) -> Iterator[None]:
    """Let transformers' attention see its latents as an FP8 cache holds them, everything else unchanged."""
    handles = [
        attention.kv_a_layernorm.register_forward_hook(lambda _m, _i, latent: round_to_fp8(latent))
        for attention in attentions
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def round_to_fp8(latent: Tensor) -> Tensor:
    """[..., 512] -> the values that a cache record returns: bf16, then e4m3 with one power-of-two scale per 128."""
    tiles = latent.bfloat16().float().unflatten(-1, (-1, 128))
    amax = tiles.abs().amax(dim=-1, keepdim=True).clamp(min=1e-4)
    scale = torch.exp2(torch.ceil(torch.log2(amax / 448)))
    rounded = (tiles / scale).to(torch.float8_e4m3fn).float() * scale
    return rounded.flatten(-2).to(latent.dtype)


def attentions_of(model: Any) -> list[nn.Module]:
    """transformers' attention modules, layer by layer."""
    return [layer.self_attn for layer in model.model.layers]


def all_keys(rows: int, topk: int) -> Tensor:
    """Picks int [rows, max(rows, topk)] of dense causal attention: every key up to the row's own."""
    width = max(rows, topk)
    keys = torch.arange(width).expand(rows, width)
    return torch.where(keys <= torch.arange(rows)[:, None], keys, -1)


def causal_mask(rows: int, dtype: torch.dtype) -> Tensor:
    """The additive mask [1, 1, rows, rows] that transformers' attention modules expect."""
    return torch.full((rows, rows), torch.finfo(dtype).min, dtype=dtype).triu(1)[None, None]


def e4m3_noise() -> float:
    """Root mean square of e4m3's relative rounding error, 0.0255: steps of 2^-3 relative to the power of two below.

    An error u is uniform within half a step, 2^-4, divided by a mantissa m uniform in [1, 2), for which E[1/m^2] = 1/2:
    sqrt(E[u^2] * E[1/m^2]) = 2^-4 / sqrt(3) / sqrt(2).
    """
    return 2**-4 / math.sqrt(6)


def bf16_noise() -> float:
    """Root mean square of bf16's relative rounding error, 0.0016: as :func:`e4m3_noise`, with steps of 2^-7."""
    return 2**-8 / math.sqrt(6)
