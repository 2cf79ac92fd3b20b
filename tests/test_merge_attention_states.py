import pytest
import torch
from torch._dynamo.testing import CompileCounter

from sparse_cp_ops import ops, reference


def states(parts: int, rows: int, heads: int, dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    outs = torch.randn(parts, rows, heads, dim).to(dtype)
    lses = torch.randn(parts, rows, heads) * 10
    empty = torch.rand(parts, rows, heads) < 0.3
    lses[empty] = -torch.inf
    outs[empty] = torch.nan  # garbage behind an empty state
    if rows:
        lses[:, 0] = -torch.inf
    return outs, lses


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("parts", "rows", "heads", "dim"),
    [(1, 3, 8, 512), (2, 7, 16, 512), (5, 9, 3, 65), (3, 0, 8, 512), (0, 2, 8, 64), (40, 3, 2, 64), (3, 5, 2, 72)],
)
def test_matches_reference(device: str, dtype: torch.dtype, parts: int, rows: int, heads: int, dim: int) -> None:
    outs, lses = states(parts, rows, heads, dim, dtype)
    out, lse = ops.merge_attention_states(outs.to(device), lses.to(device))
    expected_out, expected_lse = reference.merge_attention_states(outs, lses)
    # fp32 sums of at most 5 terms against fp64: a few units in the last place; bf16 may round the other way once.
    rtol = 2**-7 if dtype == torch.bfloat16 else 2e-6
    torch.testing.assert_close(out.cpu(), expected_out, rtol=rtol, atol=2e-6)
    torch.testing.assert_close(lse.cpu(), expected_lse, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unaligned_memory(device: str, dtype: torch.dtype) -> None:
    """Contiguous, but not at an address that whole vectors can be loaded from."""
    outs, lses = states(3, 4, 2, 64, dtype)
    shifted = torch.empty(outs.numel() + 1, dtype=dtype, device=device)[1:].view(outs.shape)
    shifted.copy_(outs)
    out, lse = ops.merge_attention_states(shifted, lses.to(device))
    aligned_out, aligned_lse = ops.merge_attention_states(outs.to(device), lses.to(device))
    assert torch.equal(out, aligned_out)
    assert torch.equal(lse, aligned_lse)


def test_empty_and_nan_states(device: str) -> None:
    outs = torch.full((2, 2, 1, 4), torch.nan, device=device)
    lses = torch.full((2, 2, 1), -torch.inf, device=device)
    lses[0, 1, 0] = torch.nan
    out, lse = ops.merge_attention_states(outs, lses)
    assert out[0].eq(0).all()
    assert lse[0].item() == -torch.inf
    assert out[1].isnan().all()
    assert lse[1].isnan().all()


def test_arguments_are_named_in_errors(device: str) -> None:
    outs, lses = torch.randn(2, 3, 4, 8, device=device), torch.randn(2, 3, 4, device=device)
    with pytest.raises(TypeError, match=r"lses: expected a torch\.Tensor, got list"):
        ops.merge_attention_states(outs, [1.0])  # type: ignore[arg-type]
    for bad_outs, bad_lses, message in [
        (outs[0], lses, "outs: expected 4 dimensions, got 3"),
        (outs.half(), lses, "outs: expected dtype bfloat16 or float32, got float16"),
        (outs, lses.double(), "lses: expected dtype float32, got float64"),
        (outs, lses[:, :2], r"lses: expected shape \[2, 3, 4\], got \[2, 2, 4\]"),
        (outs.transpose(1, 2), lses.transpose(1, 2), "outs: expected a contiguous tensor"),
    ]:
        with pytest.raises(ValueError, match=message):
            ops.merge_attention_states(bad_outs, bad_lses)
    with pytest.raises(RuntimeError, match="outs requires grad"):
        ops.merge_attention_states(outs.clone().requires_grad_(), lses)


def test_opcheck(device: str) -> None:
    args = (torch.randn(2, 3, 4, 8, device=device), torch.randn(2, 3, 4, device=device))
    torch.library.opcheck(torch.ops.sparse_cp_ops.merge_attention_states.default, args)


def test_70000_rows(device: str) -> None:
    outs, lses = states(2, 70_000, 1, 8, torch.float32)
    out, lse = ops.merge_attention_states(outs.to(device), lses.to(device))
    expected_out, expected_lse = reference.merge_attention_states(outs, lses)
    torch.testing.assert_close(out.cpu(), expected_out, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(lse.cpu(), expected_lse, rtol=1e-6, atol=1e-5)


def test_compiles_once_for_all_lengths(device: str) -> None:
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(ops.merge_attention_states, fullgraph=True, dynamic=None, backend=counter)
    for rows in range(2, 52):
        outs, lses = (state.to(device) for state in states(3, rows, 2, 8, torch.float32))
        out, lse = compiled(outs, lses)
        expected_out, expected_lse = ops.merge_attention_states(outs, lses)
        assert torch.equal(out, expected_out)
        assert torch.equal(lse, expected_lse)
    assert counter.frame_count <= 3  # the first, and two recompiles
