import pytest
import torch
from builders import random_mla_cache
from record_cases import assert_same_bytes, compilations, random_positions, rope_table
from torch import Tensor

from sparse_cp_ops import ops, reference

PAGE_SIZES = pytest.mark.parametrize("page_size", [16, 32, 64, 128])


@PAGE_SIZES
@pytest.mark.parametrize("scale_kind", ["ue8m0", "fp32", "wild", "tiny"])
def test_same_bytes_as_reference(device: str, scale_kind: str, page_size: int) -> None:
    cache = random_mla_cache(5, page_size, scale_kind)
    slots = torch.cat([torch.randint(0, 5 * page_size, (60,)), torch.arange(5 * page_size)])
    actual = ops.dequantize_kv(cache.to(device), slots.to(device))
    assert_same_bytes(actual, reference.dequantize_kv(cache, slots))


def test_every_byte_against_fp64(device: str) -> None:
    """All e4m3 bytes with random fp32 scales: one rounding to fp32 and one to bf16."""
    cache = torch.zeros(1, 16, 656, dtype=torch.uint8)
    cache[0, :, :512] = torch.arange(512).to(torch.uint8)
    scales = torch.rand(16, 4) * 2
    cache[0, :, 512:528] = scales.view(torch.uint8)
    actual = ops.dequantize_kv(cache.to(device), torch.arange(16, device=device)).cpu()
    table = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(torch.float8_e4m3fn).double()
    wanted = table.repeat(2) * scales.double().repeat_interleave(128, dim=1)
    nan = wanted.isnan()
    assert nan.sum() == 16 * 4
    assert torch.equal(actual[:, :512].isnan(), nan)
    error = (actual[:, :512].double() - wanted).abs()
    assert (error <= wanted.abs() * (2**-8 + 2**-23))[~nan].all()
    assert not actual[:, 512:].any()


def test_round_trip(device: str) -> None:
    """pack -> write -> dequantize gives what e4m3 and its scale keep of the latent, and k_pe as it was rotated."""
    kv, k_pe, positions = torch.randn(90, 512).bfloat16(), torch.randn(90, 64).bfloat16(), random_positions(90)
    records = torch.empty(90, 656, dtype=torch.uint8, device=device)
    table = rope_table().to(device)
    ops.pack_mla_kv(kv.to(device), k_pe.to(device), positions.to(device), table, records, True, "ue8m0")
    cache = torch.zeros(4, 32, 656, dtype=torch.uint8, device=device)
    slots = torch.randperm(128)[:90].to(device)
    ops.write_kv_cache(records, None, None, None, None, cache, None, slots)
    latent, rope = ops.dequantize_kv(cache, slots).split([512, 64], dim=1)
    amax = kv.view(90, 4, 128).abs().amax(-1).repeat_interleave(128, dim=1).double()
    # Half a unit of e4m3 is 2^-4 of the value; below 2^-6 the step is 2^-9 of a scale of at most amax / 224. A value of
    # at most 4 bits times a power of two is exact in bf16.
    bound = torch.maximum(kv.double().abs() * 2**-4, amax / 224 * 2**-10)
    assert ((latent.cpu().double() - kv.double()).abs() <= bound).all()
    rotated = k_pe.to(device)
    ops.rope_(rotated, positions.to(device), table, True)
    assert_same_bytes(rope, rotated)


def test_slots_outside_the_cache_give_zero_rows(device: str) -> None:
    cache = random_mla_cache(2, 16)
    slots = torch.tensor([-1, 32, 31, 2**31, -(2**63), 2**63 - 1, 0])
    out = ops.dequantize_kv(cache.to(device), slots.to(device))
    assert out.ne(0).any(1).tolist() == [False, False, True, False, False, False, True]
    assert_same_bytes(out, reference.dequantize_kv(cache, slots))
    assert not ops.dequantize_kv(cache[:0].to(device), slots.to(device)).any()


def test_nan_payloads(device: str) -> None:
    """NaN bytes and NaN or infinite scales give the one NaN that the op writes; RoPE bits pass unchanged."""
    cache = random_mla_cache(1, 16)
    cache[0, 0, 5], cache[0, 0, 200] = 0x7F, 0xFF
    cache[0, 1, 512:516] = torch.tensor([-torch.nan]).view(torch.uint8)
    cache[0, 2, 516:520] = torch.tensor([torch.inf]).view(torch.uint8)
    cache[0, 3, 528:532] = torch.tensor([0x01, 0x7F, 0xAB, 0xFF], dtype=torch.uint8)
    slots = torch.arange(16)
    out = ops.dequantize_kv(cache.to(device), slots.to(device))
    assert_same_bytes(out, reference.dequantize_kv(cache, slots))
    assert out[0].isnan().nonzero().flatten().tolist() == [5, 200]
    assert out[1].isnan().sum() == 128


def test_strided_pages(device: str) -> None:
    layers = random_mla_cache(8, 16).view(4, 2, 16, 656)
    slots = torch.randperm(64)
    actual = ops.dequantize_kv(layers.to(device)[:, 1], slots.to(device))
    assert_same_bytes(actual, reference.dequantize_kv(layers[:, 1], slots))


def test_70000_rows(device: str) -> None:
    cache = random_mla_cache(8, 64)
    slots = torch.randint(0, 8 * 64, (70_000,))
    actual = ops.dequantize_kv(cache.to(device), slots.to(device)).cpu()
    every_slot = reference.dequantize_kv(cache, torch.arange(8 * 64))
    assert_same_bytes(actual, every_slot[slots])


def test_cache_above_2_gib(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    cache = torch.empty(51_400, 64, 656, dtype=torch.uint8, device=device)
    slots = torch.tensor([3_273_603, 3_273_604, 3_289_599, 0, 3_289_600])
    records = random_mla_cache(1, 16)[0, :4]
    cache[(slots[:4] // 64).to(device), (slots[:4] % 64).to(device)] = records.to(device)
    few = torch.zeros(1, 16, 656, dtype=torch.uint8)
    few[0, :4] = records
    expected = reference.dequantize_kv(few, torch.tensor([0, 1, 2, 3, -1]))
    assert_same_bytes(ops.dequantize_kv(cache, slots.to(device)), expected)


@pytest.mark.parametrize("level", ["generic", "auto"])
def test_cpu_levels_read_the_same_values(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSE_CP_OPS_CPU", level)
    cache, slots = random_mla_cache(2, 64, "fp32"), torch.arange(128)
    assert_same_bytes(ops.dequantize_kv(cache, slots), reference.dequantize_kv(cache, slots))


def test_empty(device: str) -> None:
    cache = random_mla_cache(2, 16).to(device)
    assert ops.dequantize_kv(cache, torch.empty(0, dtype=torch.int64, device=device)).shape == (0, 576)


def test_arguments_are_named_in_errors(device: str) -> None:
    cache, slots = random_mla_cache(2, 16).to(device), torch.arange(4, device=device)
    for bad_cache, bad_slots, message in [
        (cache[0], slots, "kv_cache: expected 3 dimensions, got 2"),
        (cache.view(torch.int8), slots, "kv_cache: expected dtype uint8, got int8"),
        (cache[..., :600], slots, r"kv_cache: expected shape \[\*, \*, 656\], got \[2, 16, 600\]"),
        (cache[:, :8], slots, "kv_cache: expected a page_size of 16, 32, 64 or 128 in dimension 1, got 8"),
        (cache.repeat(1, 2, 1)[:, ::2], slots, "kv_cache: expected contiguous pages, got stride 1312"),
        (cache, slots.int(), "slots: expected dtype int64, got int32"),
        (cache, slots[None], "slots: expected 1 dimensions, got 2"),
        (cache, slots[::2], "slots: expected a contiguous tensor"),
    ]:
        with pytest.raises(ValueError, match=message):
            ops.dequantize_kv(bad_cache, bad_slots)
    with pytest.raises(TypeError, match=r"slots: expected a torch\.Tensor, got list"):
        ops.dequantize_kv(cache, [0])  # type: ignore[arg-type]


def test_value_checks_name_row_and_value(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSE_CP_OPS_CHECK", "1")
    cache = random_mla_cache(2, 16).to(device)
    with pytest.raises(ValueError, match=r"slots: row 2: expected -1 or a slot in \[0, 32\), got 32"):
        ops.dequantize_kv(cache, torch.tensor([-1, 31, 32], device=device))
    ops.dequantize_kv(cache, torch.tensor([-1, 31], device=device))


def test_opcheck(device: str) -> None:
    args = (random_mla_cache(2, 16).to(device), torch.arange(-1, 5, device=device))
    torch.library.opcheck(torch.ops.sparse_cp_ops.dequantize_kv.default, args)


def test_compiles_once_for_all_lengths(device: str) -> None:
    cache = random_mla_cache(4, 16).to(device)

    def read(slots: Tensor) -> Tensor:
        return ops.dequantize_kv(cache, slots) * 2

    assert compilations(read, lambda length: (torch.arange(length, device=device),)) <= 3
