import pytest
import torch
from builders import num_pages, random_block_table, random_mla_cache
from torch import Tensor

from sparse_cp_ops import ops, reference


def assert_within_bounds(out: Tensor, lse: Tensor, exact_out: Tensor, exact_lse: Tensor) -> None:
    """The error bounds of docs/semantics.md against fp64 over the dequantised cache."""
    out, lse = out.cpu().double(), lse.cpu().double()
    assert torch.equal(lse.isneginf(), exact_lse.isneginf())
    empty = exact_lse.isneginf()
    assert (out[empty] == 0).all()
    torch.testing.assert_close(out, exact_out, rtol=2.01 / 128, atol=1e-3)
    torch.testing.assert_close(lse[~empty], exact_lse[~empty], rtol=8.01 / 65536, atol=1e-5)
    norms = (out.square().sum() + exact_out.square().sum()).item()
    if norms:
        assert 1 - 2 * (out * exact_out).sum().item() / norms <= 5e-6


@pytest.mark.parametrize("heads", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("scale_kind", ["ue8m0", "fp32", "wild", "tiny"])
def test_matches_fp64_reference(device: str, heads: int, scale_kind: str) -> None:
    lengths = [100, 300, 70]
    cache = random_mla_cache(num_pages(lengths, 64), 64, scale_kind)
    table = random_block_table(lengths, 64)
    q = torch.randn(6, heads, 576).bfloat16()
    req_ids = torch.tensor([0, 1, 2, -1, 1, 0], dtype=torch.int32)
    kv_lens = torch.tensor([100, 300, 70, 0, 1, 50], dtype=torch.int32)
    indices = torch.randint(-5, 310, (6, 128), dtype=torch.int32)
    arguments = (q, cache, indices, table, req_ids, kv_lens)
    out, lse = ops.sparse_mla_fp8_cp(*(t.to(device) for t in arguments), 0.05)
    assert_within_bounds(out, lse, *reference.sparse_mla_fp8_cp(*arguments, 0.05))
