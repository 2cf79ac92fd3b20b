"""``python -m sparse_cp_ops cache inspect URL``: what is in a store. It changes nothing there."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence

from sparse_cp_ops.cache_store.backend import Backend, BackendError, StoreUrl, open_backend
from sparse_cp_ops.cache_store.entry import HEADER_BYTES, Header, damage, parse_header

_LONGEST_BYTES = 2**30  # of an entry that is read as a whole: a hundred times one of DeepSeek-V3.2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the cache command."""
    commands = parser.add_subparsers(dest="cache_command", required=True)
    inspect = commands.add_parser("inspect", help="list what is in a store, model by model")
    inspect.add_argument("url", help="file:///folder or mooncake://master:port?metadata=...&metrics=...")
    inspect.add_argument("--verify", action="store_true", help="read every entry and compare its checksum")


def run(arguments: argparse.Namespace) -> int:
    """Print the table; 1 if an entry is damaged, 2 if the store can't be read."""
    try:
        url = StoreUrl.parse(arguments.url)
        backend = open_backend(url, None)
        if backend is None:
            raise ValueError("a memory:// store lives and ends with its process")
        try:
            return _report(url, backend, arguments.verify)
        finally:
            backend.close()
    except (ValueError, OSError, ImportError, BackendError) as error:
        print(f"cache inspect: {error}", file=sys.stderr)
        return 2


def _report(url: StoreUrl, backend: Backend, verify: bool) -> int:
    rows: Counter[tuple[str, ...]] = Counter()
    sizes: Counter[tuple[str, ...]] = Counter()
    damaged: list[tuple[str, str]] = []
    readers: dict[int, Backend | None] = {}  # one for each length of entries
    for entry in backend.entries():
        header = parse_header(entry.header)
        problem = entry.problem
        if problem is None:
            problem = header if isinstance(header, str) else _contradiction(header, entry.name, entry.size)
        if problem is None and verify and entry.size > _LONGEST_BYTES:
            problem = f"it has {entry.size} bytes, at most {_LONGEST_BYTES} are verified"
        if problem is None and verify and not isinstance(header, str):
            if entry.size not in readers:
                readers[entry.size] = open_backend(url, entry.size)
            reader = readers[entry.size]
            content = memoryview(bytearray(entry.size))
            there = reader is not None and reader.get([(header.key, content)])[0]
            problem = damage(content) if there else "it is gone"
        if problem is not None or isinstance(header, str):
            damaged.append((entry.name, str(problem)))
            continue
        row = (
            _printable(header.model) or "-",
            header.fingerprint.hex()[:12],
            f"{header.page_size}",
            f"{header.num_layers}",
            f"{header.indexer_layers}",
        )
        rows[row] += 1
        sizes[row] += entry.size
    for reader in readers.values():
        if reader is not None:
            reader.close()
    titles = ("model", "fingerprint", "page size", "layers", "indexers", "entries", "MiB")
    lines = [(*row, f"{count}", f"{sizes[row] / 2**20:.1f}") for row, count in sorted(rows.items())]
    _print_table([titles, *lines])
    print(
        f"{sum(rows.values())} entries, {sum(sizes.values()) / 2**20:.1f} MiB"
        + (", all verified" if verify and not damaged else "")
    )
    for name, problem in damaged:
        print(f"damaged: {_printable(name)}: {problem}")
    return 1 if damaged else 0


def _contradiction(header: Header, name: str, size: int) -> str | None:
    if header.key.hex() != name:
        return f"it belongs to the key {header.key.hex()}"
    if header.payload_bytes != size - HEADER_BYTES:
        return f"it has {size - HEADER_BYTES} bytes, its header says {header.payload_bytes}"
    return None


def _printable(text: str) -> str:
    """Text from a store may hold anything, also what a terminal would obey or what it can't show."""
    encoding = sys.stdout.encoding or "utf-8"
    shown = "".join(character if character.isprintable() else "?" for character in text)
    return shown.encode(encoding, "replace").decode(encoding)


def _print_table(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
