from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from builders import far_apart, num_pages, random_block_table
from hypothesis import given, settings
from hypothesis import strategies as st
from record_cases import assert_same_bytes, compilations
from torch import Tensor

from sparse_cp_ops import ops, reference

PAGE_SIZES = pytest.mark.parametrize("page_size", [16, 32, 64, 128])


def random_bytes(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


@dataclass(frozen=True)
class Case:
    mla_records: Tensor
    k_records: Tensor | None
    req_ids: Tensor | None
    positions: Tensor | None
    block_table: Tensor | None
    mla_cache: Tensor
    indexer_cache: Tensor | None
    slots: Tensor | None = None

    def to(self, device: str) -> "Case":
        """A deep copy on the device with the strides of the original."""
        return Case(**{name: copy_with_strides(value, device) for name, value in vars(self).items()})

    def arguments(self) -> tuple[Tensor | None, ...]:
        return tuple(vars(self).values())

    def write(self) -> None:
        ops.write_kv_cache(**vars(self))

    def expect_same_as_reference(self, device: str) -> None:
        actual = self.to(device)
        actual.write()
        reference.write_kv_cache(**vars(self))
        assert_same_bytes(actual.mla_cache, self.mla_cache, "mla_cache")
        if self.indexer_cache is not None:
            assert actual.indexer_cache is not None
            assert_same_bytes(actual.indexer_cache, self.indexer_cache, "indexer_cache")


def copy_with_strides(x: Tensor | None, device: str) -> Tensor | None:
    if x is None:
        return None
    extent = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
    storage = torch.zeros(extent, dtype=x.dtype, device=device)
    return storage.as_strided(x.shape, x.stride()).copy_(x)


def random_case(lengths: list[int], page_size: int, pads: int = 3, indexer: bool = True) -> Case:
    """Every token of the requests once, in random order, and pads between; caches of random bytes."""
    pages = num_pages(lengths, page_size)
    req_ids = torch.cat([torch.full((n,), b) for b, n in enumerate(lengths)] + [torch.full((pads,), -1)])
    positions = torch.cat([torch.arange(n) for n in lengths] + [torch.zeros(pads, dtype=torch.int64)])
    order = torch.randperm(len(req_ids))
    rows = len(order)
    return Case(
        random_bytes(rows, 656),
        random_bytes(rows, 132) if indexer else None,
        req_ids[order].int(),
        positions[order].int(),
        random_block_table(lengths, page_size),
        random_bytes(pages, page_size, 656),
        random_bytes(pages, page_size * 132) if indexer else None,
    )


def gathered(ranks: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """The bytes that an all-gather leaves, [S, block], and their views [S, L, 656] and [S, L, 132]."""
    block = -(-rows * (656 + 132) // 16) * 16
    everything = random_bytes(ranks, block)
    mla = everything.as_strided((ranks, rows, 656), (block, 656, 1))
    keys = everything.as_strided((ranks, rows, 132), (block, 132, 1), rows * 656)
    return everything, mla, keys


@PAGE_SIZES
@pytest.mark.parametrize("indexer", [True, False])
@pytest.mark.parametrize("lengths", [[1], [150], [128, 1, 0, 257], [15, 16, 17], [127, 128, 129]])
def test_same_bytes_as_reference(device: str, lengths: list[int], indexer: bool, page_size: int) -> None:
    random_case(lengths, page_size, indexer=indexer).expect_same_as_reference(device)


@PAGE_SIZES
def test_page_layout(device: str, page_size: int) -> None:
    """Values of all tokens of an indexer page first, then their scales; MLA records whole, token after token."""
    mla, keys = random_bytes(page_size, 656), random_bytes(page_size, 132)
    mla_cache = torch.zeros(3, page_size, 656, dtype=torch.uint8, device=device)
    indexer_cache = torch.zeros(3, page_size * 132, dtype=torch.uint8, device=device)
    slots = torch.arange(page_size) + page_size  # page 1
    ops.write_kv_cache(mla.to(device), keys.to(device), None, None, None, mla_cache, indexer_cache, slots.to(device))
    assert_same_bytes(mla_cache[1], mla)
    assert_same_bytes(indexer_cache[1, : page_size * 128].view(page_size, 128), keys[:, :128])
    assert_same_bytes(indexer_cache[1, page_size * 128 :].view(page_size, 4), keys[:, 128:])
    for page in (0, 2):
        assert not mla_cache[page].any()
        assert not indexer_cache[page].any()


@pytest.mark.parametrize(("ranks", "rows"), [(1, 5), (2, 7), (4, 33), (3, 1)])
@pytest.mark.parametrize("indexer", [True, False])
def test_gathered_blocks_in_place(device: str, ranks: int, rows: int, indexer: bool) -> None:
    case = random_case([ranks * rows], 16, pads=0)
    everything, mla, keys = gathered(ranks, rows)
    on_device = everything.to(device)
    views = replace(
        case.to(device),
        mla_records=on_device.as_strided(mla.shape, mla.stride()),
        k_records=on_device.as_strided(keys.shape, keys.stride(), keys.storage_offset()) if indexer else None,
    )
    if not indexer:
        views = replace(views, indexer_cache=None)
    views.write()
    wanted = replace(case, mla_records=mla, k_records=keys)
    untouched = case.indexer_cache.clone() if case.indexer_cache is not None else None
    reference.write_kv_cache(**vars(wanted))
    assert_same_bytes(views.mla_cache, wanted.mla_cache)
    if indexer:
        assert views.indexer_cache is not None
        assert wanted.indexer_cache is not None
        assert untouched is not None
        assert_same_bytes(views.indexer_cache, wanted.indexer_cache)
        assert not torch.equal(untouched, wanted.indexer_cache)
    assert_same_bytes(on_device, everything, "the gathered bytes")


def test_strided_caches_and_tables(device: str) -> None:
    """One layer of caches that hold several layers a page; a block table with spare columns; spaced record rows."""
    case = random_case([70, 33], 32)
    assert case.k_records is not None
    assert case.block_table is not None
    pages = len(case.mla_cache)
    layers, keys = random_bytes(pages, 3, 32, 656), random_bytes(pages, 3, 32 * 132)
    table = torch.full((2, 9), 7777, dtype=torch.int32)
    table[:, : case.block_table.shape[1]] = case.block_table
    rows = len(case.mla_records)
    spaced = replace(
        case,
        mla_records=random_bytes(rows, 704)[:, 16:672],
        k_records=random_bytes(rows, 140)[:, 4:136],
        block_table=table[:, : case.block_table.shape[1]],
        mla_cache=layers[:, 1],
        indexer_cache=keys[:, 1],
    )
    spaced.expect_same_as_reference(device)


def hostile_case(page_size: int = 16) -> Case:
    """Pads, positions outside the table, pages outside the cache and negative ones, each beside good rows."""
    int_min, int_max = -(2**31), 2**31 - 1
    table = torch.tensor([[3, -1, 5, int_max], [0, 6, int_min, 1], [2, 4, -5, 99]], dtype=torch.int32)
    req_ids = torch.tensor([-1, 3, int_max, int_min, 0, 1, 2]).repeat_interleave(11).int()
    positions = torch.tensor([0, 15, 16, 31, 32, 48, 63, 64, int_max, -1, int_min]).repeat(7).int()
    rows = len(req_ids)
    return Case(
        random_bytes(rows, 656),
        random_bytes(rows, 132),
        req_ids,
        positions,
        table,
        random_bytes(6, page_size, 656),
        random_bytes(6, page_size * 132),
    )


def test_pads_and_bad_ids_write_nowhere(device: str) -> None:
    case = hostile_case()
    before = case.mla_cache.clone()
    case.expect_same_as_reference(device)
    changed = (case.mla_cache != before).any(-1).sum()
    # request 0: positions 0, 15, 32; request 1: 0, 15, 48, 63; request 2: 0, 15, 16, 31. Page 6 does not exist.
    assert changed == 3 + 4 + 4
    only_pads = replace(case, req_ids=torch.full_like(case.req_ids, -1)).to(device)
    untouched = only_pads.mla_cache.clone()
    only_pads.write()
    assert_same_bytes(only_pads.mla_cache, untouched)


def test_empty_block_table_and_caches(device: str) -> None:
    case = hostile_case()
    for table in (torch.empty(0, 4, dtype=torch.int32), torch.empty(3, 0, dtype=torch.int32)):
        replace(case, block_table=table).expect_same_as_reference(device)
    replace(case, mla_cache=case.mla_cache[:0], indexer_cache=case.indexer_cache[:0]).expect_same_as_reference(device)
    none = replace(
        case,
        mla_records=case.mla_records[:0],
        k_records=case.k_records[:0],
        req_ids=case.req_ids[:0],
        positions=case.positions[:0],
    )
    none.expect_same_as_reference(device)
    replace(none, mla_records=random_bytes(2, 0, 656), k_records=random_bytes(2, 0, 132)).expect_same_as_reference(
        device
    )


@PAGE_SIZES
def test_slots_form(device: str, page_size: int) -> None:
    slots = torch.randperm(7 * page_size)[:60]
    slots[::7] = -1
    slots[1::9] = torch.tensor([7 * page_size, 2**40, -(2**63), 2**63 - 1, -2, 7 * page_size + 1, 2**31])
    case = Case(
        random_bytes(60, 656),
        random_bytes(60, 132),
        None,
        None,
        None,
        random_bytes(7, page_size, 656),
        random_bytes(7, page_size * 132),
        slots,
    )
    case.expect_same_as_reference(device)
    replace(case, k_records=None, indexer_cache=None).expect_same_as_reference(device)
    blocks = replace(case, mla_records=case.mla_records.view(3, 20, 656), k_records=case.k_records.view(3, 20, 132))
    blocks.expect_same_as_reference(device)


@pytest.mark.parametrize("rows", [4096, 20_000])
def test_rows_on_one_slot_are_written_whole(device: str, rows: int) -> None:
    """One row wins, with both of its records: every byte of row i is i."""
    page_size = 16
    marks = (torch.arange(rows) % 251).to(torch.uint8)
    mla_cache = torch.zeros(2, page_size, 656, dtype=torch.uint8, device=device)
    indexer_cache = torch.zeros(2, page_size * 132, dtype=torch.uint8, device=device)
    slots = torch.randint(0, 5, (rows,))
    for _ in range(8):
        ops.write_kv_cache(
            marks[:, None].repeat(1, 656).to(device),
            marks[:, None].repeat(1, 132).to(device),
            None,
            None,
            None,
            mla_cache,
            indexer_cache,
            slots.to(device),
        )
        values = indexer_cache[0, : page_size * 128].view(page_size, 128)
        scales = indexer_cache[0, page_size * 128 :].view(page_size, 4)
        whole = torch.cat([mla_cache[0], values, scales], dim=1)[:5].cpu()
        assert (whole == whole[:, :1]).all()
        for slot in range(5):
            assert whole[slot, 0] in marks[slots == slot]


def test_70000_rows(device: str) -> None:
    mla, keys = random_bytes(1000, 656).repeat(70, 1), random_bytes(1000, 132).repeat(70, 1)
    table = torch.randperm(1100, dtype=torch.int32).view(1, 1100)
    positions = torch.randperm(70_000).int()
    mla_cache = torch.zeros(1100, 64, 656, dtype=torch.uint8, device=device)
    indexer_cache = torch.zeros(1100, 64 * 132, dtype=torch.uint8, device=device)
    ops.write_kv_cache(
        mla.to(device),
        keys.to(device),
        torch.zeros(70_000, dtype=torch.int32, device=device),
        positions.to(device),
        table.to(device),
        mla_cache,
        indexer_cache,
    )
    slots = table[0, positions.long() // 64].long() * 64 + positions % 64
    assert_same_bytes(mla_cache.view(-1, 656).cpu()[slots], mla)
    values, scales = indexer_cache.cpu().split([64 * 128, 64 * 4], dim=1)
    assert_same_bytes(values.reshape(-1, 128)[slots], keys[:, :128])
    assert_same_bytes(scales.reshape(-1, 4)[slots], keys[:, 128:])


@pytest.mark.parametrize("form", ["slots", "block_table"])
def test_cache_above_2_gib(device: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots above 2^31 / 656 = 3,273,603. On the CPU only the pages that are written become resident."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    pages = 51_400
    mla_cache = torch.empty(pages, 64, 656, dtype=torch.uint8, device=device)
    indexer_cache = torch.empty(pages, 64 * 132, dtype=torch.uint8, device=device)
    slots = torch.tensor([3_273_603, 3_273_604, 3_273_605, 3_289_599, 7, -1, 3_289_600, 2**32 + 9])
    written = [0, 1, 2, 3, 4]
    mla, keys = random_bytes(8, 656), random_bytes(8, 132)
    arguments: tuple[Tensor | None, ...] = (None, None, None)
    if form == "block_table":
        table = torch.zeros(8, 1, dtype=torch.int32)
        table[:, 0] = (slots // 64).clamp(-1, 2**31 - 1)
        rows = torch.arange(8, dtype=torch.int32)
        arguments = (rows.to(device), (slots % 64).int().to(device), table.to(device))
    ops.write_kv_cache(
        mla.to(device),
        keys.to(device),
        *arguments,
        mla_cache,
        indexer_cache,
        slots.to(device) if form == "slots" else None,
    )
    for row in written:
        page, offset = divmod(int(slots[row]), 64)
        assert_same_bytes(mla_cache[page, offset], mla[row])
        assert_same_bytes(indexer_cache[page, offset * 128 : (offset + 1) * 128], keys[row, :128])
        scale_start = 64 * 128 + offset * 4
        assert_same_bytes(indexer_cache[page, scale_start : scale_start + 4], keys[row, 128:])


def test_indexer_cache_above_2_gib(device: str) -> None:
    """Pages far apart: the last one is 2 GiB into the cache of the indexer."""
    mla, keys, slots = random_bytes(64, 656), random_bytes(64, 132), torch.randperm(64)
    caches = random_bytes(4, 16, 656), random_bytes(4, 16 * 132)
    on_device, far = caches[0].to(device), far_apart(caches[1], device)
    ops.write_kv_cache(mla.to(device), keys.to(device), None, None, None, on_device, far, slots.to(device))
    reference.write_kv_cache(mla, keys, None, None, None, *caches, slots)
    assert_same_bytes(on_device, caches[0])
    assert_same_bytes(far, caches[1])


@settings(max_examples=12, deadline=None)
@given(
    page_size=st.sampled_from([16, 32, 64, 128]),
    lengths=st.lists(st.integers(0, 70), min_size=1, max_size=4),
    pads=st.integers(0, 5),
    seed=st.integers(0, 2**31),
)
def test_any_lengths(page_size: int, lengths: list[int], pads: int, seed: int) -> None:
    torch.manual_seed(seed)
    random_case(lengths, page_size, pads).expect_same_as_reference("cpu")


def test_arguments_are_named_in_errors(device: str) -> None:
    good: dict[str, Any] = vars(random_case([20], 16).to(device))
    rows = len(good["mla_records"])
    slots = torch.arange(rows, device=device)
    none = {"req_ids": None, "positions": None, "block_table": None}
    wide = torch.zeros(rows, 700, dtype=torch.uint8, device=device)
    pages = len(good["mla_cache"])
    scattered = torch.zeros(pages, 16, 700, dtype=torch.uint8, device=device)[..., :656]
    for change, message in [
        ({"slots": slots}, "slots: expected either slots or req_ids, positions and block_table, got both"),
        (none, "slots: expected either slots or req_ids, positions and block_table, got neither"),
        ({"positions": None}, "req_ids, positions, block_table: expected all of them or none, got 2 of 3"),
        ({"block_table": None, "req_ids": None}, "req_ids, positions, block_table: .* got 1 of 3"),
        ({"k_records": None}, "k_records, indexer_cache: expected all of them or none, got 1 of 2"),
        ({"indexer_cache": None}, "k_records, indexer_cache: expected all of them or none, got 1 of 2"),
        ({"mla_records": good["mla_records"][0]}, "mla_records: expected 2 or 3 dimensions, got 1"),
        ({"mla_records": good["mla_records"].view(torch.int8)}, "mla_records: expected dtype uint8, got int8"),
        ({"mla_records": good["mla_records"][:, :640]}, r"mla_records: expected shape \[\*, 656\], got \[23, 640\]"),
        (
            {"mla_records": wide[:, :656]},
            "mla_records: expected a stride that is a multiple of 16 bytes in dimension 0",
        ),
        ({"mla_records": wide[:, 4:660]}, "mla_records: expected data aligned to 16 bytes, .* remainder 4"),
        ({"k_records": good["k_records"][:-1]}, r"k_records: expected shape \[23, 132\], got \[22, 132\]"),
        ({"k_records": good["k_records"][None]}, r"k_records: expected shape \[23, 132\], got \[1, 23, 132\]"),
        ({"k_records": wide[:, 2:134]}, "k_records: expected data aligned to 4 bytes"),
        ({"req_ids": good["req_ids"].long()}, "req_ids: expected dtype int32, got int64"),
        ({"req_ids": good["req_ids"][1:]}, r"req_ids: expected shape \[23\], got \[22\]"),
        ({"positions": good["positions"].long()}, "positions: expected dtype int32, got int64"),
        ({"positions": good["positions"].repeat(2)[::2]}, "positions: expected a contiguous tensor"),
        ({"block_table": good["block_table"].long()}, "block_table: expected dtype int32, got int64"),
        ({"block_table": good["block_table"][0]}, "block_table: expected 2 dimensions, got 1"),
        (
            {"block_table": good["block_table"].repeat(1, 2)[:, ::2]},
            "block_table: expected a contiguous last dimension",
        ),
        ({**none, "slots": slots.int()}, "slots: expected dtype int64, got int32"),
        ({**none, "slots": slots[1:]}, r"slots: expected shape \[23\], got \[22\]"),
        ({"mla_cache": good["mla_cache"][:, :10]}, "mla_cache: expected a page_size of 16, 32, 64 or 128 .* got 10"),
        ({"mla_cache": good["mla_cache"].view(torch.int8)}, "mla_cache: expected dtype uint8, got int8"),
        ({"mla_cache": good["mla_cache"][..., :655]}, r"mla_cache: expected shape \[\*, \*, 656\]"),
        ({"mla_cache": scattered}, "mla_cache: expected contiguous pages, got stride 700"),
        ({"mla_cache": good["mla_cache"][:1].expand(pages, 16, 656)}, "mla_cache: expected memory without overlap"),
        ({"indexer_cache": good["indexer_cache"][1:]}, r"indexer_cache: expected shape \[5, 2112\], got \[4, 2112\]"),
        ({"indexer_cache": good["indexer_cache"][:, :132]}, "indexer_cache: expected shape"),
        ({"indexer_cache": good["indexer_cache"][:1].expand(pages, 2112)}, "indexer_cache: expected memory without"),
    ]:
        with pytest.raises(ValueError, match=message):
            ops.write_kv_cache(**{**good, **change})
    for name, value, message in [
        ("mla_records", None, r"mla_records: expected a torch\.Tensor, got NoneType"),
        ("slots", [1], r"slots: expected a torch\.Tensor, got list"),
        ("k_records", 3, r"k_records: expected a torch\.Tensor, got int"),
    ]:
        with pytest.raises(TypeError, match=message):
            ops.write_kv_cache(**{**good, name: value})


def test_value_checks_name_request_position_and_value(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSE_CP_OPS_CHECK", "1")
    good = Case(
        random_bytes(2, 656),
        random_bytes(2, 132),
        torch.tensor([-1, 1], dtype=torch.int32),
        torch.tensor([0, 17], dtype=torch.int32),
        torch.tensor([[0, 1], [2, 3]], dtype=torch.int32),
        random_bytes(4, 16, 656),
        random_bytes(4, 16 * 132),
    )
    good.expect_same_as_reference(device)
    by_slot = replace(good, req_ids=None, positions=None, block_table=None, slots=torch.tensor([-1, 63]))
    by_slot.expect_same_as_reference(device)

    def ints(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    pages = good.block_table
    assert pages is not None
    for case, message in [
        (replace(good, req_ids=ints(-1, 2)), r"req_ids: row 1: expected -1 or a request in \[0, 2\), got 2"),
        (replace(good, req_ids=ints(-2, 1)), r"req_ids: row 0: expected -1 or a request in \[0, 2\), got -2"),
        (
            replace(good, positions=ints(0, 32)),
            r"positions: row 1, request 1: expected a position in \[0, 32\).*got 32",
        ),
        (replace(good, positions=ints(0, -1)), r"positions: row 1, request 1: expected a position .*got -1"),
        (
            replace(good, block_table=pages + 1),
            r"block_table: row 1, request 1, position 17: expected a page in \[0, 4\), got 4",
        ),
        (replace(good, block_table=pages - 4), r"block_table: row 1, request 1, position 17: .* got -1"),
        (replace(by_slot, slots=torch.tensor([-1, 64])), r"slots: row 1: expected -1 or a slot in \[0, 64\), got 64"),
        (replace(by_slot, slots=torch.tensor([-2, 0])), r"slots: row 0: expected -1 or a slot in \[0, 64\), got -2"),
    ]:
        on_device = case.to(device)
        before = on_device.mla_cache.clone()
        with pytest.raises(ValueError, match=message):
            on_device.write()
        assert_same_bytes(on_device.mla_cache, before, "mla_cache after the error")


@pytest.mark.parametrize("indexer", [True, False])
@pytest.mark.parametrize("form", ["slots", "block_table"])
def test_opcheck(device: str, form: str, indexer: bool) -> None:
    case = random_case([20], 16, indexer=indexer).to(device)
    if form == "slots":
        slots = torch.arange(len(case.mla_records), device=device)
        case = replace(case, req_ids=None, positions=None, block_table=None, slots=slots)
    torch.library.opcheck(torch.ops.sparse_cp_ops.write_kv_cache.default, case.arguments())


def test_compiles_once_for_all_lengths(device: str) -> None:
    def write(mla: Tensor, keys: Tensor, req_ids: Tensor, positions: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        mla_cache = mla.new_zeros((9, 16, 656))
        indexer_cache = mla.new_zeros((9, 16 * 132))
        ops.write_kv_cache(mla, keys, req_ids, positions, table, mla_cache, indexer_cache)
        return mla_cache, indexer_cache

    def arguments(length: int) -> tuple[Tensor, ...]:
        case = random_case([length], 16).to(device)
        assert case.k_records is not None
        assert case.req_ids is not None
        assert case.positions is not None
        table = torch.randperm(9, dtype=torch.int32).view(1, 9).to(device)
        return case.mla_records, case.k_records, case.req_ids, case.positions, table

    assert compilations(write, arguments) <= 3
