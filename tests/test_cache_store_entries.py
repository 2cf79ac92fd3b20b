"""What the device does with entries of a store: their checksums, and the way to the pages of all layers."""

from collections.abc import Sequence

import pytest
import torch
import xxhash
from store_harness import small_cache, wipe

from sparse_cp_ops.cache_store.entry import HEADER_BYTES, EntryLayout
from sparse_cp_ops.cache_store.reader import Staging
from sparse_cp_ops.kv_cache import PagedKvCache

pytestmark = pytest.mark.cuda


def staging_for(cache: PagedKvCache, count: int) -> tuple[Staging, EntryLayout]:
    layout = EntryLayout(cache, "")
    staging = Staging(cache, layout, count)
    staging.entries.random_(0, 256)
    return staging, layout


# Payloads of less than a KB, of whole ones and of parts, up to that of DeepSeek-V3.2.
@pytest.mark.parametrize("payload_bytes", [256, 1008, 1024, 1040, 2048, 32 * 1024 + 16, 33 * 1024 + 512, 3_076_352])
def test_checksums_are_those_of_xxhash(payload_bytes: int) -> None:
    entries = torch.randint(256, (5, HEADER_BYTES + payload_bytes), dtype=torch.uint8, device="cuda")
    sums = torch.empty(5, (payload_bytes - 1) // 1024, 8, dtype=torch.int64, device="cuda")
    checksums = torch.full((5, 16), 9, dtype=torch.uint8, device="cuda")
    torch.ops.sparse_cp_ops_store.checksum_entries(entries, 1, 3, HEADER_BYTES, sums, checksums)
    contents = entries[:, HEADER_BYTES:].cpu().numpy()
    for i, checksum in enumerate(checksums.cpu().numpy()):
        expected = xxhash.xxh3_128_digest(contents[i].tobytes()) if 1 <= i <= 3 else bytes([9] * 16)
        assert checksum.tobytes() == expected


@pytest.mark.parametrize("value", [0, 255])
def test_checksums_of_equal_bytes(value: int) -> None:
    """All products at their ends."""
    entries = torch.full((1, 50_000), value, dtype=torch.uint8, device="cuda")
    sums = torch.empty(1, 49_999 // 1024, 8, dtype=torch.int64, device="cuda")
    checksums = torch.empty(1, 16, dtype=torch.uint8, device="cuda")
    torch.ops.sparse_cp_ops_store.checksum_entries(entries, 0, 1, 0, sums, checksums)
    assert checksums.cpu().numpy().tobytes() == xxhash.xxh3_128_digest(bytes([value]) * 50_000)


# More pages and more layers than one kernel takes.
@pytest.mark.parametrize(
    ("page_size", "owners", "pages"),
    [
        (16, (True, False, True), [3, 0, 7]),
        (32, (False,), [5]),
        (64, (True,) * 5, list(range(70))),
        (128, (False, True), [1, 2]),
        (16, (True, False, False) * 50, [2, 1, 0]),
    ],
)
def test_pages_of_all_layers_come_from_entries(page_size: int, owners: Sequence[bool], pages: list[int]) -> None:
    cache = PagedKvCache(len(owners), 72, page_size, "cuda", owners)
    staging, layout = staging_for(cache, len(pages) + 2)
    wipe(cache)
    staging.load(1, pages)
    mla, indexer = layout.views(staging.entries[1:-1])
    others = [page for page in range(72) if page not in pages]
    for stored, target in zip((*mla, *indexer), (*cache.mla, *cache.indexer), strict=True):
        assert (stored is None) == (target is None)
        if stored is not None and target is not None:
            assert torch.equal(target[pages], stored)
            assert target[others].eq(255).all()


def test_nothing_to_do() -> None:
    cache = small_cache(device="cuda")
    staging, _ = staging_for(cache, 2)
    wipe(cache)
    staging.check(2, 0)
    staging.load(0, [])
    assert all(pages.eq(255).all() for pages in cache.mla)


def test_what_lies_outside_is_refused() -> None:
    cache = small_cache(device="cuda")
    staging, _ = staging_for(cache, 2)
    with pytest.raises(ValueError, match=r"first, count: expected entries in \[0, 2\), got 1 and 2"):
        staging.check(1, 2)
    with pytest.raises(ValueError, match=r"first, pages: expected entries in \[0, 2\), got 2 and 1"):
        staging.load(2, [0])
    with pytest.raises(ValueError, match=r"pages: expected pages in \[0, 8\), got 8"):
        staging.load(0, [8])
    with pytest.raises(ValueError, match=r"pages: expected pages in \[0, 8\), got -1"):
        staging.load(0, [-1])
    with pytest.raises(ValueError, match="entries: expected a header in front of"):
        torch.ops.sparse_cp_ops_store.load_entries(staging.entries[:, :4096].contiguous(), 0, [0], cache.mla, [], [])
    with pytest.raises(ValueError, match=r"indexer_layers: expected layers in \[0, 3\), got 3"):
        torch.ops.sparse_cp_ops_store.load_entries(staging.entries, 0, [0], cache.mla, cache.indexer[:1], [3])
