import math

import pytest
import torch
from record_cases import (
    MAX_POSITIONS,
    assert_same_bytes,
    compilations,
    random_positions,
    rope_table,
    special_rows,
)
from torch import Tensor

from sparse_cp_ops import ops, reference

LAYOUTS = pytest.mark.parametrize("interleaved", [True, False])


def check(device: str, x: Tensor, positions: Tensor, table: Tensor, interleaved: bool) -> None:
    """Kernel on a copy of ``x`` with its strides against the reference, byte for byte."""
    everything = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())  # type: ignore[call-overload]
    storage = everything.clone().to(device)
    actual = storage.as_strided(x.shape, x.stride(), x.storage_offset())
    before = storage.clone()
    ops.rope_(actual, positions.to(device), table.to(device), interleaved)
    expected = x.clone()
    reference.rope_(expected, positions, table, interleaved)
    assert_same_bytes(actual, expected)
    # Nothing but the view was written.
    before.as_strided(x.shape, x.stride(), x.storage_offset()).copy_(actual)
    assert_same_bytes(storage, before, "memory around the view")
    # The same from a source that stays as it is, into a view with other strides.
    target = torch.empty(*x.shape[:-1], x.shape[-1] + 8, dtype=x.dtype, device=device)[..., 8:]
    source = everything.clone().to(device).as_strided(x.shape, x.stride(), x.storage_offset())
    ops.rope_(target, positions.to(device), table.to(device), interleaved, source)
    assert_same_bytes(target, expected)
    assert_same_bytes(source, x)


@LAYOUTS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "shape",
    [
        (1, 64),
        (13, 64),
        (5, 1, 64),
        (3, 128, 64),
        (7, 3, 64),
        (4, 5, 2),
        (4, 5, 6),
        (4, 2, 32),
        (3, 4, 80),
        (2, 3, 256),
        (2, 3, 8200),  # on CUDA more pieces than a block has threads
        (2, 70_000, 8),  # and more heads than a grid's y
    ],
)
def test_same_bytes_as_reference(device: str, shape: tuple[int, ...], dtype: torch.dtype, interleaved: bool) -> None:
    x = torch.randn(shape).to(dtype)
    check(device, x, random_positions(shape[0], outside=3), rope_table(shape[-1]), interleaved)


@LAYOUTS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_strided_views_in_place(device: str, dtype: torch.dtype, interleaved: bool) -> None:
    table, positions = rope_table(), random_positions(9)
    query = torch.randn(9, 6, 192).to(dtype)
    for view in [
        query[..., 128:],
        query[..., 3:67],  # rows that no vector load fits
        query[:, 1::2, :64],
        query[:, 2, 128:],
        torch.randn(6, 9, 64).to(dtype).transpose(0, 1),
        torch.randn(9, 6, 65).to(dtype)[..., :64],
    ]:
        check(device, view, positions, table, interleaved)


@LAYOUTS
def test_nan_and_inf_stay_in_their_pair(device: str, interleaved: bool) -> None:
    x = special_rows(24, 64)
    check(device, x, random_positions(24), rope_table(), interleaved)
    check(device, x.float(), random_positions(24), rope_table(), interleaved)


@LAYOUTS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_against_complex_rotation(device: str, dtype: torch.dtype, interleaved: bool) -> None:
    x, positions, table = torch.randn(50, 3, 64).to(dtype), random_positions(50), rope_table()
    actual = x.clone().to(device)
    ops.rope_(actual, positions.to(device), table.to(device), interleaved)
    rows = table.double()[positions.long()]
    turn = torch.complex(rows[:, :32], rows[:, 32:]).unsqueeze(1)
    wide = x.double()
    a, b = (wide[..., ::2], wide[..., 1::2]) if interleaved else (wide[..., :32], wide[..., 32:])
    rotated = torch.complex(a, b) * turn
    parts = [rotated.real, rotated.imag]
    expected = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
    # Two products and a sum in fp32, each within 2^-24 of |a| + |b| <= sqrt(2) |pair|; then one rounding of the dtype.
    magnitude = rotated.abs()
    magnitude = torch.stack([magnitude] * 2, -1).flatten(-2) if interleaved else torch.cat([magnitude] * 2, -1)
    fp32_error = 3 * 2**-24 * math.sqrt(2) * magnitude
    rounding = 2**-8 if dtype == torch.bfloat16 else 0.0
    error = (actual.cpu().double() - expected).abs()
    assert (error <= fp32_error + rounding * (expected.abs() + fp32_error)).all()


@LAYOUTS
def test_position_outside_the_table_gives_nan_in_that_row_only(device: str, interleaved: bool) -> None:
    x = torch.ones(6, 2, 64, dtype=torch.bfloat16, device=device)
    positions = torch.tensor([0, -1, MAX_POSITIONS - 1, MAX_POSITIONS, 2**31 - 1, -(2**31)], dtype=torch.int32)
    ops.rope_(x, positions.to(device), rope_table().to(device), interleaved)
    assert x.isnan().flatten(1).all(1).tolist() == [False, True, False, True, True, True]
    assert not x[0].isnan().any()
    assert not x[2].isnan().any()
    empty_table = torch.empty(0, 64, device=device)
    ops.rope_(x, positions.to(device), empty_table, interleaved)
    assert x.isnan().all()


@LAYOUTS
def test_70000_rows(device: str, interleaved: bool) -> None:
    check(device, torch.randn(70_000, 1, 8).bfloat16(), random_positions(70_000), rope_table(8), interleaved)


@pytest.mark.parametrize("shape", [(0, 64), (0, 4, 64), (3, 0, 64), (3, 2, 0)])
def test_empty(device: str, shape: tuple[int, ...]) -> None:
    x = torch.ones(shape, dtype=torch.bfloat16, device=device)
    ops.rope_(x, torch.zeros(shape[0], dtype=torch.int32, device=device), rope_table(shape[-1]).to(device), True)
    assert x.shape == shape


def test_arguments_are_named_in_errors(device: str) -> None:
    x = torch.randn(4, 3, 64, device=device)
    positions, table = torch.zeros(4, dtype=torch.int32, device=device), rope_table().to(device)
    with pytest.raises(TypeError, match=r"rope_: positions: expected a torch\.Tensor, got list"):
        ops.rope_(x, [0], table, True)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="rope_: interleaved: expected bool, got int"):
        ops.rope_(x, positions, table, 1)  # type: ignore[arg-type]
    for bad_x, bad_positions, bad_table, message in [
        (x[0, 0], positions, table, "x: expected 2 or 3 dimensions, got 1"),
        (x.double(), positions, table, "x: expected dtype bfloat16 or float32, got float64"),
        (x, positions[:, None], table, "positions: expected 1 dimensions, got 2"),
        (x, positions.long(), table, "positions: expected dtype int32, got int64"),
        (x, positions[:3], table, r"positions: expected shape \[4\], got \[3\]"),
        (x[:2], positions[::2], table, "positions: expected a contiguous tensor"),
        (x, positions, table.bfloat16(), "cos_sin_cache: expected dtype float32, got bfloat16"),
        (x, positions, table[0], "cos_sin_cache: expected 2 dimensions, got 1"),
        (x, positions, table[:, :32], "cos_sin_cache: expected a contiguous tensor"),
        (x, positions, rope_table(32).to(device), r"x: expected shape \[\*, \*, 32\], got \[4, 3, 64\]"),
        (x[:, 0], positions, rope_table(32).to(device), r"x: expected shape \[\*, 32\], got \[4, 64\]"),
        (x[..., :3], positions, torch.zeros(5, 3, device=device), "cos_sin_cache: expected an even rope_dim"),
        (x[..., ::2], positions, rope_table(32).to(device), "x: expected a contiguous last dimension, got stride 2"),
        (x[:1].expand(4, 3, 64), positions, table, "x: expected memory without overlap because it is written"),
        (x.as_strided((4, 3, 64), (96, 32, 1)), positions, table, "x: expected memory without overlap"),
    ]:
        with pytest.raises(ValueError, match=message):
            ops.rope_(bad_x, bad_positions, bad_table, True)
    with pytest.raises(TypeError, match=r"rope_: source: expected a torch\.Tensor, got int"):
        ops.rope_(x, positions, table, True, 1)  # type: ignore[arg-type]
    for source, message in [
        (x[:, 0], "source: expected 3 dimensions as x, got 2"),
        (x.bfloat16(), "source: expected dtype float32 as x, got bfloat16"),
        (x[:, :2], r"source: expected shape \[4, 3, 64\], got \[4, 2, 64\]"),
        (x.new_ones(4, 3, 128)[..., ::2], "source: expected a contiguous last dimension, got stride 2"),
        (x, "x: expected memory of its own because it is written, got memory that overlaps source"),
    ]:
        with pytest.raises(ValueError, match=message):
            ops.rope_(x, positions, table, True, source)
    with pytest.raises(RuntimeError, match="rope_ is inference only, but x requires grad"):
        ops.rope_(x.clone().requires_grad_(), positions, table, True)


def test_value_checks_name_row_position_and_value(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, table = torch.randn(3, 64, device=device), rope_table().to(device)
    positions = torch.tensor([0, 5, MAX_POSITIONS], dtype=torch.int32, device=device)
    monkeypatch.setenv("SPARSE_CP_OPS_CHECK", "1")
    with pytest.raises(ValueError, match=r"positions: row 2: expected a position inside .*\[0, 97\), got 97"):
        ops.rope_(x, positions, table, True)
    ops.rope_(x[:2], positions[:2], table, True)
    monkeypatch.setenv("SPARSE_CP_OPS_CHECK", "0")
    ops.rope_(x, positions, table, True)
    assert x[2].isnan().all()


@LAYOUTS
@pytest.mark.parametrize("shape", [(5, 64), (5, 3, 64)])
def test_opcheck(device: str, shape: tuple[int, ...], interleaved: bool) -> None:
    args = (torch.randn(shape, device=device), random_positions(5).to(device), rope_table().to(device), interleaved)
    torch.library.opcheck(torch.ops.sparse_cp_ops.rope_.default, args)
    torch.library.opcheck(torch.ops.sparse_cp_ops.rope_.default, (*args, torch.randn(shape, device=device)))


def test_compiles_once_for_all_lengths(device: str) -> None:
    table = rope_table().to(device)

    def rotate(x: Tensor, positions: Tensor) -> Tensor:
        ops.rope_(x, positions, table, True)
        return x * 2

    def arguments(length: int) -> tuple[Tensor, Tensor]:
        return torch.randn(length, 3, 64).bfloat16().to(device), random_positions(length).to(device)

    assert compilations(rotate, arguments) <= 3
