"""When a layer takes ``attend_new_rows`` for its steps: never in the place of what somebody has changed about them."""

from typing import Any

import pytest
import torch
from hf_reference import small_config
from torch import Tensor

from sparse_cp_ops.config import ParallelismConfig
from sparse_cp_ops.kv_cache import PagedKvCache
from sparse_cp_ops.nn import AttentionInputs, MlaAttention, MlaConfig, SparseMlaImpl
from sparse_cp_ops.nn.indexer import Indexer

PAGE = 16
NEW, CACHED = [90, 1], [0, 70]  # of a prefill; the second request decodes, too


def config_of(topk: int) -> MlaConfig:
    hf = small_config("deepseek_v32", num_hidden_layers=1, index_topk=topk)
    return MlaConfig.from_hf(hf, page_size=PAGE, max_positions=512)


def layer_of(topk: int, device: str) -> MlaAttention:
    torch.manual_seed(5)
    layer = MlaAttention(config_of(topk), 0, ParallelismConfig())
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    return layer.to(device)


@torch.no_grad()
def results(layer: MlaAttention, impl: SparseMlaImpl, is_prefill: bool) -> tuple[Tensor, Tensor]:
    device = layer.o_proj.weight.device
    new, cached = (NEW, CACHED) if is_prefill else ([1, 1], [90, 70])
    tables = torch.arange(16, device=device, dtype=torch.int32).view(2, 8)
    new_lens, prefix_lens = (torch.tensor(lens, dtype=torch.int32) for lens in (new, cached))
    plan = impl.prepare(AttentionInputs(is_prefill, new_lens, prefix_lens, tables))
    generator = torch.Generator().manual_seed(3)
    cache = PagedKvCache(1, 16, PAGE, device)
    hidden = torch.randn(sum(new), layer.mla_config.hidden_size, generator=generator).to(device)
    return layer(hidden, cache, impl, plan)


@pytest.mark.parametrize("is_prefill", [True, False])
def test_the_layer_s_numbers_count_for_its_indexer(is_prefill: bool, device: str) -> None:
    """An impl of another configuration gives no other number of picks than one whose forward is its own."""

    class Own(SparseMlaImpl):
        def forward(self, *arguments: Any) -> tuple[Tensor, Tensor]:
            return super().forward(*arguments)

    layer = layer_of(128, device)
    out, picks = results(layer, SparseMlaImpl(config_of(64), ParallelismConfig()), is_prefill)
    expected_out, expected_picks = results(layer, Own(config_of(64), ParallelismConfig()), is_prefill)
    assert picks.shape[1] == 128
    assert torch.equal(picks, expected_picks)
    assert torch.equal(out, expected_out)  # one call and its steps give the same bits


@pytest.mark.parametrize("is_prefill", [True, False])
@pytest.mark.parametrize("what", ["impl", "hook", "pre-hook", "indexer"])
def test_nobody_s_step_is_left_out(what: str, is_prefill: bool, device: str) -> None:
    calls: list[str] = []

    class Own(SparseMlaImpl):
        def forward(self, *arguments: Any) -> tuple[Tensor, Tensor]:
            calls.append("forward")
            return super().forward(*arguments)

    class OwnIndexer(Indexer):
        def project_keys(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
            calls.append("keys")
            return super().project_keys(hidden)

    layer = layer_of(64, device)
    impl = (Own if what == "impl" else SparseMlaImpl)(layer.mla_config, ParallelismConfig())
    if what == "hook":
        impl.op.register_forward_hook(lambda *_: calls.append("hook"))
    elif what == "pre-hook":
        impl.op.register_forward_pre_hook(lambda *_: calls.append("pre-hook"))
    elif what == "indexer":
        own = OwnIndexer(layer.mla_config).to(device)
        own.load_state_dict(layer.indexer.state_dict())
        layer.indexer = own
    results(layer, impl, is_prefill)
    assert calls
