"""The two paged FP8 caches of a model: latent keys and values, and indexer keys (docs/kv_record.md)."""

from __future__ import annotations

import copy
import hashlib
import operator
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from sparse_cp_ops.ops._types import require_ints

MLA_RECORD_BYTES = 656
INDEX_RECORD_BYTES = 132
PAGE_SIZES = (16, 32, 64, 128)


class PagedKvCache:
    """Pages of all layers; page ``p`` holds the same tokens in every layer.

    The pages start as zero bytes: a slot that nobody wrote reads as zeros, never as NaN.

    Attributes:
        mla: a list, uint8 [num_pages, page_size, 656] a layer.
        indexer: a list, uint8 [num_pages, page_size * 132] a layer, None for layers without an indexer.
    """

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        page_size: int = 64,
        device: torch.device | str = "cpu",
        indexer_layers: Sequence[bool] | None = None,
        pin_memory: bool = False,
    ) -> None:
        """Allocate the pages.

        Args:
            num_layers: layers of the model.
            num_pages: pages of each layer.
            page_size: tokens a page, one of 16, 32, 64, 128.
            device: where the pages live.
            indexer_layers: whether each layer has an indexer of its own; None = all have.
            pin_memory: page-locked memory, for a cache on the CPU that a CUDA device copies from and to.

        Raises:
            TypeError: a number that is no int.
            ValueError: an argument out of range.
        """
        require_ints("PagedKvCache", num_layers=num_layers, num_pages=num_pages, page_size=page_size)
        for name, value in (("num_layers", num_layers), ("num_pages", num_pages)):
            if value < 1:
                raise ValueError(f"PagedKvCache: {name}: expected at least 1, got {value}")
        if page_size not in PAGE_SIZES:
            raise ValueError(f"PagedKvCache: page_size: expected one of {PAGE_SIZES}, got {page_size}")
        owners = (True,) * num_layers if indexer_layers is None else tuple(bool(owner) for owner in indexer_layers)
        if len(owners) != num_layers:
            raise ValueError(f"PagedKvCache: indexer_layers: expected {num_layers} entries, got {len(owners)}")
        self.num_layers = num_layers
        self.num_pages = num_pages
        self.page_size = page_size
        self.device = torch.device(device)
        self.indexer_layers = owners

        def pages(*shape: int) -> Tensor:
            return torch.zeros(num_pages, *shape, dtype=torch.uint8, device=device, pin_memory=pin_memory)

        # Never inference tensors: a forward outside inference mode could not write to those.
        with torch.inference_mode(False):
            self.mla: list[Tensor] = [pages(page_size, MLA_RECORD_BYTES) for _ in owners]
            self.indexer: list[Tensor | None] = [
                pages(page_size * INDEX_RECORD_BYTES) if owner else None for owner in owners
            ]

    def layer(self, layer_id: int) -> PagedKvCache:
        """The pages of one layer as a cache of its own, which shares their memory.

        :class:`~sparse_cp_ops.nn.MlaAttention` takes it in place of the whole cache. Layers that are compiled one by
        one then share their graphs, because none of them picks its pages by number.
        """
        self.require_layer(layer_id)
        alone = copy.copy(self)
        alone.num_layers, alone.indexer_layers = 1, (self.indexer_layers[layer_id],)
        alone.mla, alone.indexer = [self.mla[layer_id]], [self.indexer[layer_id]]
        return alone

    def require_layer(self, layer_id: int) -> None:
        """Refuse a number that is no layer; a negative one would count from the end.

        Raises:
            TypeError: no int.
            ValueError: no layer of this cache.
        """
        if type(layer_id) is not int:  # asked ahead of the call: three times in each layer
            require_ints("PagedKvCache", layer_id=layer_id)
        if not 0 <= layer_id < self.num_layers:
            raise ValueError(f"PagedKvCache: layer_id: expected 0 to {self.num_layers - 1}, got {layer_id}")

    def require_pages(self, caller: str, pages: Sequence[int]) -> list[int]:
        """The pages as ints, if this cache has all of them.

        Raises:
            TypeError: an entry that is no integer.
            ValueError: an entry that is no page of this cache.
        """
        ids = page_ids(caller, pages)
        for page in ids:
            if not 0 <= page < self.num_pages:
                raise ValueError(f"{caller}: pages: expected pages in [0, {self.num_pages}), got {page}")
        return ids

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy pages onto others, both caches of all layers: what a fork needs for its partial last page.

        Raises:
            TypeError: an entry that is no integer.
            ValueError: pages outside the cache, different numbers of them, or a target that is given twice or is also
                a source.
        """
        given = self.require_pages("PagedKvCache.copy_pages", sources)
        to = self.require_pages("PagedKvCache.copy_pages", targets)
        if len(given) != len(to):
            raise ValueError(f"PagedKvCache.copy_pages: targets: expected {len(given)} as sources, got {len(to)}")
        if len({*to}) < len(to) or {*to} & {*given}:
            raise ValueError(f"PagedKvCache.copy_pages: targets: expected pages of their own, got {to} from {given}")
        source_ids, target_ids = (torch.tensor(ids, dtype=torch.int64, device=self.device) for ids in (given, to))
        for pages in (*self.mla, *self.indexer):
            if pages is not None:
                pages.index_copy_(0, target_ids, pages.index_select(0, source_ids))

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers and both caches."""
        mla, index = self.num_layers * MLA_RECORD_BYTES, sum(self.indexer_layers) * INDEX_RECORD_BYTES
        return self.page_size * (mla + index)

    def layout_fingerprint(self, model: str = "") -> bytes:
        """16 bytes that differ between caches whose pages can't be exchanged.

        Args:
            model: what else the bytes depend on: the model, its weights' version, the scale format.
        """
        layout = (model, self.page_size, MLA_RECORD_BYTES, INDEX_RECORD_BYTES, self.indexer_layers)
        return hashlib.blake2b(repr(layout).encode(), digest_size=16).digest()


def page_ids(caller: str, pages: Iterable[int]) -> list[int]:
    """Page numbers as ints, from anything that counts as an integer: entries of tensors and arrays, too.

    Raises:
        TypeError: an entry that is no integer; it is named with the caller.
    """
    if not isinstance(pages, Iterable):
        raise TypeError(f"{caller}: pages: expected ints, got {type(pages).__name__}")
    ids = []
    for i, page in enumerate(pages):
        try:
            ids.append(operator.index(page))
        except TypeError:
            raise TypeError(f"{caller}: pages[{i}]: expected int, got {type(page).__name__}") from None
    return ids
