"""SparseCpModel in one process: against transformers' own models, against itself in pieces, and its book-keeping."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from hf_reference import attentions_of, bf16_noise, e4m3_noise, fp8_latents, given_picks, small_model
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from sparse_cp_ops.cache_store import OutOfPagesError
from sparse_cp_ops.context_parallel.plan import CpPlan
from sparse_cp_ops.integrations.transformers import Request, SparseCpModel

KINDS = ["deepseek_v32", "glm_moe_dsa"]
TOPK = 64
PAGE = 16


def model_of(kind: str, dtype: torch.dtype = torch.float64, **fields: Any) -> Any:
    """Three layers; GLM's second one shares the picks of the first."""
    shared = {"indexer_types": ["full", "shared", "full"]} if kind == "glm_moe_dsa" else {}
    return small_model(kind, dtype=dtype, **{**shared, **fields})


def sparse_of(model: Any, num_pages: int = 64, **overrides: Any) -> SparseCpModel:
    return SparseCpModel(model, num_pages=num_pages, page_size=PAGE, max_positions=1024, **overrides)


def tokens_of(count: int, seed: int = 0) -> list[int]:
    return torch.randint(256, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.no_grad()
def theirs(model: Any, tokens: list[int]) -> Tensor:
    logits: Tensor = model(torch.tensor([tokens], device=model.device)).logits[0]
    return logits.cpu()


def prefill_with_picks(sparse: SparseCpModel, tokens: list[int]) -> tuple[Tensor, list[Tensor]]:
    """Logits of all tokens, and the picks of each layer."""
    picks: list[Tensor] = []
    _, logits = sparse.prefill([tokens], logits="all", on_picks=lambda _layer, _plan, rows: picks.append(rows))
    return logits.cpu(), picks


def relative(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])
@pytest.mark.parametrize("kind", KINDS)
def test_unquantised_model_is_that_of_transformers(kind: str, experts: bool, device: str) -> None:
    model = model_of(kind, torch.float32, first_k_dense_replace=1 if experts else 3).to(device)
    tokens = tokens_of(150)
    logits, picks = prefill_with_picks(sparse_of(model, quantise=False), tokens)
    with given_picks(attentions_of(model), picks):
        torch.testing.assert_close(logits, theirs(model, tokens), atol=2e-5, rtol=0)
    short = tokens[:TOPK]  # nothing to select
    logits, _ = prefill_with_picks(sparse_of(model, quantise=False), short)
    torch.testing.assert_close(logits, theirs(model, short), atol=2e-5, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_quantised_model_differs_by_what_fp8_explains(kind: str, device: str) -> None:
    """Given our picks. FP8 latents move transformers' own logits; ours may be off by as much again."""
    model = model_of(kind).to(device)
    attentions = attentions_of(model)
    for tokens in (tokens_of(300), tokens_of(TOPK)):
        logits, picks = prefill_with_picks(sparse_of(model), tokens)
        with given_picks(attentions, picks):
            exact = theirs(model, tokens)
            with fp8_latents(attentions):
                rounded = theirs(model, tokens)
        error = relative(rounded, exact)
        # Three layers of e4m3's noise, each passing on that of the one before.
        assert e4m3_noise() / 4 < error < 3 * e4m3_noise()
        assert relative(logits, exact) < 2 * error
        # With FP8 accounted for, bf16 remains: as in a layer (test_mla_attention), three times.
        variance = attentions[0].scaling ** 2 * attentions[0].qk_head_dim
        assert relative(logits, rounded) < 3 * 2 * bf16_noise() * (2 * variance + 2) ** 0.5


@pytest.mark.parametrize("quantise", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_chunks_mixed_batches_and_decode_equal_one_forward(kind: str, quantise: bool, device: str) -> None:
    """float64: the row count moves a GEMM's result by 1e-16, too little to change what is rounded to bf16."""
    model = model_of(kind).to(device)
    prompts = [tokens_of(count, seed=count) for count in (130, 1, 33, 90)]
    whole = [sparse_of(model, quantise=quantise).prefill([prompt], logits="all")[1] for prompt in prompts]

    sparse = sparse_of(model, quantise=quantise)
    heads = [prompt[: max(1, len(prompt) - 20)] for prompt in prompts]
    requests, logits = sparse.prefill(heads, logits="all", chunk_tokens=50)
    expected = torch.cat([rows[: len(head)] for rows, head in zip(whole, heads, strict=True)])
    torch.testing.assert_close(logits, expected, atol=1e-9, rtol=0)
    # One request prefills on while another decodes.
    logits = sparse.extend([requests[0], requests[2]], [prompts[0][110:119], prompts[2][13:14]], logits="all")
    torch.testing.assert_close(logits, torch.cat([whole[0][110:119], whole[2][13:14]]), atol=1e-9, rtol=0)
    # Teacher-forced decode of three requests that stand at different positions.
    running = {0: requests[0], 2: requests[2], 3: requests[3]}
    while running:
        step = sparse.decode(list(running.values()), [prompts[i][len(r.tokens)] for i, r in running.items()])
        for row, (index, request) in zip(step, running.items(), strict=True):
            torch.testing.assert_close(row, whole[index][len(request.tokens) - 1], atol=1e-9, rtol=0)
        running = {i: r for i, r in running.items() if len(r.tokens) < len(prompts[i])}
    assert [request.tokens for request in requests] == prompts


def test_a_prefix_is_reused_and_changes_nothing(device: str) -> None:
    model = model_of("deepseek_v32").to(device)
    first = tokens_of(150)
    sparse = sparse_of(model)
    requests, _ = sparse.prefill([first])
    assert requests[0].prefix_hit == 0
    # A hit on one request of the batch, while the first prompt still runs and after it has ended.
    for seed in (1, 2):
        other = tokens_of(60, seed)
        second = first[:100] + other
        batch, logits = sparse.prefill([second, other], logits="all")
        assert [request.prefix_hit for request in batch] == [96, 0]
        alone = sparse_of(model).prefill([second], logits="all")[1]
        torch.testing.assert_close(logits[: len(second) - 96], alone[96:], atol=1e-9, rtol=0)
        sparse.release(batch if seed == 2 else [*batch, *requests])
    # The same prompt again: its last token is always computed. What decode has added is reused as well.
    [again], last = sparse.prefill([first])
    assert again.prefix_hit == 144
    tail = tokens_of(30, seed=2)
    for token in tail:
        sparse.decode([again], [token])
    sparse.release([again])
    [longer], _ = sparse.prefill([first + tail])
    assert longer.prefix_hit == 176
    torch.testing.assert_close(last[0], sparse_of(model).prefill([first])[1][0], atol=1e-9, rtol=0)


def test_last_logits_are_the_last_of_all(device: str) -> None:
    model = model_of("glm_moe_dsa").to(device)
    prompts = [tokens_of(70), tokens_of(5, seed=1), tokens_of(33, seed=2)]
    everything = sparse_of(model).prefill(prompts, logits="all")[1]
    for chunk_tokens in (None, 40):
        last = sparse_of(model).prefill(prompts, chunk_tokens=chunk_tokens)[1]
        torch.testing.assert_close(last, everything[[69, 74, 107]], atol=1e-9, rtol=0)


def test_bf16_model_is_close_to_the_fp32_one(device: str) -> None:
    model = model_of("deepseek_v32", torch.bfloat16).to(device)
    tokens = tokens_of(TOPK)  # nothing to select, so no picks that differ
    narrow = sparse_of(model).prefill([tokens], logits="all")[1]
    assert narrow.dtype == torch.bfloat16
    wide = sparse_of(model.float()).prefill([tokens], logits="all")[1]
    # bf16 activations: ten roundings a layer, three layers, and attention as in test_mla_attention.
    assert relative(narrow, wide) < 2 * bf16_noise() * (3 * (10 + 9)) ** 0.5


def test_weights_are_shared_and_the_model_stays_as_it_is() -> None:
    model = model_of("deepseek_v32")
    tokens = tokens_of(40)
    before = theirs(model, tokens)
    sparse = sparse_of(model)
    for ours, layer in zip(sparse.layers, model.model.layers, strict=True):
        assert ours.mlp is layer.mlp
        assert ours.self_attn is not layer.self_attn
        names = dict(layer.self_attn.named_parameters())
        assert dict(ours.self_attn.named_parameters()).keys() == names.keys()
        for name, parameter in ours.self_attn.named_parameters():
            assert parameter is names[name]
    sparse.prefill([tokens])
    assert torch.equal(theirs(model, tokens), before)
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight.zero_()
    changed = sparse_of(model).prefill([tokens])[1]
    assert torch.equal(sparse_of(model).prefill([tokens])[1], changed)
    assert not torch.equal(sparse.extend(sparse.prefill([tokens[:-1]])[0], [tokens[-1:]]), before[-1:])


def test_pages_are_given_back() -> None:
    model = model_of("deepseek_v32")
    sparse = sparse_of(model, num_pages=8)
    requests, _ = sparse.prefill([tokens_of(65), tokens_of(10, seed=1)])
    assert sparse.prefix_cache.available == 2
    with pytest.raises(OutOfPagesError):
        sparse.prefill([tokens_of(20, seed=2), tokens_of(20, seed=3)])
    assert sparse.prefix_cache.available == 2
    with pytest.raises(OutOfPagesError):
        sparse.extend(requests, [tokens_of(16), tokens_of(50)])
    assert sparse.prefix_cache.available == 2
    assert [len(request.tokens) for request in requests] == [65, 10]

    def fail(_layer: int, _plan: CpPlan, _picks: Tensor) -> None:
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        sparse.extend(requests, [tokens_of(20), tokens_of(3)], on_picks=fail)
    assert sparse.prefix_cache.available == 2
    assert [len(request.tokens) for request in requests] == [65, 10]
    sparse.release(requests)
    assert sparse.prefix_cache.available == 8


def test_picks_are_shown_layer_by_layer() -> None:
    sparse = sparse_of(model_of("glm_moe_dsa"))
    seen: list[tuple[int, int, Tensor]] = []
    sparse.prefill([tokens_of(70)], on_picks=lambda layer, plan, rows: seen.append((layer, plan.local_rows, rows)))
    assert [(layer, rows) for layer, rows, _ in seen] == [(0, 70), (1, 70), (2, 70)]
    assert torch.equal(seen[0][2], seen[1][2])  # the shared layer
    assert not torch.equal(seen[0][2], seen[2][2])
    assert all(rows.shape == (70, TOPK) for _, _, rows in seen)


def test_refusals() -> None:
    model = model_of("deepseek_v32")
    sparse = sparse_of(model)
    with pytest.raises(ValueError, match=r"prompts\[1\]: expected at least one token"):
        sparse.prefill([[1], []])
    with pytest.raises(ValueError, match="chunk_tokens: expected at least 1"):
        sparse.prefill([[1]], chunk_tokens=0)
    with pytest.raises(ValueError, match="logits: expected 'last' or 'all', got 'none'"):
        sparse.prefill([[1]], logits="none")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="new_tokens: expected 2 as requests, got 1"):
        sparse.decode([Request(), Request()], [1])
    requests, _ = sparse.prefill([[1], [2]])
    with pytest.raises(ValueError, match="expected each request once"):
        sparse.decode([requests[0], requests[0]], [1, 2])
    sparse.release(requests)
    sparse.release(requests)  # again: nothing left to give back
    with pytest.raises(ValueError, match="got one that was released"):
        sparse.decode(requests, [1, 2])
    with pytest.raises(ValueError, match="1024"):
        sparse_of(model, num_pages=128).prefill([[1] * 1025])
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    llama = LlamaForCausalLM(LlamaConfig(vocab_size=8, num_key_value_heads=1, **sizes))
    with pytest.raises(TypeError, match="DeepseekV32ForCausalLM or GlmMoeDsaForCausalLM, got LlamaForCausalLM"):
        sparse_of(llama)
    model.model.layers[0].forward = lambda *arguments: None
    with pytest.raises(ValueError, match="wrapped"):
        sparse_of(model)
    assert sparse.prefix_cache.available == 64


def test_without_transformers_the_import_says_what_is_missing() -> None:
    code = "import sys; sys.modules['transformers'] = None; import sparse_cp_ops.integrations.transformers"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 1
    assert "pip install 'transformers==5.17.0'" in result.stderr
