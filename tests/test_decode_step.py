"""What decoding layers call in place of the single ops: the same numbers, eager, compiled and in CUDA graphs."""

from typing import Any

import pytest
import torch
from test_attend_new_rows import NAMES, arguments, assert_same_bits, clones
from torch import Tensor, nn

from sparse_cp_ops import ops
from sparse_cp_ops.nn.decode_step import absorb, is_plain, project_values, traced_decode_step
from sparse_cp_ops.nn.linear_fp32 import linear_fp32

HEADS, PADDED = 12, 16
CACHES = slice(16, 18)  # among the arguments of the op


def inputs(device: str, dtype: torch.dtype = torch.bfloat16) -> tuple[list[Any], dict[str, Any], Tensor]:
    """Arguments of the op, those of ``attend_new_rows`` behind the same projections, and ``w_vc``."""
    given = arguments(device)

    def random(*shape: int) -> Tensor:
        return (torch.randn(*shape, device=device) * shape[-1] ** -0.5).to(dtype)

    hidden, w_index = random(10, 64), random(8, 64).float()
    query_latent, w_q = random(10, 32), random(HEADS * 192, 32)
    w_kc, w_vc = random(HEADS, 512, 128).mT, random(HEADS, 40, 512)
    queries = nn.functional.linear(query_latent, w_q).view(10, HEADS, 192)
    given |= {"q": absorb(queries, w_kc, PADDED), "queries": queries.bfloat16()}
    given["index_weights"] = linear_fp32(hidden, w_index)
    weights = (w_q, w_kc, w_vc, w_index)
    others = [given[name] for name in NAMES[2:] if name != "index_weights"]
    return [hidden, query_latent, *weights, PADDED, *others], given, w_vc


def expected_of(given: dict[str, Any], w_vc: Tensor) -> tuple[Tensor, Tensor]:
    out, indices = ops.attend_new_rows(**given)
    return project_values(out, w_vc), indices


def own_caches(values: list[Any]) -> list[Any]:
    return [v.clone() if isinstance(v, Tensor) and v.dtype == torch.uint8 else v for v in values]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_absorbed_queries(device: str, dtype: torch.dtype) -> None:
    wide = torch.randn(7, HEADS, 200, device=device).to(dtype)
    queries = wide[..., 4:196]
    w_kc = torch.randn(HEADS, 128, 512, device=device).to(dtype)
    absorbed = absorb(queries, w_kc, PADDED)
    nope, weight = queries[..., :128].double(), w_kc.double()
    expected = torch.einsum("rhk,hkc->rhc", nope, weight)
    # A sum of 128 products in float32, rounded once to bf16.
    bound = 2**-8 * expected.abs() + 128 * 2**-23 * torch.einsum("rhk,hkc->rhc", nope.abs(), weight.abs())
    assert ((absorbed[:, :HEADS, :512].double() - expected).abs() <= bound).all()
    assert not absorbed[:, HEADS:].any()


def test_values(device: str) -> None:
    attended = torch.randn(7, PADDED, 512, device=device).bfloat16()
    w_vc = torch.randn(HEADS, 40, 512, device=device).bfloat16()
    values = project_values(attended, w_vc)
    latent, weight = attended[:, :HEADS].double(), w_vc.double()
    expected = torch.einsum("rhk,hck->rhc", latent, weight)
    # A sum of 512 products in float32, rounded once to bf16.
    bound = 2**-8 * expected.abs() + 512 * 2**-23 * torch.einsum("rhk,hck->rhc", latent.abs(), weight.abs())
    assert ((values.view(7, HEADS, 40).double() - expected).abs() <= bound).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_bits_of_its_steps(device: str, dtype: torch.dtype) -> None:
    values, given, w_vc = inputs(device, dtype)
    values = own_caches(values)
    out, indices = traced_decode_step(*values)
    expected, expected_indices = expected_of(given, w_vc)
    assert_same_bits(out, expected)
    assert_same_bits(indices, expected_indices)
    for name, cache in zip(("mla_cache", "indexer_cache"), values[CACHES], strict=True):
        assert_same_bits(cache, given[name])


def test_the_op_says_what_it_does(device: str) -> None:
    torch.library.opcheck(traced_decode_step, tuple(inputs(device)[0]))


def test_gradients_are_refused_rather_than_lost(device: str) -> None:
    values = inputs(device)[0]
    values[2] = values[2].requires_grad_()
    with pytest.raises(RuntimeError, match="decode_step is inference only, but w_q requires grad"):
        traced_decode_step(*values)
    with torch.no_grad():
        traced_decode_step(*values)


@pytest.mark.cuda
def test_a_graph_runs_query_heads_beside_the_indexer() -> None:
    values, given, w_vc = inputs("cuda")
    values = own_caches(values)
    before = own_caches(values)[CACHES]
    traced_decode_step(*values)  # what cuBLAS needs once
    for cache, old in zip(values[CACHES], before, strict=True):
        cache.copy_(old)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, indices = traced_decode_step(*values)
    out.fill_(torch.nan)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    expected, expected_indices = expected_of(clones(given), w_vc)
    assert_same_bits(out, expected)
    assert_same_bits(indices, expected_indices)


def test_layers_that_do_more_than_a_product_are_not_plain() -> None:
    hooked, patched = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    hooked.register_forward_hook(lambda *_: None)
    patched.forward = lambda x: x  # type: ignore[method-assign, assignment]
    biased = nn.Linear(2, 2)
    assert is_plain(nn.Linear(2, 2, bias=False))
    assert not any(
        is_plain(layer)
        for layer in (biased, hooked, patched, nn.Identity(), type("Other", (nn.Linear,), {})(2, 2, bias=False))
    )
