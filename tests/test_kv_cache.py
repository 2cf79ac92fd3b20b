import pytest
import torch

from sparse_cp_ops.kv_cache import PagedKvCache


def test_pages_start_as_zeros_in_the_documented_shapes(device: str) -> None:
    cache = PagedKvCache(3, 5, page_size=16, device=device, indexer_layers=[True, False, True])
    assert [pages.shape for pages in cache.mla] == [(5, 16, 656)] * 3
    assert [None if pages is None else tuple(pages.shape) for pages in cache.indexer] == [
        (5, 16 * 132),
        None,
        (5, 16 * 132),
    ]
    for pages in (*cache.mla, *cache.indexer):
        assert pages is None or (pages.dtype == torch.uint8 and pages.device.type == device and not pages.any())
    assert cache.page_bytes == 16 * (3 * 656 + 2 * 132)
    assert PagedKvCache(2, 1).indexer_layers == (True, True)


def test_made_in_inference_mode_it_can_be_written_outside() -> None:
    with torch.inference_mode():
        cache = PagedKvCache(1, 1, page_size=16)
    cache.mla[0].fill_(3)
    assert cache.mla[0].eq(3).all()


def test_copied_pages_have_both_caches_of_all_layers(device: str) -> None:
    cache = PagedKvCache(2, 5, 16, device, [True, False])
    arrays = [pages for pages in (*cache.mla, *cache.indexer) if pages is not None]
    for pages in arrays:
        pages.copy_(torch.randint(256, pages.shape, dtype=torch.uint8))
    before = [pages.clone() for pages in arrays]
    cache.copy_pages([4, 4, 1], [0, 3, 2])
    for pages, old in zip(arrays, before, strict=True):
        assert torch.equal(pages, old[[4, 1, 1, 4, 4]])
    for sources, targets, message in (
        ([1], [5], r"pages in \[0, 5\), got 5"),
        ([1, 2], [0], "expected 2 as sources, got 1"),
        ([1, 2], [0, 0], "pages of their own"),
        ([1, 2], [2, 0], "pages of their own"),
    ):
        with pytest.raises(ValueError, match=message):
            cache.copy_pages(sources, targets)


def test_fingerprint_tells_layouts_and_models_apart() -> None:
    caches = [
        PagedKvCache(2, 3, page_size=16),
        PagedKvCache(2, 3, page_size=32),
        PagedKvCache(3, 3, page_size=16),
        PagedKvCache(2, 3, page_size=16, indexer_layers=[True, False]),
        PagedKvCache(2, 3, page_size=16, indexer_layers=[False, True]),
    ]
    prints = {cache.layout_fingerprint(model) for cache in caches for model in ("", "other weights")}
    assert len(prints) == 10
    assert all(len(fingerprint) == 16 for fingerprint in prints)
    # Not of the number of pages: a cache restarted with more memory still finds its stored pages.
    assert PagedKvCache(2, 9, page_size=16).layout_fingerprint() == caches[0].layout_fingerprint()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_layers": 0, "num_pages": 1}, "num_layers: expected at least 1, got 0"),
        ({"num_layers": 1, "num_pages": 0}, "num_pages: expected at least 1, got 0"),
        ({"num_layers": 1, "num_pages": 1, "page_size": 48}, r"page_size: expected one of \(16, .*, got 48"),
        ({"num_layers": 2, "num_pages": 1, "indexer_layers": [True]}, "indexer_layers: expected 2 entries, got 1"),
    ],
)
def test_wrong_arguments(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PagedKvCache(**arguments)
