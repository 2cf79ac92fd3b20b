"""An entry as bytes: a header, then one page of every layer, both caches. The same in memory, files and Mooncake.

Nothing in a header is trusted: whoever reads an entry knows its own key, layout and length, and compares.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor

from sparse_cp_ops.kv_cache import INDEX_RECORD_BYTES, MLA_RECORD_BYTES, PagedKvCache

MAGIC = b"SCPOPAGE"
VERSION = 1
HEADER_BYTES = 256  # a multiple of the 16 bytes in which pages are moved
KEY_BYTES = 16
# magic, version, header bytes, payload bytes, key, fingerprint, payload checksum, page size, layers, layers with an
# indexer, reserved, model (UTF-8, cut, for people only); behind them the checksum of these fields, then zeros.
_FIELDS = struct.Struct("<8sIIQ16s16s16sIIII64s")
_CHECKSUM_BYTES = 16


@dataclass(frozen=True)
class Header:
    """What a header says, once its own checksum holds."""

    payload_bytes: int
    key: bytes
    fingerprint: bytes
    checksum: bytes
    page_size: int
    num_layers: int
    indexer_layers: int
    model: str


def require_keys(caller: str, keys: Sequence[bytes]) -> None:
    """Refuse what is no key: a longer or shorter one would be cut or filled up in an entry and never fit again.

    Raises:
        TypeError: a key that is no bytes.
        ValueError: a key of another length.
    """
    for key in keys:
        if not isinstance(key, bytes):
            raise TypeError(f"{caller}: keys: expected bytes, got {type(key).__name__}")
        if len(key) != KEY_BYTES:
            raise ValueError(f"{caller}: keys: expected {KEY_BYTES} bytes each, got {len(key)}")


def _checksum(content: memoryview) -> bytes:
    """XXH3-128 by a hasher: the functions of xxhash 3 for a single call keep the interpreter's lock, threads queue."""
    hasher = xxhash.xxh3_128()
    hasher.update(content)
    return hasher.digest()


def parse_header(data: bytes | memoryview) -> Header | str:
    """The header of an entry, or what is wrong with it."""
    if len(data) < HEADER_BYTES:
        return f"truncated: {len(data)} bytes"
    fields = bytes(data[: _FIELDS.size])
    magic, version, header_bytes, payload_bytes, key, fingerprint, checksum, page_size, layers, indexers, _, model = (
        _FIELDS.unpack(fields)
    )
    if magic != MAGIC:
        return "no entry of this format"
    if version != VERSION or header_bytes != HEADER_BYTES:
        return f"version {version} of the format, expected {VERSION}"
    if bytes(data[_FIELDS.size : _FIELDS.size + _CHECKSUM_BYTES]) != xxhash.xxh3_128_digest(fields):
        return "its header is damaged"
    name = model.rstrip(b"\0").decode("utf-8", "replace")
    return Header(payload_bytes, key, fingerprint, checksum, page_size, layers, indexers, name)


def damage(entry: memoryview) -> str | None:
    """What is wrong with an entry, whatever its layout and key; None if every byte is as it was sealed."""
    header = parse_header(entry)
    if isinstance(header, str):
        return header
    if _checksum(entry[HEADER_BYTES:]) != header.checksum:
        return "its bytes have lost their checksum"
    return None


class EntryLayout:
    """Where the pages of a cache's layers stand in an entry.

    Attributes:
        fingerprint: 16 bytes that differ between models and layouts.
        entry_bytes: length of every entry, a multiple of 16.
    """

    def __init__(self, cache: PagedKvCache, model: str) -> None:
        self.fingerprint = cache.layout_fingerprint(model)
        self.entry_bytes = HEADER_BYTES + cache.page_bytes
        self._page_size = cache.page_size
        self._owners = cache.indexer_layers
        self._model = model.encode()[:64]

    def views(self, slots: Tensor) -> tuple[list[Tensor], list[Tensor | None]]:
        """The pages of each layer in memory of many entries, uint8 [slots, entry_bytes], as a layer's store.

        Returns:
            MLA pages [slots, page_size, 656] and indexer pages [slots, page_size * 132] of each layer.
        """
        mla: list[Tensor] = []
        indexer: list[Tensor | None] = []
        start = HEADER_BYTES
        for owner in self._owners:
            end = start + self._page_size * MLA_RECORD_BYTES
            mla.append(slots[:, start:end].unflatten(1, (self._page_size, MLA_RECORD_BYTES)))
            start = end
            if owner:
                end = start + self._page_size * INDEX_RECORD_BYTES
                indexer.append(slots[:, start:end])
                start = end
            else:
                indexer.append(None)
        return mla, indexer

    def seal(self, entry: memoryview, key: bytes) -> None:
        """Write the header in front of a complete payload."""
        entry[:HEADER_BYTES] = self._header(key, _checksum(entry[HEADER_BYTES:]))

    def problem(self, entry: memoryview, key: bytes, checksum: bytes | None = None) -> str | None:
        """Why an entry must not be used for a key; None if every byte is as it was sealed.

        Args:
            entry: with its header.
            key: that it should have.
            checksum: XXH3-128 of the bytes that are to be used, which are a copy of the payload; None = those here are.
        """
        # A good entry's whole header is known: one comparison, so that checking threads rarely wait for each other.
        if len(entry) == self.entry_bytes:
            own = _checksum(entry[HEADER_BYTES:]) if checksum is None else checksum
            if bytes(entry[:HEADER_BYTES]) == self._header(key, own):
                return None
        header = parse_header(entry)
        if isinstance(header, str):
            return header
        if header.fingerprint != self.fingerprint:
            return "another model or layout"
        if header.payload_bytes != len(entry) - HEADER_BYTES or len(entry) != self.entry_bytes:
            return f"it has {header.payload_bytes} bytes, expected {self.entry_bytes - HEADER_BYTES}"
        if header.key != key:
            return f"it belongs to the key {header.key.hex()}"
        if checksum not in (None, header.checksum):
            return "its bytes have lost their checksum"
        return damage(entry) or "its header is damaged"

    def _header(self, key: bytes, checksum: bytes) -> bytes:
        fields = _FIELDS.pack(
            MAGIC,
            VERSION,
            HEADER_BYTES,
            self.entry_bytes - HEADER_BYTES,
            key,
            self.fingerprint,
            checksum,
            self._page_size,
            len(self._owners),
            sum(self._owners),
            0,
            self._model,
        )
        return (fields + xxhash.xxh3_128_digest(fields)).ljust(HEADER_BYTES, b"\0")


def allocate_entries(count: int, entry_bytes: int, pinned: bool) -> Tensor:
    """Host memory of ``count`` entries, uint8 [count, entry_bytes]."""
    with torch.inference_mode(False):  # a forward outside inference mode could not write to an inference tensor
        return torch.zeros(count, entry_bytes, dtype=torch.uint8, pin_memory=pinned)
