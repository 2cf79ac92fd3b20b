"""The whole attention layer: against transformers' modules, against itself in pieces, and its refusals."""

import dataclasses
from typing import Any

import pytest
import torch
from hf_reference import (
    all_keys,
    bf16_noise,
    causal_mask,
    e4m3_noise,
    fp8_latents,
    given_picks,
    randomise,
    small_config,
)
from torch import Tensor
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Attention, DeepseekV32RotaryEmbedding
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaAttention, GlmMoeDsaRotaryEmbedding

from sparse_cp_ops.config import CPRotateMethod, ParallelismConfig, PrefillCPConfig
from sparse_cp_ops.context_parallel.collectives import CpGroup
from sparse_cp_ops.context_parallel.plan import CpPlan
from sparse_cp_ops.kv_cache import PagedKvCache
from sparse_cp_ops.nn import AttentionInputs, MlaAttention, MlaConfig, UnquantisedKvCache, get_mla_impl

KINDS = {
    "deepseek_v32": (DeepseekV32Attention, DeepseekV32RotaryEmbedding),
    "glm_moe_dsa": (GlmMoeDsaAttention, GlmMoeDsaRotaryEmbedding),
}
TOPK = 64
PAGE = 16


class Theirs:
    """One attention module of transformers with random weights, on the CPU."""

    def __init__(self, kind: str, layer_id: int = 0, dtype: torch.dtype = torch.float32, **fields: Any) -> None:
        attention_class, rotary_class = KINDS[kind]
        self.config = small_config(kind, num_hidden_layers=2, **fields)
        self.module = attention_class(self.config, layer_id).eval()
        randomise(self.module, seed=layer_id)
        self.module.to(dtype)
        self.rotary = rotary_class(self.config)

    @torch.no_grad()
    def __call__(
        self, hidden: Tensor, prev: Tensor | None = None, picks: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Output [T, hidden] and picks [T, topk] of one sequence; with ``picks``, attention to those."""
        seen: list[Tensor] = []
        if self.module.indexer is not None:
            handle = self.module.indexer.register_forward_hook(lambda _m, _i, out: seen.append(out[0]))
        rows = len(hidden)
        arguments = {"position_embeddings": self.rotary(hidden, torch.arange(rows)[None])}
        if prev is not None:
            arguments["prev_topk_indices"] = prev[None]
        mask = causal_mask(rows, hidden.dtype)
        with given_picks([self.module] if picks is not None else [], [picks] if picks is not None else []):
            out = self.module(hidden[None], attention_mask=mask, **arguments)[0][0]
        if self.module.indexer is not None:
            handle.remove()
        return out, seen[0] if seen else torch.empty(0)

    def ours(self, device: str = "cpu", dtype: torch.dtype = torch.float32, **overrides: Any) -> "Ours":
        """This package's layer with the same weights."""
        config = MlaConfig.from_hf(self.config, page_size=PAGE, max_positions=512, **overrides)
        layer = MlaAttention(config, self.module.layer_idx, ParallelismConfig())
        layer.load_state_dict(self.module.state_dict(), strict=True)
        return Ours(layer.to(device, dtype))


class Ours:
    """This package's layer with an impl, a cache and scattered pages."""

    def __init__(self, layer: MlaAttention, num_pages: int = 128) -> None:
        self.layer, config = layer, layer.mla_config
        self.impl = get_mla_impl(config, ParallelismConfig())
        self.device = layer.o_proj.weight.device
        if config.quantise:
            self.cache: Any = PagedKvCache(config.num_layers, num_pages, config.page_size, self.device)
        else:
            wide = torch.promote_types(layer.o_proj.weight.dtype, torch.float32)
            self.cache = UnquantisedKvCache(config.num_layers, num_pages, config.page_size, self.device, wide)
        pages = torch.randperm(num_pages, generator=torch.Generator().manual_seed(5))
        self.tables = pages.int().view(4, -1).to(self.device)

    def prepare(self, new_lens: list[int], prefix_lens: list[int], is_prefill: bool = True) -> CpPlan:
        lens = (torch.tensor(values, dtype=torch.int32) for values in (new_lens, prefix_lens))
        return self.impl.prepare(AttentionInputs(is_prefill, *lens, self.tables[: len(new_lens)]))

    @torch.no_grad()
    def __call__(
        self,
        hidden: Tensor,
        new_lens: list[int] | None = None,
        prefix_lens: list[int] | None = None,
        is_prefill: bool = True,
        prev: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Output and picks on the CPU; by default one request without a prefix."""
        new_lens = new_lens or [len(hidden)]
        plan = self.prepare(new_lens, prefix_lens or [0] * len(new_lens), is_prefill)
        prev = None if prev is None else prev.to(self.device)
        out, picks = self.layer(hidden.to(self.device), self.cache, self.impl, plan, prev)
        return out.cpu(), picks.cpu()


def hidden_states(rows: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    return torch.randn(rows, 128, generator=torch.Generator().manual_seed(seed)).to(dtype)


def pick_sets(picks: Tensor) -> list[set[int]]:
    """Visible picks of each row; transformers fills short rows up with keys that its mask then hides."""
    return [{key for key in of_row if 0 <= key <= row} for row, of_row in enumerate(picks.tolist())]


def relative(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("heads", [8, 3, 12])
@pytest.mark.parametrize("kind", KINDS)
def test_unquantised_layer_is_that_of_transformers(kind: str, heads: int, device: str) -> None:
    """T > topk: the same picks in every row, outputs within 2e-5; also head counts that have to be padded."""
    theirs = Theirs(kind, num_attention_heads=heads, num_key_value_heads=heads)
    hidden = hidden_states(200)
    out, picks = theirs.ours(device, quantise=False)(hidden)
    expected, expected_picks = theirs(hidden)
    assert pick_sets(picks) == pick_sets(expected_picks)
    assert torch.equal((picks >= 0).sum(-1), torch.arange(1, 201).clamp(max=TOPK))
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("quantise", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_with_at_most_topk_keys_are_dense_attention(kind: str, quantise: bool, device: str) -> None:
    theirs = Theirs(kind)
    hidden = hidden_states(TOPK)
    out, picks = theirs.ours(device, quantise=quantise)(hidden)
    assert torch.equal(picks, all_keys(TOPK, TOPK).int())
    dense, _ = theirs(hidden, picks=all_keys(TOPK, TOPK))
    if quantise:
        # Values carry e4m3's noise, attention weights that of the logits: about as much again for logits around 1.
        assert 0.5 * e4m3_noise() < relative(out, dense) < 2 * e4m3_noise()
    else:
        torch.testing.assert_close(out, dense, atol=2e-5, rtol=0)


@pytest.mark.parametrize("quantise", [False, True])
def test_shared_layer_takes_the_picks_of_the_layer_before(quantise: bool, device: str) -> None:
    types = ["full", "shared"]
    first, second = (Theirs("glm_moe_dsa", layer_id=layer, indexer_types=types) for layer in (0, 1))
    hidden = hidden_states(150)
    _, picks = first.ours(device, quantise=quantise)(hidden)
    ours = second.ours(device, quantise=quantise)
    assert ours.layer.indexer is None
    out, returned = ours(hidden, prev=picks)
    assert torch.equal(returned, picks)
    expected, _ = second(hidden, prev=torch.where(picks < 0, picks[:, :1], picks))
    if quantise:
        assert relative(out, expected) < 2 * e4m3_noise()
    else:
        torch.testing.assert_close(out, expected, atol=2e-5, rtol=0)
    with pytest.raises(ValueError, match="prev_topk_indices: expected the picks of the last layer with an indexer"):
        ours(hidden)


@pytest.mark.parametrize("scale_format", ["ue8m0", "fp32"])
@pytest.mark.parametrize("kind", KINDS)
def test_quantised_layer_differs_by_fp8_and_bf16_alone(kind: str, scale_format: str, device: str) -> None:
    """Given our picks, T > topk. The error to transformers is that of FP8 latents, and bf16 explains the rest."""
    theirs = Theirs(kind)
    hidden = hidden_states(300)
    out, picks = theirs.ours(device, scale_format=scale_format)(hidden)
    expected, _ = theirs(hidden, picks=picks)
    with fp8_latents([theirs.module]):
        rounded, _ = theirs(hidden, picks=picks)
    assert relative(out, expected) < 2 * relative(rounded, expected)
    if scale_format == "ue8m0":
        # bf16 rounds the two factors of every product in a logit, a logit's error is that of a weight; it rounds values
        # and output as well. Logits of this model: variance scaling^2 * 96, for unit queries and keys.
        variance = theirs.module.scaling**2 * theirs.module.qk_head_dim
        assert relative(out, rounded) < 2 * bf16_noise() * (2 * variance + 2) ** 0.5


@pytest.mark.parametrize("kind", KINDS)
def test_quantised_picks_have_the_scores_of_the_exact_ones(kind: str, device: str) -> None:
    """A key that FP8 picked instead of another has an exact score that its rounding error can make up for."""
    theirs = Theirs(kind, dtype=torch.float64)
    hidden = hidden_states(400, torch.float64)
    ours = theirs.ours(device, torch.float64)
    _, picks = ours(hidden)

    indexer, config = ours.layer.indexer, ours.layer.mla_config
    assert indexer is not None
    with torch.no_grad():
        latent = ours.layer.q_a_layernorm(ours.layer.q_a_proj(hidden.to(device)))
        q, (k, weights) = indexer.project_queries(latent), indexer.project_keys(hidden.to(device))
        positions = torch.arange(400, dtype=torch.int32, device=device)
        q, k = (
            x.double().cpu() for x in indexer.apply_rope_and_rotate_q_k_cp(q, k, positions, ours.layer.cos_sin_cache)
        )
    weights = weights.double().cpu() * config.index_weight_scale
    dots = torch.einsum("ihd,jd->ihj", q, k)
    scores = torch.einsum("ih,ihj->ij", weights, dots.relu())
    # Both factors of every product carry independent e4m3 noise; 6 standard deviations for 80,000 pairs.
    spread = torch.einsum("ihd,jd->ihj", q**2, k**2)
    error = 6 * 2**0.5 * e4m3_noise() * torch.einsum("ih,ihj->ij", weights**2, spread).sqrt()

    causal = torch.ones(400, 400).tril().bool()
    exact = scores.masked_fill(~causal, -torch.inf).topk(TOPK, dim=-1)
    differing = 0
    for row in range(TOPK, 400):
        picked, best = set(picks[row].tolist()), set(exact.indices[row].tolist())
        assert len(picked) == TOPK
        differing += len(picked - best)
        for key in picked - best:
            left_out = max(best - picked, key=lambda other: scores[row, other] + error[row, other])
            assert scores[row, key] + error[row, key] > scores[row, left_out] - error[row, left_out]
    assert differing / (400 - TOPK) / TOPK < 0.04  # 1-2 % are expected on long rows, more on short ones


@pytest.mark.parametrize("quantise", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_chunks_prefixes_and_decode_equal_one_forward(kind: str, quantise: bool, device: str) -> None:
    """In float64, where the row count moves a GEMM's result by 1e-16: too little to change what is rounded to bf16."""
    theirs = Theirs(kind, dtype=torch.float64)
    hidden = hidden_states(180, torch.float64)
    whole, whole_picks = theirs.ours(device, torch.float64, quantise=quantise)(hidden)
    # Chunks that end inside, at and one behind the end of a page of 16; then decode.
    pieces = theirs.ours(device, torch.float64, quantise=quantise)
    start = 0
    for length in (1, 15, 16, 17, 63, 48, *[1] * 20):
        chunk = hidden[start : start + length]
        out, picks = pieces(chunk, [length], [start], is_prefill=start < 160)
        torch.testing.assert_close(out, whole[start : start + length], atol=1e-9, rtol=0)
        assert torch.equal(picks, whole_picks[start : start + length])
        start += length
    assert start == 180


def test_requests_of_a_mixed_batch_don_t_see_each_other(device: str) -> None:
    theirs = Theirs("deepseek_v32", dtype=torch.float64)
    ours = theirs.ours(device, torch.float64)
    prompts = [hidden_states(rows, torch.float64, seed=rows) for rows in (130, 1, 33, 90)]
    alone = [theirs.ours(device, torch.float64)(prompt) for prompt in prompts]
    prefix_lens = [100, 0, 32, 0]
    ours(torch.cat([prompts[0][:100], prompts[2][:32]]), [100, 0, 32], [0, 0, 0])
    new_lens = [30, 1, 1, 90]
    packed = torch.cat([prompt[prefix:] for prompt, prefix in zip(prompts, prefix_lens, strict=True)])
    outs, picks = (parts.split(new_lens) for parts in ours(packed, new_lens, prefix_lens))
    for request, prefix in enumerate(prefix_lens):
        torch.testing.assert_close(outs[request], alone[request][0][prefix:], atol=1e-9, rtol=0)
        assert torch.equal(picks[request], alone[request][1][prefix:])


@pytest.mark.parametrize("precision", [{}, {"precision": "f16", "attention_precision": "fp8"}], ids=["high", "fast"])
def test_bf16_model_is_within_bf16_of_the_fp32_one(precision: dict[str, str], device: str) -> None:
    theirs = Theirs("deepseek_v32", dtype=torch.bfloat16)
    hidden = hidden_states(TOPK, torch.bfloat16)  # no picks to differ
    out, _ = theirs.ours(device, torch.bfloat16, **precision)(hidden)
    assert out.dtype == torch.bfloat16
    wide, _ = theirs.ours(device, **precision)(hidden.float())
    # A chain of six roundings of 2^-9 each, and FP8 bytes that fall on the other side: less than FP8's own noise.
    assert relative(out, wide) < e4m3_noise()


def test_weights_are_shared_and_arguments_stay_as_they_are(device: str) -> None:
    ours = Theirs("deepseek_v32").ours(device)
    weight = ours.layer.kv_b_proj.weight
    heads = ours.layer._heads_of(ours.prepare([4], [0]))
    assert (heads.w_kc.shape, heads.w_vc.shape) == ((8, 32, 512), (8, 32, 512))
    for view in (heads.w_kc, heads.w_vc):
        assert view.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()
    hidden = hidden_states(80).to(device)
    table = ours.tables.clone()
    before, rope = hidden.clone(), ours.layer.cos_sin_cache.clone()
    ours(hidden)
    assert torch.equal(hidden, before)
    assert torch.equal(ours.layer.cos_sin_cache, rope)
    assert torch.equal(ours.tables, table)


def test_rope_table_stays_float32_and_follows_the_layer(device: str) -> None:
    ours = Theirs("glm_moe_dsa").ours(device, torch.bfloat16)
    assert ours.layer.cos_sin_cache.dtype == torch.float32
    assert ours.layer.cos_sin_cache.device.type == device
    assert "cos_sin_cache" not in ours.layer.state_dict()


def test_an_empty_batch_gives_an_empty_result(device: str) -> None:
    ours = Theirs("deepseek_v32").ours(device)
    out, picks = ours(hidden_states(0), [0, 0], [16, 0])
    assert out.shape == (0, 128)
    assert picks.shape == (0, TOPK)


def test_norms_of_small_activations_have_the_epsilon_of_the_models(device: str) -> None:
    theirs = Theirs("glm_moe_dsa", rms_norm_eps=1e-5)  # transformers' latent norms keep 1e-6
    hidden = hidden_states(TOPK) * 1e-3  # variance 1e-6: an epsilon of 1e-5 would halve the latents twice
    out, _ = theirs.ours(device, quantise=False)(hidden)
    torch.testing.assert_close(out, theirs(hidden)[0], atol=2e-5, rtol=0)


@pytest.mark.parametrize("quantise", [False, True])
def test_attention_bias(quantise: bool, device: str) -> None:
    theirs = Theirs("deepseek_v32", attention_bias=True)
    hidden = hidden_states(TOPK)
    out, _ = theirs.ours(device, quantise=quantise)(hidden)
    expected, _ = theirs(hidden)
    if quantise:
        assert relative(out, expected) < 2 * e4m3_noise()
    else:
        torch.testing.assert_close(out, expected, atol=2e-5, rtol=0)


def test_refusals() -> None:
    ours = Theirs("deepseek_v32").ours()
    hidden = hidden_states(4)
    stale = ours.prepare([4], [0])
    plan = ours.prepare([4], [0])
    with torch.no_grad():
        with pytest.raises(ValueError, match="stale"):
            ours.layer(hidden, ours.cache, ours.impl, stale)
        with pytest.raises(ValueError, match="plan: expected the CpPlan"):
            ours.layer(hidden, ours.cache, ours.impl, None)
        with pytest.raises(ValueError, match=r"hidden: expected shape \[4, 128\] \(the plan's rows\), got \[3, 128\]"):
            ours.layer(hidden[:3], ours.cache, ours.impl, plan)
        with pytest.raises(ValueError, match="cache: expected a PagedKvCache, got UnquantisedKvCache"):
            ours.layer(hidden, UnquantisedKvCache(2, 4), ours.impl, plan)
        alone, ours.impl.group = ours.impl.group, CpGroup(2, 0, "ranks")
        # Also ranks that are as many, but others.
        for other in (alone, CpGroup(2, 0, "others")):
            ours.layer.group = other
            got = f"expected this layer to have the group of impl, 2 ranks named 'ranks', got {other.size} named"
            with pytest.raises(ValueError, match=f"group: {got} '{other.name}'"):
                ours.layer(hidden, ours.cache, ours.impl, plan)
        ours.impl.group = ours.layer.group = alone
        plain = Theirs("deepseek_v32").ours(quantise=False)
        with pytest.raises(ValueError, match="cache: expected an UnquantisedKvCache"):
            plain.layer(hidden, ours.cache, plain.impl, plain.prepare([4], [0]))
    with pytest.raises(RuntimeError, match="inference"):
        ours.layer(hidden, ours.cache, ours.impl, plan)
    config = ours.layer.mla_config
    with pytest.raises(ValueError, match="layer_id"):
        MlaAttention(config, 2)
    method = PrefillCPConfig(method=CPRotateMethod.ALLTOALL)
    with pytest.raises(ValueError, match="ALLTOALL"):
        MlaAttention(config, 0, ParallelismConfig(prefill_cp_config=method))
    with pytest.raises(ValueError, match="num_heads: expected 1 to 128, got 132"):
        dataclasses.replace(config, num_heads=132)


def test_added_heads_are_zeros(device: str) -> None:
    ours = Theirs("deepseek_v32", num_attention_heads=3, num_key_value_heads=3).ours(device)
    plan = ours.prepare([5], [0])
    with torch.no_grad():
        latent = ours.layer._query_latent(hidden_states(5).to(device))
        q = ours.layer._absorbed_queries(latent, ours.layer._heads_of(plan), plan.positions, torch.bfloat16)
    assert q.shape == (5, 8, 576)
    assert q[:, :3].any(dim=-1).all()
    assert not q[:, 3:].any()


def test_the_largest_padded_head_count(device: str) -> None:
    theirs = Theirs("deepseek_v32", num_attention_heads=66, num_key_value_heads=66)
    hidden = hidden_states(20)
    out, _ = theirs.ours(device)(hidden)
    assert relative(out, theirs(hidden)[0]) < 2 * e4m3_noise()
