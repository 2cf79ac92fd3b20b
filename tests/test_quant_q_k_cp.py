from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from record_cases import OUTSIDE, assert_same_bytes, compilations, random_positions, rope_table, special_rows, strided
from torch import Tensor

from sparse_cp_ops import ops, reference

FORMATS = pytest.mark.parametrize("scale_format", ["ue8m0", "fp32"])
LAYOUTS = pytest.mark.parametrize("interleaved", [True, False])
HADAMARD = pytest.mark.parametrize("hadamard", [True, False])
Result = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Case:
    q: Tensor
    k: Tensor
    weights: Tensor
    positions: Tensor
    table: Tensor
    interleaved: bool = False
    hadamard: bool = True
    weight_scale: float = 0.011048543456039804
    scale_format: str = "ue8m0"
    q_absmax: float = 448.0

    def options(self) -> tuple[Any, ...]:
        return self.interleaved, self.hadamard, self.weight_scale, self.scale_format, self.q_absmax

    def reference(self) -> Result:
        records = torch.zeros(self.q.shape[0], 132, dtype=torch.uint8)
        q_fp8, q_weights = reference.quant_q_k_cp(
            self.q, self.k, self.weights, self.positions, self.table, records, *self.options()
        )
        return q_fp8, q_weights, records

    def quantise(self, device: str, make_view: bool = False) -> Result:
        """The op's results; ``make_view`` passes every row tensor as columns of a wider one."""
        tensors = [x.to(device) for x in (self.q, self.k, self.weights)]
        records = torch.empty(self.q.shape[0], 132, dtype=torch.uint8, device=device)
        if make_view:
            tensors = [strided(x, before=3) for x in tensors]
            records = strided(records, before=4, after=8)
        q_fp8, q_weights = ops.quant_q_k_cp(
            *tensors, self.positions.to(device), self.table.to(device), records, *self.options()
        )
        return q_fp8, q_weights, records


def random_case(rows: int, heads: int, outside: int = 0, special: bool = True, rope_dim: int = 64) -> Case:
    q = special_rows(rows * heads, 128).view(rows, heads, 128) if special else torch.randn(rows, heads, 128).bfloat16()
    k = special_rows(rows, 128).flip(0) if special else torch.randn(rows, 128).bfloat16()
    return Case(q, k, torch.randn(rows, heads), random_positions(rows, outside), rope_table(rope_dim))


def assert_same(actual: Result, expected: Result) -> None:
    for name, a, b in zip(("q_fp8", "q_weights", "k_records"), actual, expected, strict=True):
        assert_same_bytes(a, b, name)


@FORMATS
@LAYOUTS
@HADAMARD
@pytest.mark.parametrize(("rows", "heads"), [(1, 64), (9, 32), (37, 8), (5, 5)])
def test_same_bytes_as_reference(
    device: str, rows: int, heads: int, hadamard: bool, interleaved: bool, scale_format: str
) -> None:
    case = replace(
        random_case(rows, heads, outside=6), hadamard=hadamard, interleaved=interleaved, scale_format=scale_format
    )
    assert_same(case.quantise(device), case.reference())
    half = replace(case, q_absmax=0.875, weights=case.weights.bfloat16(), weight_scale=-3)
    assert_same(half.quantise(device), half.reference())


@pytest.mark.parametrize(
    ("rows", "heads", "interleaved", "scale_format", "hadamard"),
    [(900, 64, False, "ue8m0", True), (1200, 48, True, "fp32", True), (850, 64, True, "ue8m0", False)],
)
def test_many_rows(device: str, rows: int, heads: int, interleaved: bool, scale_format: str, hadamard: bool) -> None:
    """Shapes for which CUDA has a kernel of its own: more sets of 16 heads than warps fit the device."""
    case = random_case(rows, heads, outside=50)
    case = replace(case, interleaved=interleaved, scale_format=scale_format, hadamard=hadamard)
    assert_same(case.quantise(device), case.reference())
    by_head = replace(case, q=case.q.transpose(0, 1).contiguous().transpose(0, 1), weights=case.weights.bfloat16())
    assert_same(by_head.quantise(device), by_head.reference())


@LAYOUTS
@pytest.mark.parametrize("rope_dim", [0, 2, 6, 32, 96, 128])
def test_other_rope_dims(device: str, rope_dim: int, interleaved: bool) -> None:
    case = replace(random_case(11, 16, outside=4, rope_dim=rope_dim), interleaved=interleaved)
    assert_same(case.quantise(device), case.reference())


@LAYOUTS
@FORMATS
def test_strided_views_in_place(device: str, interleaved: bool, scale_format: str) -> None:
    case = replace(random_case(21, 16), interleaved=interleaved, scale_format=scale_format)
    q_fp8, q_weights, records = case.quantise(device, make_view=True)
    assert records.stride(0) == 144
    assert_same((q_fp8, q_weights, records), case.reference())
    around = records.as_strided((21, 144), (144, 1), 0)
    assert not around[:, :4].any()
    assert not around[:, 136:].any()
    fused = torch.randn(21, 16 * 128 + 128 + 16).bfloat16()
    q, k, weights = fused.split([16 * 128, 128, 16], dim=1)
    case = replace(case, q=q.view(21, 16, 128), k=k, weights=weights)
    on_device = fused.to(device)
    views = on_device.split([16 * 128, 128, 16], dim=1)
    records = torch.empty(21, 132, dtype=torch.uint8, device=device)
    positions, table = case.positions.to(device), case.table.to(device)
    q_fp8, q_weights = ops.quant_q_k_cp(
        views[0].view(21, 16, 128), views[1], views[2], positions, table, records, *case.options()
    )
    assert_same((q_fp8, q_weights, records), case.reference())
    by_head = replace(case, q=torch.randn(16, 21, 128).bfloat16().transpose(0, 1))
    assert_same(by_head.quantise(device), by_head.reference())


def sylvester(size: int) -> Tensor:
    """The Hadamard matrix by its definition: entry (i, j) is -1 to the number of ones in i & j, times size^-0.5."""
    signs = [[(-1.0) ** (i & j).bit_count() for j in range(size)] for i in range(size)]
    return torch.tensor(signs, dtype=torch.float64) * size**-0.5


@FORMATS
@LAYOUTS
@HADAMARD
@pytest.mark.parametrize("q_absmax", [448.0, 0.875])
def test_values_against_fp64(
    device: str, q_absmax: float, hadamard: bool, interleaved: bool, scale_format: str
) -> None:
    case = replace(
        random_case(40, 8, special=False),
        hadamard=hadamard,
        interleaved=interleaved,
        scale_format=scale_format,
        q_absmax=q_absmax,
    )
    q_fp8, q_weights, records = (x.cpu() for x in case.quantise(device))
    rows = case.table.double()[case.positions.long()]
    turn = torch.complex(rows[:, :32], rows[:, 32:]).unsqueeze(1)
    x = torch.cat([case.q, case.k.unsqueeze(1)], dim=1).double()
    a, b = (x[..., :64:2], x[..., 1:64:2]) if interleaved else (x[..., :32], x[..., 32:64])
    turned = torch.complex(a, b) * turn
    first = torch.stack([turned.real, turned.imag], -1).flatten(-2)
    if not interleaved:
        first = torch.cat([turned.real, turned.imag], -1)
    wanted = torch.cat([first, x[..., 64:]], -1)
    if hadamard:
        wanted = wanted @ sylvester(128)
    # fp32: three roundings of RoPE, seven of the butterflies, two of the factor, each 2^-24 of at most
    # sum |x| / sqrt(128) (of |a| + |b| without the transform).
    sums = x.abs().sum(-1, keepdim=True)
    fp32_error = 12 * 2**-24 * (sums * 128**-0.5 if hadamard else 2 * x.abs().amax(-1, keepdim=True))
    amax = wanted.abs().amax(-1, keepdim=True)

    k_scale = records[:, 128:].contiguous().view(torch.float32).double().unsqueeze(1)
    k_values = records[:, :128].contiguous().view(torch.float8_e4m3fn).double().unsqueeze(1)
    q_scale = (q_weights.double() / case.weights.double() / case.weight_scale).unsqueeze(-1)
    if scale_format == "ue8m0":
        q_scale = torch.exp2(q_scale.log2().round())
    scales = torch.cat([q_scale, k_scale], dim=1)
    absmax = torch.tensor([q_absmax] * 8 + [448.0], dtype=torch.float64).view(1, 9, 1)
    exact = amax.clamp(min=1e-4) / absmax
    if scale_format == "ue8m0":
        assert (scales >= exact * (1 - 2**-20)).all()
        assert (scales < 2 * exact * (1 + 2**-20)).all()
    else:
        assert ((scales / exact - 1).abs() < 2**-18).all()
    values = torch.cat([q_fp8.view(torch.float8_e4m3fn).double(), k_values], dim=1)
    assert (values.abs() <= absmax).all()
    # As in the records of pack_mla_kv: 3 mantissa bits, a step of 2^-9 below 2^-6; q_scale is read back with 2^-22.
    bound = torch.maximum(wanted.abs() * 2**-4, scales * 2**-10) * (1 + 2**-20) + fp32_error + 2**-20 * wanted.abs()
    assert ((values * scales - wanted).abs() <= bound).all()


def test_hadamard_of_unit_vectors_is_sylvester(device: str) -> None:
    """Row i of the matrix times one power of two: exact in e4m3, so that the order of the transform shows."""
    q = torch.eye(128).bfloat16().unsqueeze(0)
    case = Case(q, q[0, :1], torch.ones(1, 128), torch.zeros(1, dtype=torch.int32), rope_table())
    q_fp8, _, _ = case.quantise(device)
    signs = q_fp8.cpu().view(torch.float8_e4m3fn).double()[0].sign()
    assert torch.equal(signs, sylvester(128).sign())


def test_bad_vectors_stay_alone(device: str) -> None:
    case = random_case(4, 8, special=False)
    case.q[1, 3, 100], case.q[2, 0, 5], case.k[3, 64] = torch.nan, torch.inf, -torch.inf
    q_fp8, q_weights, records = (x.cpu() for x in case.quantise(device))
    bad = (q_fp8 == 0x7F).all(-1)
    assert bad.nonzero().tolist() == [[1, 3], [2, 0]]
    assert (q_fp8 == 0x7F).sum() == 2 * 128
    weight_scale = torch.tensor(case.weight_scale)
    assert torch.equal(q_weights[bad], case.weights[bad] * weight_scale)
    assert (records[:, :128] == 0x7F).all(1).tolist() == [False, False, False, True]
    assert records[3, 128:].view(torch.float32).item() == 1.0


@HADAMARD
def test_position_outside_the_table_makes_the_row_nan(device: str, hadamard: bool) -> None:
    positions = torch.tensor([0, *OUTSIDE, 1], dtype=torch.int32)
    case = replace(random_case(6, 8, special=False), positions=positions, hadamard=hadamard)
    q_fp8, _, records = case.quantise(device)
    assert (q_fp8 == 0x7F).flatten(1).all(1).tolist() == [False, True, True, True, True, False]
    assert (records[:, :128] == 0x7F).all(1).tolist() == [False, True, True, True, True, False]
    assert_same((q_fp8, case.reference()[1], records), case.reference())


def test_scale_that_would_overflow_makes_a_nan_vector(device: str) -> None:
    case = replace(random_case(1, 8, special=False), hadamard=False, q_absmax=1e-30)
    case.q[0, 0, 0] = 3e38
    actual = case.quantise(device)
    assert (actual[0][0, 0] == 0x7F).all()
    assert not (actual[0][0, 1:] == 0x7F).any()
    assert_same(actual, case.reference())


def test_weights_of_any_value(device: str) -> None:
    case = random_case(1, 8, special=False)
    case.weights[0, :6] = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1e-42])
    assert_same(case.quantise(device), case.reference())


def test_zero_vectors_and_scale_floor(device: str) -> None:
    case = random_case(2, 8, special=False)
    case.q[0, 0], case.q[0, 1], case.k[0] = 0.0, 1e-6, 0.0
    actual = case.quantise(device)
    assert not (actual[0][0, 0].cpu() & 0x7F).any()
    floor = records_scale(actual[2])[0]
    assert floor == 2.0**-22  # 1e-4 / 448 = 2.23e-7, rounded up
    assert_same(actual, case.reference())


def records_scale(records: Tensor) -> Tensor:
    return records[:, 128:].cpu().contiguous().view(torch.float32).squeeze(1)


def test_70000_rows(device: str) -> None:
    few = random_case(1000, 8, special=False)
    expected = few.reference()
    many = Case(
        few.q.repeat(70, 1, 1), few.k.repeat(70, 1), few.weights.repeat(70, 1), few.positions.repeat(70), few.table
    )
    for a, b in zip(many.quantise(device), expected, strict=True):
        assert_same_bytes(a, b.repeat(70, *[1] * (b.dim() - 1)))


@pytest.mark.parametrize(("rows", "heads"), [(0, 64), (3, 0)])
def test_empty(device: str, rows: int, heads: int) -> None:
    case = random_case(rows, heads, special=False)
    q_fp8, q_weights, records = case.quantise(device)
    assert q_fp8.shape == (rows, heads, 128)
    assert q_weights.shape == (rows, heads)
    assert_same_bytes(records, case.reference()[2])


def test_row_results_do_not_depend_on_other_rows(device: str) -> None:
    case = random_case(70, 24)
    whole = case.quantise(device)
    part = replace(
        case, q=case.q[33:50], k=case.k[33:50], weights=case.weights[33:50], positions=case.positions[33:50]
    ).quantise(device)
    for a, b in zip(part, whole, strict=True):
        assert_same_bytes(a, b[33:50])


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    exponents=st.lists(st.integers(0, 255), min_size=1, max_size=4),
    scale_format=st.sampled_from(["ue8m0", "fp32"]),
    interleaved=st.booleans(),
    hadamard=st.booleans(),
    q_absmax=st.floats(2.0**-100, 448.0),
)
def test_any_bits(
    seed: int, exponents: list[int], scale_format: str, interleaved: bool, hadamard: bool, q_absmax: float
) -> None:
    """Vectors of random signs and mantissas whose exponents are drawn: denormals, NaN and inf included."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randint(0, 2**16, (2, 9, 128), generator=generator)
    chosen = torch.tensor(exponents)[torch.randint(0, len(exponents), (2, 9, 128), generator=generator)]
    pattern = (noise & 0x807F) | (chosen << 7)
    x = torch.where(pattern >= 2**15, pattern - 2**16, pattern).to(torch.int16).view(torch.bfloat16)
    weights = torch.randn(2, 8, generator=generator)
    case = Case(x[:, :8], x[:, 8], weights, random_positions(2), rope_table(), interleaved, hadamard)
    case = replace(case, scale_format=scale_format, q_absmax=q_absmax)
    assert_same(case.quantise("cpu"), case.reference())


@pytest.mark.parametrize("level", ["generic", "auto"])
def test_cpu_levels_write_the_same_bytes(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSE_CP_OPS_CPU", level)
    for interleaved in (True, False):
        case = replace(random_case(40, 8), interleaved=interleaved)
        assert_same(case.quantise("cpu"), case.reference())


def test_arguments_are_named_in_errors(device: str) -> None:
    case = random_case(4, 8, special=False)
    records = torch.zeros(4, 132, dtype=torch.uint8, device=device)
    good: dict[str, Any] = {
        "q": case.q.to(device),
        "k": case.k.to(device),
        "weights": case.weights.to(device),
        "positions": case.positions.to(device),
        "cos_sin_cache": case.table.to(device),
        "k_records": records,
        "interleaved": False,
        "hadamard": True,
        "weight_scale": 1.0,
        "scale_format": "ue8m0",
    }
    ops.quant_q_k_cp(**good)
    wide = torch.zeros(4, 150, dtype=torch.uint8, device=device)
    for name, value, message in [
        ("q", good["q"].float(), "q: expected dtype bfloat16, got float32"),
        ("q", good["q"][..., :64], r"q: expected shape \[\*, \*, 128\], got \[4, 8, 64\]"),
        ("q", good["q"][0], "q: expected 3 dimensions, got 2"),
        ("q", good["q"].mT.contiguous().mT, "q: expected a contiguous last dimension"),
        ("k", good["k"].half(), "k: expected dtype bfloat16, got float16"),
        ("k", good["k"][:3], r"k: expected shape \[4, 128\], got \[3, 128\]"),
        ("weights", good["weights"].double(), "weights: expected dtype bfloat16 or float32, got float64"),
        ("weights", good["weights"][:, :7], r"weights: expected shape \[4, 8\], got \[4, 7\]"),
        ("weights", good["weights"].t().contiguous().t(), "weights: expected a contiguous last dimension"),
        ("positions", good["positions"].long(), "positions: expected dtype int32, got int64"),
        ("cos_sin_cache", rope_table(130).to(device), "expected an even rope_dim of at most 128"),
        ("cos_sin_cache", torch.zeros(9, 63, device=device), "expected an even rope_dim of at most 128"),
        ("k_records", records[:, :131], r"k_records: expected shape \[4, 132\], got \[4, 131\]"),
        ("k_records", records.view(torch.int8), "k_records: expected dtype uint8, got int8"),
        (
            "k_records",
            wide[:, :132],
            "k_records: expected a stride that is a multiple of 4 bytes in dimension 0, got 150",
        ),
        ("k_records", wide[:, 2:134], "k_records: expected data aligned to 4 bytes"),
        ("k_records", records[:1].expand(4, 132), "k_records: expected memory without overlap because it is written"),
        ("scale_format", "UE8M0", 'scale_format: expected "ue8m0" or "fp32", got "UE8M0"'),
        ("q_absmax", 0.0, r"q_absmax: expected a value in \(0, 448\], got 0"),
        ("q_absmax", 448.1, r"q_absmax: expected a value in \(0, 448\], got 448.1"),
        ("q_absmax", float("nan"), r"q_absmax: expected a value in \(0, 448\], got nan"),
        ("weight_scale", float("inf"), "weight_scale: expected a finite float32, got inf"),
        ("weight_scale", 1e39, "weight_scale: expected a finite float32, got 1e"),
    ]:
        with pytest.raises(ValueError, match=message):
            ops.quant_q_k_cp(**{**good, name: value})
    for name, value, message in [
        ("weights", [1.0], r"weights: expected a torch\.Tensor, got list"),
        ("hadamard", "yes", "hadamard: expected bool, got str"),
        ("weight_scale", "1", "weight_scale: expected float, got str"),
        ("q_absmax", True, "q_absmax: expected float, got bool"),
        ("scale_format", 8, "scale_format: expected str, got int"),
    ]:
        with pytest.raises(TypeError, match=message):
            ops.quant_q_k_cp(**{**good, name: value})
    with pytest.raises(RuntimeError, match="q requires grad"):
        ops.quant_q_k_cp(**{**good, "q": good["q"].clone().requires_grad_()})


def test_value_checks_name_row_position_and_value(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSE_CP_OPS_CHECK", "1")
    case = random_case(3, 8)
    case.quantise(device)
    with pytest.raises(ValueError, match=r"positions: row 2: expected a position inside .*\[0, 97\), got 97"):
        replace(case, positions=torch.tensor([0, 1, 97], dtype=torch.int32)).quantise(device)


@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.bfloat16])
def test_opcheck(device: str, weights_dtype: torch.dtype) -> None:
    case = random_case(5, 8, special=False)
    case = replace(case, weights=case.weights.to(weights_dtype))
    tensors = [x.to(device) for x in (case.q, case.k, case.weights, case.positions, case.table)]
    records = torch.zeros(5, 132, dtype=torch.uint8, device=device)
    torch.library.opcheck(torch.ops.sparse_cp_ops.quant_q_k_cp.default, (*tensors, records, *case.options()))


def test_compiles_once_for_all_lengths(device: str) -> None:
    table = rope_table().to(device)

    def quantise(q: Tensor, k: Tensor, weights: Tensor, positions: Tensor) -> Result:
        records = q.new_empty((q.shape[0], 132), dtype=torch.uint8)
        q_fp8, q_weights = ops.quant_q_k_cp(q, k, weights, positions, table, records, False, True, 0.5, "ue8m0")
        return q_fp8, q_weights, records

    def arguments(length: int) -> tuple[Tensor, ...]:
        case = random_case(length, 8, special=False)
        return tuple(x.to(device) for x in (case.q, case.k, case.weights, case.positions))

    assert compilations(quantise, arguments) <= 3
