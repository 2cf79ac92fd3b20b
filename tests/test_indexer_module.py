import pytest
import torch
import torch.nn.functional as F
from cp_harness import TOPK, Rank, attention_inputs, mla_config, parallelism, poisoned_cache
from transformers.models.deepseek_v32.configuration_deepseek_v32 import DeepseekV32Config
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Indexer

from sparse_cp_ops import reference
from sparse_cp_ops.nn import Indexer, MlaConfig
from sparse_cp_ops.nn.rope import build_cos_sin_cache

ROWS = 24


def indexer_and_inputs(
    config: MlaConfig, device: str, dtype: torch.dtype
) -> tuple[Indexer, torch.Tensor, torch.Tensor]:
    indexer = Indexer(config, device, dtype)
    for parameter in indexer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    hidden = torch.randn(ROWS, config.hidden_size, device=device, dtype=dtype)
    q_resid = torch.randn(ROWS, config.q_lora_rank, device=device, dtype=dtype)
    return indexer, hidden, q_resid


def test_parameters_are_those_of_the_hugging_face_module() -> None:
    config = mla_config()
    theirs = DeepseekV32Indexer(hugging_face_config(config), 0)
    indexer = Indexer(config)
    indexer.load_state_dict(theirs.state_dict())
    assert indexer.k_norm.eps == theirs.k_norm.eps == 1e-6


def hugging_face_config(config: MlaConfig) -> DeepseekV32Config:
    return DeepseekV32Config(
        hidden_size=config.hidden_size,
        q_lora_rank=config.q_lora_rank,
        index_n_heads=config.index_n_heads,
        index_head_dim=config.index_head_dim,
        index_topk=config.index_topk,
        qk_rope_head_dim=config.qk_rope_head_dim,
    )


@torch.no_grad()
def test_unquantised_scores_are_those_of_the_hugging_face_module() -> None:
    """Same projections, RoPE and weights in fp32: its picks and ours of T > topk rows are the same sets."""
    config = mla_config(quantise=False)
    rows = 3 * TOPK
    theirs = DeepseekV32Indexer(hugging_face_config(config), 0)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    indexer = Indexer(config)
    indexer.load_state_dict(theirs.state_dict())
    hidden, q_resid = torch.randn(rows, config.hidden_size), torch.randn(rows, config.q_lora_rank)
    positions = torch.arange(rows, dtype=torch.int32)
    table = build_cos_sin_cache(config)
    q, (k, weights) = indexer.project_queries(q_resid), indexer.project_keys(hidden)
    q, k = indexer.apply_rope_and_rotate_q_k_cp(q, k, positions, table)
    scores = torch.einsum("ih,ihj->ij", weights, torch.einsum("ihd,jd->ihj", q, k).relu())
    causal = torch.ones(rows, rows, dtype=torch.bool).tril()
    ours = scores.masked_fill(~causal, -torch.inf).topk(TOPK).indices
    cos, sin = (part[:rows].repeat(1, 2) for part in table.chunk(2, dim=-1))
    picked = theirs(hidden[None], q_resid[None], (cos[None], sin[None]), causal[None], positions[None])[0]
    for row in range(rows):
        visible = min(row + 1, TOPK)
        assert {*ours[row, :visible].tolist()} == {i for i in picked[row].tolist() if i <= row}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_head_weights_are_computed_in_fp32(device: str, dtype: torch.dtype) -> None:
    indexer, hidden, q_resid = indexer_and_inputs(mla_config(), device, dtype)
    q, (k, weights) = indexer.project_queries(q_resid), indexer.project_keys(hidden)
    assert (q.shape, k.shape, weights.shape) == ((ROWS, 8, 128), (ROWS, 128), (ROWS, 8))
    assert q.dtype == k.dtype == dtype
    assert weights.dtype == torch.float32
    # fp32 sums of 96 products of size 0.3: a relative error of 1e-5 leaves room for every order of the sum.
    exact = hidden.double() @ indexer.weights_proj.weight.double().T
    torch.testing.assert_close(weights.double(), exact, rtol=1e-5, atol=1e-5)
    expected_k = F.layer_norm(
        indexer.wk(hidden).double(), (128,), indexer.k_norm.weight.double(), indexer.k_norm.bias.double(), 1e-6
    )
    rounding = 2**-7 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(k.double(), expected_k, rtol=rounding, atol=rounding)


@pytest.mark.parametrize("precision", ["fp32", "f16"])
@pytest.mark.parametrize("interleaved", [False, True])
@torch.no_grad()
def test_the_quantised_step_is_the_rotation_and_then_fp8(device: str, interleaved: bool, precision: str) -> None:
    config = mla_config(indexer_interleaved=interleaved, precision=precision, scale_format="fp32")
    indexer, hidden, q_resid = indexer_and_inputs(config, device, torch.bfloat16)
    q, (k, weights) = indexer.project_queries(q_resid), indexer.project_keys(hidden)
    positions = torch.arange(ROWS, dtype=torch.int32, device=device) * 7
    table = build_cos_sin_cache(config, device)
    k_records = torch.empty(ROWS, 132, dtype=torch.uint8, device=device)
    q_fp8, q_weights = indexer.quant_q_k_cp(q, k, weights, positions, table, k_records)
    rotated_q, rotated_k = indexer.apply_rope_and_rotate_q_k_cp(q, k, positions, table)
    q_scale = rotated_q.abs().amax(-1) / (448.0 if precision == "fp32" else 0.875)
    k_scale = rotated_k.abs().amax(-1) / 448.0
    # e4m3 rounds by at most 2^-4 of a value, or half of its smallest step, 2^-10, times the scale.
    values = q_fp8.view(torch.float8_e4m3fn).float() * q_scale[..., None]
    assert ((values - rotated_q).abs() <= rotated_q.abs() / 16 + q_scale[..., None] * 2**-10 + 1e-6).all()
    values = k_records[:, :128].contiguous().view(torch.float8_e4m3fn).float() * k_scale[:, None]
    assert ((values - rotated_k).abs() <= rotated_k.abs() / 16 + k_scale[:, None] * 2**-10 + 1e-6).all()
    torch.testing.assert_close(k_records[:, 128:].contiguous().view(torch.float32)[:, 0], k_scale, rtol=1e-5, atol=0)
    torch.testing.assert_close(q_weights, weights * q_scale * (128 * 8) ** -0.5, rtol=1e-5, atol=1e-7)
    # Rotations keep lengths, and the Hadamard one spreads a unit vector over all dimensions.
    torch.testing.assert_close(rotated_k.norm(dim=-1), k.float().norm(dim=-1), rtol=1e-5, atol=1e-5)
    unit = torch.zeros(1, 128, device=device)
    unit[0, 100] = 1
    spread = indexer.apply_rope_and_rotate_q_k_cp(unit[:, None], unit, positions[:1], table)[1]
    torch.testing.assert_close(spread.abs(), torch.full_like(spread, 128**-0.5))


@pytest.mark.parametrize("precision", ["fp32", "f16"])
@torch.no_grad()
def test_topk_picks_the_best_keys_by_the_reference_scores(device: str, precision: str) -> None:
    config = mla_config(precision=precision)
    rank = Rank(config, parallelism(1), 12, device)
    length = 150
    table = torch.arange(12, dtype=torch.int32, device=device).flip(0)[:10].view(1, 10)
    plan = rank.op.plan(attention_inputs([length], [0], table))
    indexer = rank.indexer
    hidden, q_resid = torch.randn(length, config.hidden_size, device=device), torch.randn(length, 64, device=device)
    q, (k, weights) = indexer.project_queries(q_resid), indexer.project_keys(hidden)
    records = rank.op.new_kv_records(plan, True)
    assert records.index is not None
    records.mla.zero_()
    q_fp8, q_weights = indexer.quant_q_k_cp(
        q.bfloat16(), k.bfloat16(), weights, plan.positions, rank.table, records.index
    )
    rank.op.finish_kv_write(rank.op.start_kv_write(records, plan), rank.cache, 0, plan)
    picks = indexer._get_topk_ragged_cp(q_fp8, q_weights, rank.cache, 0, plan)
    assert picks.shape == (length, TOPK)
    pages = rank.cache.indexer[0]
    assert pages is not None
    cpu = [x.cpu() for x in (q_fp8, q_weights, pages, table, plan.req_ids, plan.kv_lens)]
    scores = reference.indexer_scores_ragged_cp(*cpu, 160)
    for row, chosen in enumerate(picks.cpu().long()):
        visible = min(row + 1, TOPK)
        assert chosen[visible:].eq(-1).all()
        assert chosen[:visible].diff().gt(0).all()
        best = scores[row, : row + 1].topk(visible).values
        # The declared error of the f16 scores is below 6e-3 of a row's standard deviation, that of fp32 far below.
        torch.testing.assert_close(
            scores[row, chosen[:visible]].sort(descending=True).values,
            best,
            rtol=0,
            atol=6e-3 * float(scores[row, : row + 1].std(correction=0)) + 1e-9,
        )


def test_a_layer_without_pages_is_refused() -> None:
    rank = Rank(mla_config(), parallelism(1), 4, "cpu")
    plan = rank.op.plan(attention_inputs([3], [0], torch.zeros(1, 1, dtype=torch.int32)))
    empty = torch.zeros(3, 8, 128, dtype=torch.uint8), torch.zeros(3, 8)
    with pytest.raises(ValueError, match="layer 1: expected indexer pages in the cache, got none"):
        rank.indexer._get_topk_ragged_cp(*empty, poisoned_cache(mla_config(), 4), 1, plan)
