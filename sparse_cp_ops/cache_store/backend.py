"""What lies behind the host memory of a store: the interface, and the URLs that choose one."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import SplitResult, parse_qsl, unquote_to_bytes, urlsplit

UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


class BackendError(RuntimeError):
    """The backend can't be used now: the store goes on without it for a while."""


@dataclass(frozen=True)
class StoredEntry:
    """One entry of a backend, for inspection."""

    name: str
    size: int
    header: bytes  # its first bytes, at most HEADER_BYTES
    problem: str | None = None  # why they can't be read


class Backend(Protocol):
    """Entries by key in another place. All have the same length, and one key always has the same content.

    Calls may block: the store makes them from its own threads and stops waiting after its timeout. They raise
    BackendError or OSError if the place can't be reached or used. ``get`` and ``put`` may run at once.
    """

    def present(self, keys: Sequence[bytes]) -> list[bool]:
        """Which of the entries are there."""

    def put(self, entries: Sequence[tuple[bytes, memoryview]]) -> list[bool]:
        """Store entries; True where one is complete, visible to others, and as durable as the backend promises."""

    def get(self, entries: Sequence[tuple[bytes, memoryview]]) -> list[bool]:
        """Fill the memory given with each key; False where there is no entry of that length."""

    def touch(self, keys: Sequence[bytes]) -> None:
        """Entries of requests were used now: the first page of one is to be the last to make room. Never an error."""

    def remove(self, key: bytes) -> None:
        """Drop a damaged entry, so that a good one can replace it."""

    def entries(self) -> Iterator[StoredEntry]:
        """Everything that is there."""

    def close(self) -> None:
        """Give up connections and temporary files."""


def parse_bytes(name: str, text: str) -> int:
    """A number of bytes such as ``"4GiB"`` or ``"100000"``.

    Raises:
        ValueError: anything else; it is named.
    """
    unit = next((unit for unit in ("KiB", "MiB", "GiB", "TiB", "B") if text.endswith(unit)), "")
    number = text.removesuffix(unit)
    if not (number.isascii() and number.isdigit()):
        raise ValueError(f"{name}: expected a number of bytes such as 4GiB, got {text!r}")
    return int(number) * UNITS[unit or "B"]


@dataclass(frozen=True)
class StoreUrl:
    """A store's URL in parts: ``memory://``, ``file:///folder`` or ``mooncake://master:port``, then ``?name=value``."""

    scheme: str
    place: SplitResult
    options: Mapping[str, str]

    @classmethod
    def parse(cls, url: str) -> StoreUrl:
        """Take a URL apart.

        Raises:
            TypeError: no str.
            ValueError: another scheme, an option that the scheme does not have, one given twice, or a part that would
                be ignored.
        """
        if not isinstance(url, str):
            raise TypeError(f"CacheStore.open: url: expected str, got {type(url).__name__}")
        # urlsplit leaves such characters out, and the URL would be that of another folder.
        if url != url.strip() or any(character < " " for character in url):
            raise ValueError(
                f"CacheStore.open: url: expected no control characters and no spaces around it, got {url!r}"
            )
        try:
            place = urlsplit(url)
            pairs = parse_qsl(place.query, keep_blank_values=True, strict_parsing=bool(place.query))
            _ = place.port
        except ValueError as error:
            raise ValueError(
                f"CacheStore.open: url: expected scheme://place?name=value, got {url!r} ({error})"
            ) from None
        if place.scheme not in OPTIONS:
            raise ValueError(
                f"CacheStore.open: url: expected one of {', '.join(f'{name}://' for name in OPTIONS)}, got {url!r}"
            )
        if place.fragment or (place.scheme == "memory" and (place.netloc or place.path)):
            raise ValueError(f"CacheStore.open: url: expected options behind ?, and # in a folder as %23, got {url!r}")
        options = dict(pairs)
        known = OPTIONS[place.scheme]
        for name, _ in pairs:
            if name not in known:
                raise ValueError(f"CacheStore.open: url: expected options {', '.join(known)}, got {name!r}")
        if len(options) < len(pairs):
            raise ValueError(f"CacheStore.open: url: expected each option once, got {place.query!r}")
        return cls(place.scheme, place, options)

    def size(self, name: str, default: str) -> int:
        """An option that is a number of bytes."""
        return parse_bytes(f"CacheStore.open: url: {name}", self.options.get(name, default))

    @property
    def path(self) -> str:
        """The folder of a ``file://`` URL."""
        if self.place.netloc or not self.place.path.startswith("/"):
            raise ValueError(f"CacheStore.open: url: expected file:///absolute/folder, got {self.place.geturl()!r}")
        folder = unquote_to_bytes(os.fsencode(self.place.path))  # names of folders need not be UTF-8
        if b"\0" in folder:
            raise ValueError(f"CacheStore.open: url: expected a folder without %00, got {self.place.geturl()!r}")
        return os.fsdecode(folder)


OPTIONS: dict[str, tuple[str, ...]] = {
    "memory": ("memory",),
    "file": ("memory", "disk"),
    "mooncake": ("memory", "metadata", "metrics", "hostname", "protocol", "device", "segment"),
}


def open_backend(url: StoreUrl, entry_bytes: int | None) -> Backend | None:
    """The backend of a URL, None for plain memory.

    Args:
        url: where.
        entry_bytes: length of every entry; None to inspect entries of any length.
    """
    if url.scheme == "file":
        from sparse_cp_ops.cache_store.file_backend import FileBackend

        return FileBackend(url.path, entry_bytes, url.size("disk", "") if "disk" in url.options else None)
    if url.scheme == "mooncake":
        from sparse_cp_ops.cache_store.mooncake_backend import MooncakeBackend

        return MooncakeBackend(url, entry_bytes)
    return None
