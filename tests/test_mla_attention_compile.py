"""MlaAttention under torch.compile: one graph for all lengths and layers, in prefill and in decode, without copies."""

import re

import pytest
import torch
from hf_reference import randomise, small_config
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import run_and_get_code

from sparse_cp_ops.config import ParallelismConfig
from sparse_cp_ops.context_parallel.plan import CpPlan
from sparse_cp_ops.kv_cache import PagedKvCache
from sparse_cp_ops.nn import AttentionInputs, MlaAttention, MlaConfig, SparseMlaImpl, get_mla_impl
from sparse_cp_ops.nn.mla_config import ATTENTION_HEADS

LENGTHS = (70, 71, 2, 33, 64, 65, 130, 3)


def config_of(kind: str, layers: int) -> MlaConfig:
    fields = {"indexer_types": ["full", "shared"] * (layers // 2)} if kind == "glm_moe_dsa" else {}
    hf = small_config(kind, num_hidden_layers=layers, **fields)
    return MlaConfig.from_hf(hf, page_size=16, max_positions=512)


def layer_of(config: MlaConfig, layer_id: int, device: str) -> MlaAttention:
    """float64, so that a fused norm moves nothing across a rounding boundary of bf16."""
    layer = MlaAttention(config, layer_id)
    randomise(layer, seed=layer_id)
    return layer.to(device, torch.float64)


def prepare(impl: SparseMlaImpl, new_lens: list[int], prefix_lens: list[int], is_prefill: bool, device: str) -> CpPlan:
    tables = torch.arange(64, dtype=torch.int32, device=device).view(4, 16)
    lens = (torch.tensor(values, dtype=torch.int32) for values in (new_lens, prefix_lens))
    return impl.prepare(AttentionInputs(is_prefill, *lens, tables[: len(new_lens)]))


def hidden_states(rows: int, device: str) -> torch.Tensor:
    return torch.randn(rows, 128, dtype=torch.float64).to(device)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()


@torch.no_grad()
def test_lengths_share_a_graph(device: str) -> None:
    config = config_of("deepseek_v32", 2)
    layer, impl = layer_of(config, 1, device), get_mla_impl(config, ParallelismConfig())
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    caches = [PagedKvCache(2, 64, 16, device) for _ in range(2)]

    def compare(new_lens: list[int], prefix_lens: list[int], is_prefill: bool) -> None:
        plan = prepare(impl, new_lens, prefix_lens, is_prefill, device)
        hidden = hidden_states(sum(new_lens), device)
        out, picks = compiled(hidden, caches[0], impl, plan)
        expected, expected_picks = layer(hidden, caches[1], impl, plan)
        assert torch.equal(picks, expected_picks)
        torch.testing.assert_close(out, expected, atol=1e-9, rtol=0)

    for length in LENGTHS:
        compare([length], [0], True)
    for requests, length in ((2, 150), (4, 151), (3, 40)):
        compare([length // 8] * requests, [length] * requests, True)
    assert counter.frame_count <= 3  # the first, and two recompiles
    prefill_graphs = counter.frame_count
    for requests in (4, 2, 3, 4):
        compare([1] * requests, [100 + requests] * requests, False)
    assert counter.frame_count <= prefill_graphs + 1
    assert torch.equal(caches[0].mla[1], caches[1].mla[1])
    assert torch.equal(caches[0].indexer[1], caches[1].indexer[1])


@pytest.mark.parametrize("kind", ["deepseek_v32", "glm_moe_dsa"])
@torch.no_grad()
def test_layers_share_a_graph(kind: str, device: str) -> None:
    """Ten layers compiled one by one, each with its own pages: more than dynamo's limit of eight graphs."""
    config = config_of(kind, 10)
    impl, cache, expected_cache = (
        get_mla_impl(config, ParallelismConfig()),
        *(PagedKvCache(10, 64, 16, device, [config.has_indexer(i) for i in range(10)]) for _ in range(2)),
    )
    counter = CompileCounterWithBackend("aot_eager")
    layers = [layer_of(config, layer_id, device) for layer_id in range(10)]
    compiled = [torch.compile(layer, fullgraph=True, backend=counter) for layer in layers]
    for length in (20, 40, 45):
        plan = prepare(impl, [length], [0], True, device)
        hidden = expected = hidden_states(length, device)
        picks = expected_picks = None
        for layer_id in range(10):
            hidden, picks = compiled[layer_id](hidden, cache.layer(layer_id), impl, plan, picks)
            expected, expected_picks = layers[layer_id](expected, expected_cache, impl, plan, expected_picks)
        assert torch.equal(picks, expected_picks)
        torch.testing.assert_close(hidden, expected, atol=1e-9, rtol=0)
    kinds_of_layers = 2 if kind == "glm_moe_dsa" else 1
    # Each kind compiles once for fixed and once for dynamic lengths; the first layer of GLM has no earlier picks.
    assert counter.frame_count <= 2 * kinds_of_layers + 1


@pytest.mark.parametrize("is_prefill", [True, False])
@torch.no_grad()
def test_nothing_is_copied(is_prefill: bool, device: str) -> None:
    """Queries, attention's output, values and caches: written by the op that makes them, read by the next one.

    In the generated code no fused kernel, which a copy would be, may touch what these ops read or write.
    """
    config = config_of("deepseek_v32", 2)
    layer, impl = layer_of(config, 1, device).bfloat16(), get_mla_impl(config, ParallelismConfig())
    assert config.num_heads in ATTENTION_HEADS  # else the added heads of q are zeroed by a fused kernel
    caches = [PagedKvCache(2, 64, 16, device) for _ in range(2)]
    plan = prepare(impl, [20] if is_prefill else [1] * 4, [0] if is_prefill else [100] * 4, is_prefill, device)
    hidden = hidden_states(20 if is_prefill else 4, device).bfloat16()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    (out, picks), codes = run_and_get_code(lambda: compiled(hidden, caches[0], impl, plan))
    expected, expected_picks = layer(hidden, caches[1], impl, plan)

    (code,) = codes
    assert not re.search(r"copy_\(|\bclone\(|auto_functionalized", code)
    fused = re.findall(r"^ +(?:cpp|triton)_\w*fused\w*(?:\.run)?\((.*)\)$", code, re.MULTILINE)
    assert len(fused) >= 2  # the norms, two of which may share a kernel
    ops = re.findall(r"torch\.ops\.sparse_cp_ops(?:_nn)?\.(\w+)\.default\((.*)\)$", code, re.MULTILINE)
    steps = {"rope_": 1, "write_kv_cache": 1, "indexer_topk_ragged_cp": 1, "sparse_mla_fp8_cp": 1, "bmm_into": 2}
    for op, count in (steps if is_prefill else {"decode_step": 1}).items():
        calls = [arguments for name, arguments in ops if name == op]
        assert len(calls) == count, op
        reads_norms = op == "decode_step"  # and besides them the caches, which are arguments of the graph
        touched = [name for name in tensors_in(calls) if not reads_norms or name.startswith("arg")]
        shared = set(touched) & set(tensors_in(fused))
        assert not shared, f"{op} shares {shared} with a fused kernel"

    # The norms are fused and round once where eager ones round between steps: picks of close scores may differ.
    assert (picks == expected_picks).float().mean() > 0.9
    assert (out - expected).float().norm() <= 0.05 * expected.float().norm()


def tensors_in(calls: list[str]) -> list[str]:
    return re.findall(r"\b(?:buf|arg)\d+(?:_\d+)?\b", " ".join(calls))


def test_a_layer_of_the_cache_shares_its_pages() -> None:
    cache = PagedKvCache(3, 4, 16, indexer_layers=[True, False, True])
    alone = cache.layer(1)
    assert (alone.num_layers, alone.num_pages, alone.page_size) == (1, 4, 16)
    assert alone.mla[0] is cache.mla[1]
    assert alone.indexer == [None]
    assert cache.layer(2).indexer[0] is cache.indexer[2]
    assert (cache.num_layers, len(cache.mla)) == (3, 3)
    with pytest.raises(ValueError, match="layer_id: expected 0 to 2, got 3"):
        cache.layer(3)
