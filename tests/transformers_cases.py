"""What runs on every rank of test_transformers_distributed.py: models under context parallelism against one process.

Models are float64: a GEMM's rounding then depends on the row count by 1e-16 only, too little to change what is rounded
to bf16, so that ranks and one process have to agree to 1e-9. The cases in float32 say what their bounds come from.
"""

from __future__ import annotations

import torch
from hf_reference import attentions_of, bf16_noise, given_picks, small_model
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from sparse_cp_ops.config import CPRotateMethod, ParallelismConfig, PrefillCPConfig
from sparse_cp_ops.context_parallel.collectives import CpGroup, gather_hidden_states, take_local_rows
from sparse_cp_ops.context_parallel.plan import CpPlan
from sparse_cp_ops.integrations.transformers import SparseCpModel
from sparse_cp_ops.nn import AttentionInputs, MlaAttention, PagedKvCache, get_mla_impl

PAGE = 16
TOPK = 64
# On 2 and 4 ranks: shorter than S and than 2S, a page end and one more, longer than topk.
LENGTHS = (1, 3, 7, 16, 33, 150)


def model_of(kind: str = "deepseek_v32", dtype: torch.dtype = torch.float64, **fields: object) -> object:
    shared = {"indexer_types": ["full", "shared", "full"]} if kind == "glm_moe_dsa" else {}
    return small_model(kind, dtype=dtype, **{**shared, **fields})


def sparse_of(model: object, group: CpGroup | None = None, quantise: bool = True, **cp: object) -> SparseCpModel:
    """On the ranks of a group, always under context parallelism unless ``cp`` says otherwise; or in one process."""
    sizes = {"num_pages": 80, "page_size": PAGE, "max_positions": 1024, "quantise": quantise}
    if group is None:
        return SparseCpModel(model, **sizes)
    config = PrefillCPConfig(
        **{"method": CPRotateMethod.ALL_GATHER_WITH_OVERLAP, "min_tokens": 0, "min_kv_work": 0, **cp}
    )
    parallelism = ParallelismConfig(tp_size=group.size, tp_rank=group.rank, prefill_cp_config=config)
    return SparseCpModel(model, parallelism, group.process_group, **sizes)


def tokens_of(count: int, seed: int = 0) -> list[int]:
    return torch.randint(256, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, atol=1e-9, rtol=0)


def relative(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def prefill_reuse_and_decode(group: CpGroup) -> None:
    """A mixed batch in chunks, then prompts of which one hits a prefix, then 64 teacher-forced decode steps."""
    model, one = model_of(), sparse_of(model_of())
    prompts = [tokens_of(length, seed=length) for length in LENGTHS]
    follow_up = [prompts[-1][:100] + tokens_of(20, seed=9), tokens_of(5, seed=10)]
    forced = [tokens_of(64, seed=11), tokens_of(64, seed=12)]

    def run(sparse: SparseCpModel, chunk_tokens: int | None) -> list[Tensor]:
        first, logits = sparse.prefill(prompts, logits="all", chunk_tokens=chunk_tokens)
        sparse.release(first)
        requests, second = sparse.prefill(follow_up, logits="all")
        assert [request.prefix_hit for request in requests] == [96, 0]
        steps = [sparse.decode(requests, [tokens[i] for tokens in forced]) for i in range(64)]
        sparse.release(requests)
        return [logits, second, *steps]

    expected = run(one, None)
    for split, decode_mode, chunk in (
        ("zigzag", "replicated", None),
        ("interleave", "head_slice", 37),
        ("zigzag", "batch_slice", 64),
    ):
        sparse = sparse_of(model, group, split=split, decode_mode=decode_mode)
        for got, wanted in zip(run(sparse, chunk), expected, strict=True):
            close(got, wanted)


def ranks_own_their_rows(group: CpGroup) -> None:
    """The rows of a prefill are shared among the ranks, and all of them are there once."""
    sparse = sparse_of(model_of(), group)
    positions: list[Tensor] = []

    def record(layer_id: int, plan: CpPlan, picks: Tensor) -> None:
        assert plan.use_cp
        assert picks.shape == (plan.local_rows, TOPK)
        assert (picks[plan.req_ids < 0] == -1).all()
        if layer_id == 0:
            positions.append(plan.positions[plan.req_ids >= 0])

    sparse.prefill([tokens_of(150)], on_picks=record)
    (own,) = positions
    assert len(own) < 150
    lists: list[list[int]] = [[] for _ in range(group.size)]
    torch.distributed.all_gather_object(lists, own.tolist())
    assert sorted(position for of_rank in lists for position in of_rank) == list(range(150))


def unquantised_is_transformers(group: CpGroup) -> None:
    """At full precision, under context parallelism: transformers' logits, whole and in chunks."""
    for kind in ("deepseek_v32", "glm_moe_dsa"):
        model = model_of(kind)
        tokens = tokens_of(150)
        alone: dict[int, Tensor] = {}
        sparse_of(model, quantise=False).prefill([tokens], on_picks=lambda i, _plan, picks: alone.update({i: picks}))  # noqa: B023
        with torch.no_grad(), given_picks(attentions_of(model), [alone[i] for i in range(3)]):
            expected = model(torch.tensor([tokens])).logits[0]
        for chunk in (None, 64):
            sparse = sparse_of(model, group, quantise=False)
            _, logits = sparse.prefill([tokens], logits="all", chunk_tokens=chunk)
            torch.testing.assert_close(logits, expected, atol=2e-5, rtol=0)
        requests, _ = sparse.prefill([tokens[:140]])
        for position in range(140, 150):
            logits = sparse.decode(requests, tokens[position : position + 1])
            torch.testing.assert_close(logits[0], expected[position], atol=2e-5, rtol=0)


def shared_layers_and_experts(group: CpGroup) -> None:
    """GLM with a shared layer; experts in the last layer, whose fp32 router rounds by 1e-7 on the way."""
    model = model_of("glm_moe_dsa", first_k_dense_replace=2, experts_implementation="eager")
    prompts = [tokens_of(length, seed=length) for length in LENGTHS]
    expected = sparse_of(model).prefill(prompts, logits="all")[1]
    for split in ("zigzag", "interleave"):
        logits = sparse_of(model, group, split=split).prefill(prompts, logits="all")[1]
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)


def float32_within_rounding(group: CpGroup) -> None:
    """GEMMs of other row counts round by 1e-6, which moves a few bf16 inputs by 2^-8 and fewer FP8 bytes by 2^-3.

    Of a relative change d = 1e-6, d / 2^-8 of the bf16 inputs move, and d / 2^-3 of the bytes: a noise of
    sqrt(d * 2^-8 + d * 2^-3) = 3.6e-4, in each of three layers. No row has picks that could differ.
    """
    model = model_of(dtype=torch.float32)
    prompts = [tokens_of(length, seed=length) for length in (TOPK, 5, 40)]
    expected = sparse_of(model).prefill(prompts, logits="all")[1]
    logits = sparse_of(model, group).prefill(prompts, logits="all")[1]
    assert relative(logits, expected) < 4 * 3.6e-4 * 3**0.5


def bfloat16_within_rounding(group: CpGroup) -> None:
    """bf16 activations that fall on the other side: no more than all of their roundings together."""
    model = model_of(dtype=torch.bfloat16)
    prompts = [tokens_of(length, seed=length) for length in (TOPK, 5, 40)]
    expected = sparse_of(model).prefill(prompts, logits="all")[1]
    logits = sparse_of(model, group).prefill(prompts, logits="all")[1]
    assert logits.dtype == torch.bfloat16
    assert relative(logits, expected) < 2 * bf16_noise() * (3 * (10 + 9)) ** 0.5


def short_prompts_run_on_every_rank(group: CpGroup) -> None:
    """Below the thresholds nothing is shared, and the answer is the same."""
    model = model_of()
    sparse = sparse_of(model, group, min_tokens=100)
    used: dict[int, bool] = {}
    for length in (99, 100):
        tokens = tokens_of(length, seed=length)
        _, logits = sparse.prefill([tokens], on_picks=lambda _i, plan, _p: used.update({length: plan.use_cp}))  # noqa: B023
        close(logits, sparse_of(model).prefill([tokens])[1])
    assert used == {99: False, 100: True}


def compiled_layer(group: CpGroup) -> None:
    """The whole layer in one graph under context parallelism, in prefill and with every head mode of decode."""
    weights = attentions_of(model_of())[1].state_dict()
    table = torch.arange(32, dtype=torch.int32).view(2, 16)
    prefills = (([70, 3], [0, 0], True), ([41, 66], [70, 3], True))
    for decode_mode in ("replicated", "head_slice", "batch_slice"):
        torch._dynamo.reset()
        impl = sparse_of(model_of(num_hidden_layers=2), group, decode_mode=decode_mode).impl
        config, parallelism = impl.mla_config, impl.planner.parallelism_config
        layer = MlaAttention(config, 1, parallelism, group.process_group, dtype=torch.float64)
        one, one_impl = MlaAttention(config, 1, dtype=torch.float64), get_mla_impl(config, ParallelismConfig())
        for module in (layer, one):
            module.load_state_dict(weights)
        caches = [PagedKvCache(2, 32, PAGE) for _ in range(2)]
        counter = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(layer, fullgraph=True, backend=counter)
        for new, prefix, is_prefill in (*prefills, ([1, 1], [111, 69], False)):
            new_lens, prefix_lens = (torch.tensor(values, dtype=torch.int32) for values in (new, prefix))
            inputs = AttentionInputs(is_prefill, new_lens, prefix_lens, table)
            plan, one_plan = impl.prepare(inputs), one_impl.prepare(inputs)
            assert plan.use_cp == is_prefill
            hidden = torch.randn(sum(new), 128, dtype=torch.float64)
            # Prefill is compiled once; the other decode modes only differ in decode.
            run = compiled if decode_mode == "replicated" or not is_prefill else layer
            with torch.no_grad():
                out, _ = run(take_local_rows(hidden, plan) if plan.use_cp else hidden, caches[0], impl, plan)
                expected, _ = one(hidden, caches[1], one_impl, one_plan)
            close(gather_hidden_states(out, plan, group), expected)
            assert torch.equal(caches[0].mla[1], caches[1].mla[1])
        assert counter.frame_count <= 3


TWO_RANKS = [
    prefill_reuse_and_decode,
    ranks_own_their_rows,
    unquantised_is_transformers,
    shared_layers_and_experts,
    float32_within_rounding,
    bfloat16_within_rounding,
    short_prompts_run_on_every_rank,
    compiled_layer,
]
FOUR_RANKS = [prefill_reuse_and_decode, ranks_own_their_rows]
