"""Entries in a Mooncake cluster: one object an entry, moved through memory that is registered with its transfer engine.

Mooncake (package ``mooncake-transfer-engine-non-cuda``, or the one for CUDA) keeps objects in the memory of whoever
contributes segments; ``mooncake_master`` knows where. Its own limits on calls are those of its environment variables
(``MC_RPC_TIMEOUT_MS`` and others); the store stops waiting after its own timeout.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from sparse_cp_ops.cache_store.backend import BackendError, StoredEntry, StoreUrl
from sparse_cp_ops.cache_store.entry import HEADER_BYTES

logger = logging.getLogger(__name__)

_PREFIX = "sparse_cp_ops/"
# Codes of Mooncake's calls: transfers and remote calls that failed. All others are about the one object.
_UNREACHABLE = range(-999, -799)
# Registered memory for each direction: enough entries at once to fill a network.
_BUFFER_BYTES = 64 * 2**20
_BUFFER_ENTRIES = 16
_HTTP_TIMEOUT = 5.0
_PROBE_TIMEOUT = 1.0
# Mooncake's own default lets a call to a dead master hang for a minute.
_RPC_TIMEOUTS = {"MC_RPC_TIMEOUT_MS": "3000", "MC_RPC_CONNECT_TIMEOUT_MS": "2000"}


class MooncakeBackend:
    """A client of the cluster; it connects when it is first used, and again after a failed attempt.

    What is read arrives in a buffer of its own and is copied from there, so that bytes of a transfer that was given up
    can't arrive in memory that holds something else by then.
    """

    def __init__(self, url: StoreUrl, entry_bytes: int | None) -> None:
        """Remember where the cluster is.

        Args:
            url: ``mooncake://master:port`` with ``metadata``; ``segment`` bytes are contributed (default none).
            entry_bytes: length of every entry; None to inspect only.

        Raises:
            ImportError: the package is missing.
            ValueError: a URL without master, port or metadata server.
        """
        try:
            from mooncake.store import MooncakeDistributedStore
        except ImportError as error:
            raise ImportError(
                "mooncake:// needs pip install mooncake-transfer-engine-non-cuda, and on Debian apt-get install "
                f"libibverbs1 librdmacm1 libnuma1 liburing2 ({error})"
            ) from error
        if not url.place.hostname or not url.place.port or "metadata" not in url.options:
            raise ValueError(
                "CacheStore.open: url: expected mooncake://master:port?metadata=http://host:port/metadata, "
                f"got {url.place.geturl()!r}"
            )
        self._make_client = MooncakeDistributedStore
        self._url = url
        self._segment = url.size("segment", "0")
        self._entry_bytes = entry_bytes
        self._client: Any = None
        self._lock = threading.Lock()
        count = 1 if entry_bytes is None else max(1, min(_BUFFER_ENTRIES, _BUFFER_BYTES // entry_bytes))
        self._sent, self._received = (
            torch.zeros(count, entry_bytes or HEADER_BYTES, dtype=torch.uint8) for _ in range(2)
        )

    def present(self, keys: Sequence[bytes]) -> list[bool]:
        """Which objects exist."""
        codes = _answers("batch_is_exist", self._connected().batch_is_exist([_name(key) for key in keys]))
        return [code == 1 for code in codes]

    def put(self, entries: Sequence[tuple[bytes, memoryview]]) -> list[bool]:
        """Store objects; False where the cluster has no room. One that is there stays."""
        client, stored = self._connected(), []
        for batch in self._batches(entries):
            for row, (_, content) in zip(self._sent.numpy(), batch, strict=False):
                row.data[:] = content
            codes = _answers("batch_put_from", client.batch_put_from(*self._arguments(batch, self._sent)))
            stored += [code == 0 for code in codes]
        return stored

    def get(self, entries: Sequence[tuple[bytes, memoryview]]) -> list[bool]:
        """Fetch objects; one of another length is a miss."""
        client, found = self._connected(), []
        for batch in self._batches(entries):
            codes = _answers("batch_get_into", client.batch_get_into(*self._arguments(batch, self._received)))
            for row, (key, content), code in zip(self._received.numpy(), batch, codes, strict=False):
                if code == len(content):
                    content[:] = row.data
                elif code >= 0:
                    logger.warning("miss: object %s has %d bytes, expected %d", _name(key), code, len(content))
                    client.remove(_name(key), True)  # a put would let it stay
                found.append(code == len(content))
        return found

    def touch(self, keys: Sequence[bytes]) -> None:
        """The cluster itself counts reads as use."""

    def remove(self, key: bytes) -> None:
        """Remove an object, also while others may read it."""
        _answers("remove", [self._connected().remove(_name(key), True)])

    def entries(self) -> Iterator[StoredEntry]:
        """All objects of this package; ``metrics`` of the URL is the master's HTTP address."""
        if "metrics" not in self._url.options:
            raise BackendError("to list objects the URL needs metrics=http://host:port (mooncake_master -metrics_port)")
        address = self._url.options["metrics"].rstrip("/") + "/get_all_keys"
        with urllib.request.urlopen(address, timeout=_HTTP_TIMEOUT) as answer:
            names = answer.read().decode().split()
        client = self._connected()
        for name in sorted(name for name in names if name.startswith(_PREFIX)):
            size = client.get_size(name)
            if size < 0:
                continue  # evicted meanwhile
            length = min(size, HEADER_BYTES)
            (((code,),),) = client.get_into_ranges(
                [self._received.data_ptr()], [[name]], [[[0]]], [[[0]]], [[[length]]]
            )  # fmt: skip
            if code >= 0:
                yield StoredEntry(name.removeprefix(_PREFIX), size, bytes(self._received.numpy().reshape(-1)[:length]))

    def close(self) -> None:
        """Leave the cluster; a contributed segment goes with its objects."""
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            for buffer in (self._sent, self._received):
                client.unregister_buffer(buffer.data_ptr())
            client.close()

    def _connected(self) -> Any:
        with self._lock:
            if self._client is None:
                for name, value in _RPC_TIMEOUTS.items():
                    os.environ.setdefault(name, value)
                host, port, options = str(self._url.place.hostname), self._url.place.port or 0, self._url.options
                metadata = urllib.parse.urlsplit(options["metadata"])
                # The set-up retries for a minute and a half, and nothing in this process runs meanwhile.
                _require_listening(host, port)
                _require_listening(metadata.hostname or host, metadata.port or 80)
                client = self._make_client()
                code = client.setup(
                    options.get("hostname") or _own_address(host),
                    options["metadata"],
                    self._segment,
                    _BUFFER_BYTES,
                    options.get("protocol", "tcp"),
                    options.get("device", ""),
                    f"{host}:{port}",
                )
                for buffer in (self._sent, self._received):
                    code = code or client.register_buffer(buffer.data_ptr(), buffer.numel())
                if code:
                    raise BackendError(f"Mooncake at {host}:{port} can't be reached (code {code})")
                self._client = client
            return self._client

    def _batches(self, entries: Sequence[tuple[bytes, memoryview]]) -> Iterator[Sequence[tuple[bytes, memoryview]]]:
        step = self._sent.shape[0]
        return (entries[start : start + step] for start in range(0, len(entries), step))

    def _arguments(
        self, batch: Sequence[tuple[bytes, memoryview]], buffer: Tensor
    ) -> tuple[list[str], list[int], list[int]]:
        """Names, addresses in the buffer, lengths."""
        addresses = [buffer[row].data_ptr() for row in range(len(batch))]
        return [_name(key) for key, _ in batch], addresses, [len(content) for _, content in batch]


def _name(key: bytes) -> str:
    return _PREFIX + key.hex()


def _answers(call: str, codes: list[int]) -> list[int]:
    """The codes, if the cluster could be reached for any of them."""
    if codes and all(code in _UNREACHABLE for code in codes):
        raise BackendError(f"Mooncake's {call} has failed for all of {len(codes)} entries (code {codes[0]})")
    return codes


def _require_listening(host: str, port: int) -> None:
    """Raise OSError unless somebody accepts connections there."""
    socket.create_connection((host, port), _PROBE_TIMEOUT).close()


def _own_address(other: str) -> str:
    """The address of this machine as another one sees it; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((other, 9))
        return str(probe.getsockname()[0])
