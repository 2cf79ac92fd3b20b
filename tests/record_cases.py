"""Inputs and comparisons of the tests of rope_, quant_q_k_cp, pack_mla_kv, write_kv_cache and dequantize_kv."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

MAX_POSITIONS = 97
OUTSIDE = [-1, -(2**31), MAX_POSITIONS, 2**31 - 1]  # positions without a row in the table


def rope_table(dim: int = 64, max_positions: int = MAX_POSITIONS) -> Tensor:
    """fp32 [max_positions, dim] of frequencies 10000^(-2i/dim)."""
    frequencies = 10000.0 ** (-torch.arange(0, dim, 2).double() / dim)
    angles = torch.arange(max_positions).double()[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=-1).float()


def random_positions(rows: int, outside: int = 0) -> Tensor:
    """int32 [rows] inside the table, but for every ``outside``-th row."""
    positions = torch.randint(0, MAX_POSITIONS, (rows,), dtype=torch.int32)
    if outside:
        bad = torch.arange(0, rows, outside)
        positions[bad] = torch.tensor(OUTSIDE, dtype=torch.int64)[bad // outside % len(OUTSIDE)].int()
    return positions


def special_rows(rows: int, dim: int) -> Tensor:
    """bf16 [rows, dim]: normal values of very different size, with zeros, NaN, inf, denormals and the extremes."""
    x = torch.randn(rows, dim) * torch.exp2(torch.randint(-30, 30, (rows, 1)).float())
    x[x.abs() < 1e-7] = 0.0
    specials = [torch.nan, torch.inf, -torch.inf, 1e-40, -0.0, 3.38e38, -3.38e38, 448.0, 1e-4]
    for row in range(min(rows, len(specials))):
        x[row, row % dim] = specials[row]
    if rows > len(specials) + 3:
        x[len(specials)] = 0.0
        x[len(specials) + 1] = -0.0
        x[len(specials) + 2] = torch.rand(dim) * 1e-39
    return x.bfloat16()


def strided(x: Tensor, before: int = 8, after: int = 24) -> Tensor:
    """The same values as columns of a wider tensor, like a slice of a fused projection."""
    wide = x.new_zeros(*x.shape[:-1], before + x.shape[-1] + after)
    view = wide[..., before : before + x.shape[-1]]
    view.copy_(x)
    return view


def bits(x: Tensor) -> Tensor:
    """The bytes of a tensor on the CPU, so that NaN and the sign of zero count."""
    return x.detach().cpu().contiguous().view(torch.uint8)


def assert_same_bytes(actual: Tensor, expected: Tensor, name: str = "result") -> None:
    assert actual.shape == expected.shape, f"{name}: {actual.shape} != {expected.shape}"
    assert actual.dtype == expected.dtype, f"{name}: {actual.dtype} != {expected.dtype}"
    different = (bits(actual) != bits(expected)).nonzero()
    assert different.numel() == 0, f"{name}: {len(different)} bytes differ, the first at {different[0].tolist()}"


def compilations(function: Callable[..., object], make_arguments: Callable[[int], tuple[object, ...]]) -> int:
    """How often fullgraph compilation happens over 50 lengths >= 2; each compiled result is compared with eager."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, fullgraph=True, backend=counter)
    for length in range(2, 52):
        torch.manual_seed(length)
        eager_arguments = make_arguments(length)
        torch.manual_seed(length)
        arguments = make_arguments(length)
        expected, actual = function(*eager_arguments), compiled(*arguments)
        pairs = zip((*eager_arguments, expected), (*arguments, actual), strict=True)
        for want, got in pairs:
            for a, b in zip(tensors_of(want), tensors_of(got), strict=True):
                assert_same_bytes(b, a, f"length {length}")
    torch._dynamo.reset()
    return int(counter.frame_count)


def tensors_of(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [x for x in value if isinstance(x, Tensor)] if isinstance(value, tuple) else []
