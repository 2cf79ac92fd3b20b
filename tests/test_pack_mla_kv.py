from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from record_cases import (
    MAX_POSITIONS,
    OUTSIDE,
    assert_same_bytes,
    bits,
    compilations,
    random_positions,
    rope_table,
    special_rows,
    strided,
)
from torch import Tensor

from sparse_cp_ops import ops, reference

FORMATS = pytest.mark.parametrize("scale_format", ["ue8m0", "fp32"])
LAYOUTS = pytest.mark.parametrize("interleaved", [True, False])


@dataclass(frozen=True)
class Case:
    compressed_kv: Tensor
    k_pe: Tensor
    positions: Tensor
    table: Tensor
    interleaved: bool = True
    scale_format: str = "ue8m0"

    def reference(self) -> Tensor:
        records = torch.zeros(self.compressed_kv.shape[0], 656, dtype=torch.uint8)
        reference.pack_mla_kv(
            self.compressed_kv, self.k_pe, self.positions, self.table, records, self.interleaved, self.scale_format
        )
        return records

    def pack(self, device: str, make_view: bool = False) -> Tensor:
        """The op's records; ``make_view`` passes every row tensor as columns of a wider one."""
        rows = self.compressed_kv.shape[0]
        tensors = [x.to(device) for x in (self.compressed_kv, self.k_pe)]
        records = torch.empty(rows, 656, dtype=torch.uint8, device=device)
        if make_view:
            tensors = [strided(x, before=9) for x in tensors]
            records = strided(records, before=16, after=32)
        table = self.table.to(device)
        ops.pack_mla_kv(*tensors, self.positions.to(device), table, records, self.interleaved, self.scale_format)
        return records


def random_case(rows: int, outside: int = 0) -> Case:
    return Case(special_rows(rows, 512), special_rows(rows, 64), random_positions(rows, outside), rope_table())


@FORMATS
@LAYOUTS
@pytest.mark.parametrize("rows", [1, 7, 130])
def test_same_bytes_as_reference(device: str, rows: int, interleaved: bool, scale_format: str) -> None:
    case = replace(random_case(rows, outside=5), interleaved=interleaved, scale_format=scale_format)
    assert_same_bytes(case.pack(device), case.reference())


@FORMATS
def test_strided_views_in_place(device: str, scale_format: str) -> None:
    case = replace(random_case(33), scale_format=scale_format)
    records = case.pack(device, make_view=True)
    assert records.stride(0) == 656 + 48
    assert_same_bytes(records, case.reference())
    around = records.as_strided((33, 704), (704, 1), 0)
    assert not around[:, :16].any()
    assert not around[:, 672:].any()
    fused = torch.randn(33, 576).bfloat16()
    case = replace(case, compressed_kv=fused[:, :512], k_pe=fused[:, 512:])
    assert_same_bytes(case.pack(device), case.reference())


def test_every_bf16_value_at_scale_one(device: str) -> None:
    """All 34,690 bf16 values up to 448, with all ties of e4m3, beside a 448 that makes the scale 1."""
    magnitudes = torch.arange(0, 0x43E1, dtype=torch.int16)
    values = torch.cat([magnitudes.view(torch.bfloat16), -magnitudes.view(torch.bfloat16)])
    tiles = torch.zeros(-(-len(values) // (4 * 127)) * 4, 127, dtype=torch.bfloat16)
    tiles.view(-1)[: len(values)] = values
    kv = torch.cat([tiles, torch.full((len(tiles), 1), 448.0).bfloat16()], dim=1).view(-1, 512)
    rows = len(kv)
    for scale_format in ("ue8m0", "fp32"):
        case = Case(kv, torch.zeros(rows, 64).bfloat16(), random_positions(rows), rope_table(), True, scale_format)
        records = case.pack(device)
        scales = records[:, 512:528].contiguous().view(torch.float32)
        assert (scales == 1).all()
        assert_same_bytes(records[:, :512], kv.to(torch.float8_e4m3fn).view(torch.uint8))


@FORMATS
def test_scales(device: str, scale_format: str) -> None:
    """Scales against fp64, also where amax / 448 is a power of two or just beside one, and for zero tiles."""
    exponents = torch.arange(-13, 100)
    exact = 448.0 * torch.exp2(exponents.double())
    amax = torch.cat([exact, exact * (1 + 2**-7), exact * (1 - 2**-8), torch.tensor([0.0, 1e-40, 1e-4, 9.9e-5])])
    amax = amax.bfloat16()
    kv = torch.zeros(len(amax), 512, dtype=torch.bfloat16)
    kv[:, 3], kv[:, 128 + 100], kv[:, 511] = amax, -amax, amax / 2
    case = Case(kv, torch.zeros(len(kv), 64).bfloat16(), random_positions(len(kv)), rope_table())
    case = replace(case, scale_format=scale_format)
    records = case.pack(device).cpu()
    scales = records[:, 512:528].contiguous().view(torch.float32).double()
    wanted = torch.stack([amax, amax, torch.zeros_like(amax), amax / 2], dim=1).double().clamp(min=1e-4) / 448
    if scale_format == "fp32":
        # amax floor and quotient are rounded to fp32 once each
        assert ((scales - wanted).abs() <= wanted * 2**-23).all()
    else:
        mantissa, _ = torch.frexp(scales)
        assert (mantissa == 0.5).all()
        assert (scales >= wanted).all()
        assert (scales < 2 * wanted).all()
    assert_same_bytes(records, case.reference())


@FORMATS
def test_every_bf16_amax(device: str, scale_format: str) -> None:
    """All 32,640 positive bf16 values as the amax of a tile: the quotient by 448 is rounded as a division rounds it."""
    amax = torch.arange(0, 0x7F80, dtype=torch.int16).view(torch.bfloat16)
    tiles = torch.zeros(len(amax), 128, dtype=torch.bfloat16)
    tiles[:, 77], tiles[:, 78] = amax, -amax / 3
    kv = tiles.view(-1, 512)
    rows = len(kv)
    case = Case(kv, torch.zeros(rows, 64).bfloat16(), random_positions(rows), rope_table(), True, scale_format)
    assert_same_bytes(case.pack(device), case.reference())


@FORMATS
def test_values_against_fp64(device: str, scale_format: str) -> None:
    case = replace(random_case(200), scale_format=scale_format)
    records = case.pack(device).cpu()
    scales = records[:, 512:528].contiguous().view(torch.float32).double().unsqueeze(-1)
    values = records[:, :512].view(torch.float8_e4m3fn).double().view(-1, 4, 128) * scales
    wanted = case.compressed_kv.double().view(-1, 4, 128)
    good = wanted.isfinite().all(-1)
    assert good.sum() > 700
    # e4m3 keeps 3 mantissa bits (half a unit is 2^-4 of the value) above 2^-6 and a step of 2^-9 below; the quotient
    # is rounded to fp32 before, which moves ties by 2^-24.
    bound = torch.maximum(wanted.abs() * 2**-4, scales * 2**-10) * (1 + 2**-20)
    assert ((values - wanted).abs() <= bound)[good].all()
    assert (records[:, :512].view(-1, 4, 128)[~good] == 0x7F).all()
    assert (scales.squeeze(-1)[~good] == 1).all()


def test_nan_tile_leaves_its_neighbours(device: str) -> None:
    kv = torch.ones(3, 512, dtype=torch.bfloat16)
    kv[0, 200], kv[1, 511], kv[2, 0] = torch.nan, torch.inf, -torch.inf
    case = Case(kv, torch.ones(3, 64).bfloat16(), random_positions(3), rope_table())
    records = case.pack(device)
    bad = (records[:, :512] == 0x7F).view(3, 4, 128)
    assert bad.all(-1).tolist() == [[False, True, False, False], [False] * 3 + [True], [True] + [False] * 3]
    assert bad.sum() == 3 * 128
    scales = records[:, 512:528].contiguous().view(torch.float32)
    assert scales.cpu()[bad.all(-1).cpu()].tolist() == [1, 1, 1]


@LAYOUTS
def test_position_outside_the_table(device: str, interleaved: bool) -> None:
    positions = torch.tensor([0, *OUTSIDE, MAX_POSITIONS - 1], dtype=torch.int32)
    case = Case(torch.randn(6, 512).bfloat16(), torch.randn(6, 64).bfloat16(), positions, rope_table(), interleaved)
    records = case.pack(device)
    rope = records[:, 528:].contiguous().view(torch.bfloat16)
    assert rope.isnan().all(1).tolist() == [False, True, True, True, True, False]
    assert rope.isnan().sum() == 4 * 64
    assert_same_bytes(records, case.reference())


def test_70000_rows(device: str) -> None:
    kv = torch.randn(1000, 512).bfloat16().repeat(70, 1)
    case = Case(kv, kv[:, :64], random_positions(1000).repeat(70), rope_table())
    records = case.pack(device)
    first = Case(kv[:1000], kv[:1000, :64], case.positions[:1000], case.table).reference()
    assert_same_bytes(records, first.repeat(70, 1))


def test_empty(device: str) -> None:
    kv = torch.empty(0, 512, dtype=torch.bfloat16)
    assert Case(kv, kv[:, :64], random_positions(0), rope_table()).pack(device).shape == (0, 656)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    exponents=st.lists(st.integers(0, 255), min_size=1, max_size=4),
    scale_format=st.sampled_from(["ue8m0", "fp32"]),
    interleaved=st.booleans(),
)
def test_any_bits(seed: int, exponents: list[int], scale_format: str, interleaved: bool) -> None:
    """Rows of random signs and mantissas whose exponents are drawn: denormals, NaN and inf included."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randint(0, 2**16, (3, 576), generator=generator)
    chosen = torch.tensor(exponents)[torch.randint(0, len(exponents), (3, 576), generator=generator)]
    pattern = (noise & 0x807F) | (chosen << 7)
    x = torch.where(pattern >= 2**15, pattern - 2**16, pattern).to(torch.int16).view(torch.bfloat16)
    case = Case(x[:, :512], x[:, 512:], random_positions(3), rope_table(), interleaved, scale_format)
    assert_same_bytes(case.pack("cpu"), case.reference())


@pytest.mark.parametrize("level", ["generic", "auto"])
def test_cpu_levels_write_the_same_bytes(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSE_CP_OPS_CPU", level)
    for scale_format in ("ue8m0", "fp32"):
        case = replace(random_case(64), scale_format=scale_format)
        assert_same_bytes(case.pack("cpu"), case.reference())


def test_arguments_are_named_in_errors(device: str) -> None:
    kv, pe = torch.randn(4, 512, device=device).bfloat16(), torch.randn(4, 64, device=device).bfloat16()
    positions, table = torch.zeros(4, dtype=torch.int32, device=device), rope_table().to(device)
    records = torch.zeros(4, 656, dtype=torch.uint8, device=device)
    good = {
        "compressed_kv": kv,
        "k_pe": pe,
        "positions": positions,
        "cos_sin_cache": table,
        "records": records,
        "interleaved": True,
        "scale_format": "ue8m0",
    }
    ops.pack_mla_kv(**good)  # type: ignore[arg-type]
    wide = torch.zeros(4, 700, dtype=torch.uint8, device=device)
    for name, value, message in [
        ("compressed_kv", kv.float(), "compressed_kv: expected dtype bfloat16, got float32"),
        ("compressed_kv", kv[:, :511], r"compressed_kv: expected shape \[\*, 512\], got \[4, 511\]"),
        ("compressed_kv", kv[None], "compressed_kv: expected 2 dimensions, got 3"),
        (
            "compressed_kv",
            torch.zeros(512, 4, device=device).bfloat16().t(),
            "compressed_kv: expected a contiguous last",
        ),
        ("k_pe", pe[:3], r"k_pe: expected shape \[4, 64\], got \[3, 64\]"),
        ("k_pe", pe.half(), "k_pe: expected dtype bfloat16, got float16"),
        ("positions", positions.long(), "positions: expected dtype int32, got int64"),
        ("cos_sin_cache", rope_table(32).to(device), r"cos_sin_cache: expected shape \[\*, 64\], got \[97, 32\]"),
        ("records", records[:, :655], r"records: expected shape \[4, 656\], got \[4, 655\]"),
        ("records", records.view(torch.int8), "records: expected dtype uint8, got int8"),
        ("records", wide[:, :656], "records: expected a stride that is a multiple of 16 bytes in dimension 0, got 700"),
        ("records", wide[:, 1:657], "records: expected data aligned to 16 bytes"),
        ("records", records[:1].expand(4, 656), "records: expected memory without overlap because it is written"),
        ("scale_format", "e8m0", 'scale_format: expected "ue8m0" or "fp32", got "e8m0"'),
    ]:
        with pytest.raises(ValueError, match=message):
            ops.pack_mla_kv(**{**good, name: value})  # type: ignore[arg-type]
    for name, value, message in [
        ("k_pe", None, r"k_pe: expected a torch\.Tensor, got NoneType"),
        ("interleaved", 1, "interleaved: expected bool, got int"),
        ("scale_format", None, "scale_format: expected str, got NoneType"),
    ]:
        with pytest.raises(TypeError, match=message):
            ops.pack_mla_kv(**{**good, name: value})  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="compressed_kv requires grad"):
        ops.pack_mla_kv(**{**good, "compressed_kv": kv.clone().requires_grad_()})  # type: ignore[arg-type]


def test_value_checks_name_row_position_and_value(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSE_CP_OPS_CHECK", "1")
    case = random_case(3)
    case.pack(device)
    with pytest.raises(ValueError, match=r"positions: row 1: expected a position inside .*\[0, 97\), got -7"):
        replace(case, positions=torch.tensor([0, -7, 1], dtype=torch.int32)).pack(device)


@FORMATS
def test_opcheck(device: str, scale_format: str) -> None:
    case = random_case(5)
    tensors = [x.to(device) for x in (case.compressed_kv, case.k_pe, case.positions, case.table)]
    records = torch.zeros(5, 656, dtype=torch.uint8, device=device)
    torch.library.opcheck(torch.ops.sparse_cp_ops.pack_mla_kv.default, (*tensors, records, True, scale_format))


def test_compiles_once_for_all_lengths(device: str) -> None:
    table = rope_table().to(device)

    def pack(kv: Tensor, positions: Tensor) -> Tensor:
        records = kv.new_empty((kv.shape[0], 656), dtype=torch.uint8)
        ops.pack_mla_kv(kv[:, :512], kv[:, 512:], positions, table, records, True, "ue8m0")
        return records

    def arguments(length: int) -> tuple[Tensor, Tensor]:
        return torch.randn(length, 576).bfloat16().to(device), random_positions(length).to(device)

    assert compilations(pack, arguments) <= 3


def test_result_is_deterministic(device: str) -> None:
    case = random_case(300)
    assert torch.equal(bits(case.pack(device)), bits(case.pack(device)))
