"""Device pages shared by requests with a common beginning."""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparse_cp_ops.kv_cache import page_ids
from sparse_cp_ops.ops._types import require_ints

Tokens = Sequence[int] | Tensor


class OutOfPagesError(RuntimeError):
    """All pages are held by running requests."""


def page_keys(tokens: Tokens, page_size: int, fingerprint: bytes = b"") -> list[bytes]:
    """Content hash of every full page of a token sequence, chained: equal keys mean equal tokens from the first on.

    Args:
        tokens: token ids of a request.
        page_size: tokens a page; a partial last page gets no key.
        fingerprint: what else the bytes of a page depend on, see :meth:`PagedKvCache.layout_fingerprint`.

    Returns:
        128-bit keys (blake2b), ``len(tokens) // page_size`` of them.

    Raises:
        TypeError: token ids that are no integers: rounded ones would find the pages of other tokens; a fingerprint
            that is no bytes.
        ValueError: more than one dimension, an id beyond int64, or a page size below 1.
    """
    require_ints("page_keys", page_size=page_size)
    _require_fingerprint("page_keys", fingerprint)
    if page_size < 1:
        raise ValueError(f"page_keys: page_size: expected at least 1, got {page_size}")
    ids = _token_ids(tokens)
    key = _digest(repr((fingerprint, page_size)).encode())
    keys = []
    for end in range(page_size, len(ids) + 1, page_size):
        key = _digest(key + ids[end - page_size : end].tobytes())
        keys.append(key)
    return keys


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()


def _require_fingerprint(caller: str, fingerprint: bytes) -> None:
    if not isinstance(fingerprint, bytes):  # another type with the same bytes would give other keys
        raise TypeError(f"{caller}: fingerprint: expected bytes, got {type(fingerprint).__name__}")


def _token_ids(tokens: Tokens) -> NDArray[np.int64]:
    if isinstance(tokens, Tensor) and (tokens.is_floating_point() or tokens.is_complex()):
        raise TypeError(f"tokens: expected integers of at most 64 bits, got {tokens.dtype}")  # numpy lacks some of them
    given = np.asarray(tokens.detach().cpu() if isinstance(tokens, Tensor) else tokens)
    if given.ndim != 1:
        raise ValueError(f"tokens: expected 1 dimension, got {given.ndim} (shape {list(given.shape)})")
    if given.dtype.kind not in "iu" and len(given):
        raise TypeError(f"tokens: expected integers of at most 64 bits, got {given.dtype}")
    if given.dtype == np.uint64 and (given > np.iinfo(np.int64).max).any():
        raise ValueError(f"tokens: expected ids of at most {np.iinfo(np.int64).max}, got {given.max()}")
    return given.astype("<i8")


class PrefixCache:
    """Owns the pages of a :class:`PagedKvCache`: who holds them, and which tokens are in them.

    A page is free, held by requests, or kept: nobody holds it, but a later request with the same tokens may. Kept pages
    are given away again when there is no free one, the least recently used first. Only full pages are shared, and
    nobody writes to a page that is shared or offered. One thread at a time.

    Under context parallelism every rank has a cache of its own and makes the same calls. :attr:`decisions`, handed to
    :class:`~sparse_cp_ops.nn.AttentionInputs`, lets ``prepare`` refuse a forward before which they decided otherwise.
    """

    def __init__(self, num_pages: int, page_size: int = 64, fingerprint: bytes = b"") -> None:
        """Take over pages ``0 .. num_pages-1``.

        Args:
            num_pages: pages of the cache.
            page_size: tokens a page.
            fingerprint: of the model and of the cache's layout, so that keys of different models never meet.

        Raises:
            TypeError: a number that is no int, a fingerprint that is no bytes.
            ValueError: fewer than 0 pages or a page without tokens.
        """
        require_ints("PrefixCache", num_pages=num_pages, page_size=page_size)
        _require_fingerprint("PrefixCache", fingerprint)
        if num_pages < 0:
            raise ValueError(f"PrefixCache: num_pages: expected at least 0, got {num_pages}")
        if page_size < 1:
            raise ValueError(f"PrefixCache: page_size: expected at least 1, got {page_size}")
        self.page_size = page_size
        self.fingerprint = fingerprint
        self._free = deque(range(num_pages))
        self._holders = [0] * num_pages
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._kept: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._decisions = _digest(repr((fingerprint, num_pages, page_size)).encode())

    @property
    def available(self) -> int:
        """Pages that :meth:`allocate` can give out."""
        return len(self._free) + len(self._kept)

    @property
    def decisions(self) -> bytes:
        """16 bytes that are equal on two ranks as long as both have made the same calls with the same results."""
        return self._decisions

    def page_keys(self, tokens: Tokens) -> list[bytes]:
        """Keys of the full pages of a token sequence."""
        return page_keys(tokens, self.page_size, self.fingerprint)

    def match_prefix(self, tokens: Tokens) -> list[int]:
        """Pages that hold the beginning of ``tokens``; the caller holds them until :meth:`release`.

        At least one token is left to compute, because a forward without new tokens has no logits.
        """
        keys, matched = self.page_keys(tokens), []
        for key in keys[: max(len(tokens) - 1, 0) // self.page_size]:
            page = self._page_of.get(key)
            if page is None:
                break
            matched.append(page)
        for page in matched:
            self._hold(page)
        # The tokens behind the last full page count as well: ranks must not compute different ones.
        self._decide("match", matched, keys[-1:], _token_ids(tokens)[len(keys) * self.page_size :].tobytes())
        return matched

    def allocate(self, count: int) -> list[int]:
        """``count`` pages with nothing in them, held by the caller until :meth:`release`.

        Raises:
            OutOfPagesError: fewer are available; nothing is taken then.
            TypeError: the count is no int.
            ValueError: the count is negative.
        """
        require_ints("PrefixCache.allocate", count=count)
        if count < 0:
            raise ValueError(f"PrefixCache.allocate: count: expected at least 0, got {count}")
        if count > self.available:
            raise OutOfPagesError(
                f"PrefixCache.allocate: count: expected at most {self.available} (the pages that no request holds), "
                f"got {count}"
            )
        pages = []
        for _ in range(count):
            page = self._free.popleft() if self._free else self._evict()
            self._holders[page] = 1
            pages.append(page)
        self._decide("allocate", pages)
        return pages

    def fork(self, pages: Sequence[int], length: int) -> list[int]:
        """Let a second request go on from where one stands: it shares the full pages and gets its own last one.

        Args:
            pages: of the running request, in order, as many as its tokens need.
            length: its tokens.

        Returns:
            Pages of the second request, held by the caller until :meth:`release`. If the last one differs from
            ``pages[-1]``, its content is to be copied from there (:meth:`PagedKvCache.copy_pages`).

        Raises:
            OutOfPagesError: no page for the partial last one; nothing is taken then.
            TypeError: pages or a length that are no integers.
            ValueError: pages that nobody holds, or another number than the tokens need.
        """
        require_ints("PrefixCache.fork", length=length)
        given = page_ids("PrefixCache.fork", pages)
        needed = -(-length // self.page_size)
        if length < 0 or len(given) != needed:
            raise ValueError(f"PrefixCache.fork: pages: expected {needed} for {length} tokens, got {len(given)}")
        self._require_held("fork", dict.fromkeys(given, 1))
        full = given[: length // self.page_size]
        own = self.allocate(needed - len(full))
        for page in full:
            self._hold(page)
        self._decide("fork", full)
        return full + own

    def require_private(self, pages: Iterable[int]) -> None:
        """Refuse a write to pages that others read: call it with the pages that a forward is about to write to.

        Raises:
            TypeError: an entry that is no integer.
            ValueError: a page that is not held by exactly one request, or that is offered to later ones.
        """
        for page in page_ids("PrefixCache.require_private", pages):
            if not 0 <= page < len(self._holders) or self._holders[page] != 1 or page in self._key_of:
                raise ValueError(
                    f"PrefixCache.require_private: pages: expected pages of one request alone, got {page}, which is "
                    + ("offered to later requests" if page in self._key_of else "not held by exactly one request")
                )

    def insert(self, tokens: Tokens, pages: Sequence[int]) -> None:
        """Offer the full pages of ``tokens`` to later requests. Their bytes must be written by now, in all layers.

        Where a page with the same content is already offered, that one stays and the given one remains private.

        Args:
            tokens: a request's tokens, from the first on, as many as the cache holds.
            pages: its pages in order, held by the caller.

        Raises:
            TypeError: tokens or pages that are no integers.
            ValueError: too few pages, or pages that nobody holds.
        """
        keys, given = self.page_keys(tokens), page_ids("PrefixCache.insert", pages)
        if len(given) < len(keys):
            raise ValueError(f"PrefixCache.insert: pages: expected at least {len(keys)}, got {len(given)}")
        del given[len(keys) :]
        self._require_held("insert", dict.fromkeys(given, 1))
        for key, page in zip(keys, given, strict=True):
            if key not in self._page_of and page not in self._key_of:
                self._page_of[key] = page
                self._key_of[page] = key
        self._decide("insert", given, keys[-1:])

    def release(self, pages: Iterable[int]) -> None:
        """Stop holding pages from :meth:`match_prefix` or :meth:`allocate`, given in the order of their tokens.

        Raises:
            TypeError: an entry that is no integer; nothing is released then.
            ValueError: a page that is not held, or not as often as it is given; nothing is released then.
        """
        given = page_ids("PrefixCache.release", pages)
        self._require_held("release", Counter(given))
        # From the end: of a chain of pages the last is then given away first, a chain without its head is useless.
        for page in reversed(given):
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            if page in self._key_of:
                self._kept[page] = None
            else:
                self._free.append(page)
        self._decide("release", given)

    def _hold(self, page: int) -> None:
        self._holders[page] += 1
        self._kept.pop(page, None)

    def _decide(self, *facts: object) -> None:
        self._decisions = _digest(self._decisions + repr(facts).encode())

    def _require_held(self, caller: str, times: Mapping[int, int]) -> None:
        """Every page by as many requests as it says."""
        for page, count in times.items():
            if not 0 <= page < len(self._holders) or self._holders[page] < count:
                often = f" {count} times" if count > 1 else ""
                raise ValueError(f"PrefixCache.{caller}: pages: expected pages that are held, got {page}{often}")

    def _evict(self) -> int:
        page, _ = self._kept.popitem(last=False)
        del self._page_of[self._key_of.pop(page)]
        return page


def block_table(pages: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> Tensor:
    """int32 [B, longest] from the pages of each request, -1 behind the last."""
    width = max([1, *map(len, pages)])
    rows = [[*row, *[-1] * (width - len(row))] for row in pages]
    return torch.tensor(rows, dtype=torch.int32).view(len(pages), width).to(device, non_blocking=True)
