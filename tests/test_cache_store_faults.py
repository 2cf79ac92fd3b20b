"""A backend that is slow, full, failing, hanging or full of garbage: misses with log lines, never a wait for ever."""

import gc
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from store_harness import (
    FLUSH_SECONDS,
    LAYERS,
    FakeBackend,
    assert_all_room_can_be_had,
    content_of,
    fill,
    keys_of,
    new_store,
    read_back,
    small_cache,
    store_pages,
    wait_until,
    write_pages,
)

from sparse_cp_ops.cache_store import CacheStore, backend_link
from sparse_cp_ops.cache_store import store as store_module
from sparse_cp_ops.cache_store.entry import HEADER_BYTES, EntryLayout
from sparse_cp_ops.cache_store.reader import CacheReader, StagedReader
from sparse_cp_ops.kv_cache import PagedKvCache

Seal = Callable[[memoryview, bytes], None]


@pytest.fixture
def backend() -> Iterator[FakeBackend]:
    """Whatever hangs in it is let go at the end."""
    fake = FakeBackend()
    yield fake
    fake.open_gate.set()
    fake.put_gate.set()


def test_another_process_finds_what_was_acknowledged(device: str, backend: FakeBackend) -> None:
    writing, reading = new_store(backend, device=device), new_store(backend, device=device)
    keys = keys_of(writing, 5)
    assert store_pages(writing, keys) == keys
    assert reading.match([*keys, bytes(16)]) == 5
    assert read_back(reading, keys) == 5
    assert (reading.stats.backend_hits, reading.stats.memory_hits) == (5, 0)
    calls = backend.calls
    assert read_back(reading, keys) == 5
    assert (reading.stats.backend_hits, reading.stats.memory_hits) == (5, 5)
    assert backend.calls == calls
    for store in (writing, reading):
        store.close()
    assert backend.closed


@pytest.mark.parametrize("pages", [1, 2, 3])
def test_more_pages_than_the_memory_has_pass_through_it(device: str, backend: FakeBackend, pages: int) -> None:
    big, small = new_store(backend, device=device), new_store(backend, pages, device)
    keys = keys_of(big, 8)
    store_pages(big, keys)
    for _ in range(3):
        assert read_back(small, keys) == 8
    assert read_back(small, keys_of(big, 3, seed=1)) == 0
    assert_all_room_can_be_had(small)


def test_pages_are_checked_while_those_before_them_are_copied(
    device: str, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And none reaches its page before its own check."""
    monkeypatch.setattr(store_module, "BATCH", 2)
    store = new_store(backend, device=device)
    keys = keys_of(store, 6)
    store_pages(store, keys)
    kind = CacheReader if device == "cpu" else StagedReader
    fetched: list[bytes] = []
    checked: list[bytes] = []
    fetch, problems, load = kind.fetch, kind.problems, kind.load

    def fetching(reader: CacheReader, slots: dict[bytes, int]) -> None:
        fetched.extend(slots)
        fetch(reader, slots)

    def checking(reader: CacheReader, slots: dict[bytes, int]) -> dict[bytes, str | None]:
        checked.extend(slots)
        return problems(reader, slots)

    def loading(reader: CacheReader, start: int, slots: list[int]) -> Any:
        assert checked == keys[: start + len(slots)]
        assert fetched == keys[: start + len(slots) + 2]
        return load(reader, start, slots)

    monkeypatch.setattr(kind, "fetch", fetching)
    monkeypatch.setattr(kind, "problems", checking)
    monkeypatch.setattr(kind, "load", loading)
    assert read_back(store, keys) == 6
    assert_all_room_can_be_had(store)


@pytest.mark.parametrize("victim", range(6))
@pytest.mark.parametrize("in_memory", [True, False])
def test_a_damaged_page_ends_a_read_of_several_batches(
    device: str, backend: FakeBackend, victim: int, in_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "BATCH", 2)
    store = new_store(backend, device=device)
    keys = keys_of(store, 6)
    store_pages(store, keys)
    if in_memory:
        (slot,) = store.memory.find([keys[victim]]).values()
        store.memory.slots[slot, -1] ^= 1
        store.memory.release([slot])
    else:
        store.memory.clear()
        backend.content[keys[victim]] = flipped(backend.content[keys[victim]], HEADER_BYTES)
    assert read_back(store, keys) == victim
    assert store.stats.damaged == 1
    assert_all_room_can_be_had(store)


def test_an_error_that_no_backend_should_raise_is_a_miss_as_well(
    backend: FakeBackend, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = new_store(backend)
    keys = keys_of(store, 3)

    def failing() -> None:
        raise KeyError("from a client library")

    monkeypatch.setattr(backend, "_pass", failing)
    with caplog.at_level(logging.WARNING):
        assert store.match(keys) == 0
        end_the_break(store)
        assert read_back(store, keys) == 0
        end_the_break(store)
        assert store_pages(store, keys) == []
    assert caplog.text.count("from a client library") == 3
    assert store.stats.failed == 3
    assert_all_room_can_be_had(store)


def end_the_break(store: CacheStore) -> None:
    """As if the time had passed for which a failed backend is left alone."""
    store._link._down_until = 0.0


def flipped(content: bytes, position: int) -> bytes:
    return content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :]


def with_other_header(
    make: Callable[[PagedKvCache], EntryLayout], key: bytes | None = None
) -> Callable[[bytes, bytes], bytes]:
    """The same payload under a valid header of another layout, model or key."""

    def change(content: bytes, own_key: bytes) -> bytes:
        layout = make(small_cache())
        entry = bytearray(content)
        layout.entry_bytes = len(entry)
        layout.seal(memoryview(entry), key or own_key)
        return bytes(entry)

    return change


DAMAGE: dict[str, tuple[Callable[[bytes, bytes], bytes], str]] = {
    "first payload bit": (lambda content, _: flipped(content, HEADER_BYTES), "its bytes have lost their checksum"),
    "last payload bit": (lambda content, _: flipped(content, len(content) - 1), "its bytes have lost their checksum"),
    "half written": (
        lambda content, _: content[: len(content) // 2] + bytes(len(content) - len(content) // 2),
        "its bytes have lost their checksum",
    ),
    "zeros": (lambda content, _: bytes(len(content)), "no entry of this format"),
    "magic": (lambda content, _: flipped(content, 0), "no entry of this format"),
    "version": (lambda content, _: flipped(content, 8), "version 0 of the format, expected 1"),
    "length in the header": (lambda content, _: flipped(content, 16), "its header is damaged"),
    "key in the header": (lambda content, _: flipped(content, 24), "its header is damaged"),
    "header checksum": (lambda content, _: flipped(content, 152), "its header is damaged"),
    "behind the header checksum": (lambda content, _: flipped(content, HEADER_BYTES - 1), "its header is damaged"),
    "another model": (with_other_header(lambda cache: EntryLayout(cache, "other")), "another model or layout"),
    "another layout": (
        with_other_header(lambda _: EntryLayout(small_cache(layers=(True, True, False)), "")),
        "another model or layout",
    ),
    "another page's entry": (
        with_other_header(lambda cache: EntryLayout(cache, ""), b"x" * 16),
        f"it belongs to the key {(b'x' * 16).hex()}",
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_entries_are_misses_and_can_be_stored_again(
    backend: FakeBackend, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    change, message = DAMAGE[damage]
    writing = new_store(backend)
    keys = keys_of(writing, 4)
    store_pages(writing, keys)
    good = backend.content[keys[2]]
    backend.content[keys[2]] = change(good, keys[2])
    assert backend.content[keys[2]] != good
    reading = new_store(backend)
    with caplog.at_level(logging.WARNING):
        assert read_back(reading, keys) == 2
    assert f"miss: the stored page {keys[2].hex()} is dropped: {message}" in caplog.text
    assert reading.stats.damaged == 1
    assert reading.match(keys) == 2
    assert store_pages(reading, keys) == keys[2:3]  # the fourth one was good and is in memory
    assert backend.content[keys[2]] == good
    assert read_back(new_store(backend), keys) == 4
    assert_all_room_can_be_had(reading)


def test_an_entry_holds_the_bytes_of_all_layers_and_both_caches(backend: FakeBackend) -> None:
    """The format in docs/cache_store.md, independently of the code that reads it."""
    store = new_store(backend)
    (key,) = keys_of(store, 1)
    store_pages(store, [key])
    entry = backend.content[key]
    assert entry[:8] == b"SCPOPAGE"
    assert int.from_bytes(entry[8:12], "little") == 1
    assert int.from_bytes(entry[12:16], "little") == HEADER_BYTES == 256
    assert int.from_bytes(entry[16:24], "little") == len(entry) - 256 == store.cache.page_bytes
    assert entry[24:40] == key
    assert entry[40:56] == store.fingerprint
    mla, index = 16 * 656, 16 * 132
    contents = content_of(store.cache, key)  # three MLA pages, then the indexer pages of layers 0 and 2
    expected = [contents[0], contents[3], contents[1], contents[2], contents[4]]
    assert sum(LAYERS) == 2
    assert entry[256:] == b"".join(bytes(array.reshape(-1).numpy()) for array in expected)
    assert len(entry) == 256 + 3 * mla + 2 * index


def test_a_failing_backend_is_left_alone_for_a_while(
    backend: FakeBackend, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend_link, "RETRY_SECONDS", 60.0)
    other, store = new_store(backend), new_store(backend)
    keys = keys_of(store, 2)
    store_pages(other, keys)
    backend.failing = True
    with caplog.at_level(logging.WARNING):
        assert read_back(store, keys) == 0
    assert "left alone for 60 s: the fake backend fails" in caplog.text
    calls = backend.calls
    assert store.match(keys) == 0
    assert read_back(store, keys) == 0
    more = keys_of(store, 2, seed=1)
    assert store_pages(store, more) == []
    assert backend.calls == calls
    assert store.stats.failed == 2
    # What the backend has not taken is still a hit in this process.
    assert read_back(store, more) == 2
    backend.failing = False
    end_the_break(store)
    assert read_back(store, keys) == 2
    assert_all_room_can_be_had(store)


def test_a_full_backend_refuses_pages_and_reads_go_on(backend: FakeBackend, caplog: pytest.LogCaptureFixture) -> None:
    backend.room = 3
    store = new_store(backend)
    keys = keys_of(store, 5)
    with caplog.at_level(logging.WARNING):
        assert store_pages(store, keys) == keys[:3]
    assert "refused 2 of 5 pages" in caplog.text
    assert (store.stats.stored, store.stats.failed) == (3, 2)
    assert read_back(new_store(backend), keys) == 3


def test_a_hanging_backend_costs_one_timeout_and_no_memory(
    backend: FakeBackend, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, store = new_store(backend), new_store(backend, timeout=1.0)
    keys = keys_of(store, 4)
    store_pages(other, keys)
    monkeypatch.setattr(backend_link, "RETRY_SECONDS", 60.0)
    backend.open_gate.clear()
    with caplog.at_level(logging.WARNING):
        start = time.monotonic()
        assert read_back(store, keys) == 0
        assert time.monotonic() - start > 0.9
    assert "has not answered in time" in caplog.text
    calls = backend.calls
    assert read_back(store, keys) == 0  # left alone: nothing to wait for
    assert backend.calls == calls
    # The memory that the hanging call may still fill is not given to anybody else.
    fill(store.cache, keys_of(store, 8, seed=2), range(8))
    writer = store.writer(keys_of(store, 8, seed=2), range(8))
    assert writer is not None
    assert len(writer.keys) == 4
    writer.abort()
    backend.open_gate.set()
    end_the_break(store)
    assert read_back(store, keys) == 4
    assert store_pages(store, keys_of(store, 8, seed=3)) == keys_of(store, 8, seed=3)
    assert_all_room_can_be_had(store)


def test_what_waits_for_a_hanging_backend_is_bounded_by_the_memory(backend: FakeBackend) -> None:
    """Back-pressure: pages that the backend has not got yet keep their memory, and what finds none is not stored."""
    store = new_store(backend, pages=4, timeout=0.2, patience=0.1)
    first, second = keys_of(store, 3, seed=1), keys_of(store, 3, seed=2)
    backend.open_gate.clear()
    fill(store.cache, first, range(3))
    with store.writer(first, range(3)) as writer:  # type: ignore[union-attr]
        for layer in range(3):
            writer.write_layer(layer)
    assert not store.flush(0.2)
    start = time.monotonic()
    late = store.writer(second, range(3))
    assert time.monotonic() - start > 0.08
    assert late is not None
    assert late.keys == second[:1]
    assert store.stats.refused == 2
    late.abort()
    backend.open_gate.set()
    assert store.flush(5)
    assert writer.acknowledged == first
    assert store_pages(store, second) == second
    assert_all_room_can_be_had(store)


def test_pages_can_be_read_while_the_backend_is_busy_with_earlier_ones(backend: FakeBackend) -> None:
    store = new_store(backend)
    backend.put_gate.clear()
    chunks = [keys_of(store, 2, seed) for seed in range(3)]
    writers = [write_pages(store, chunk) for chunk in chunks]
    wait_until(lambda: all(key in store.memory for key in chunks[-1]))
    for chunk in chunks:
        assert read_back(store, chunk) == 2
    assert not store.flush(0.0)
    assert store.stats.stored == 0
    others = store.writer(keys_of(store, 8, seed=9), range(8))
    assert others is not None
    assert len(others.keys) == 2  # what the backend has not got yet keeps its memory
    others.abort()
    backend.put_gate.set()
    assert store.flush()
    assert [writer.acknowledged for writer in writers] == chunks
    assert store.stats.stored == 6
    assert_all_room_can_be_had(store)


def test_pages_that_cannot_be_sealed_are_dropped(
    backend: FakeBackend, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whichever of them it is: those before it, in batches before its own, are stored, and all room comes back."""
    monkeypatch.setattr(store_module, "BATCH", 2)
    for victim, stored in enumerate((0, 0, 2, 2)):
        store = new_store(backend)
        keys, seal = keys_of(store, 4, seed=victim), store.layout.seal

        def failing(entry: memoryview, key: bytes, refused: bytes = keys[victim], seal: Seal = seal) -> None:
            if key == refused:
                raise RuntimeError("not this one")
            seal(entry, key)

        with monkeypatch.context() as patched, caplog.at_level(logging.WARNING):
            patched.setattr(store.layout, "seal", failing)
            assert store_pages(store, keys) == keys[:stored]
        assert f"{4 - stored} pages are dropped before they were sealed" in caplog.text
        assert (store.stats.stored, store.stats.failed) == (stored, 4 - stored)
        assert store_pages(store, [key for key in keys if key not in store.memory]) == keys[victim:]
        assert read_back(store, keys) == 4
        assert_all_room_can_be_had(store)


def test_what_is_sealed_after_closing_reaches_no_closed_backend(
    backend: FakeBackend, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(store_module, "BATCH", 1)
    store = new_store(backend)
    sealing, may_seal, seal = threading.Event(), threading.Event(), store.layout.seal

    def slow(entry: memoryview, key: bytes) -> None:
        sealing.set()
        may_seal.wait()
        seal(entry, key)

    monkeypatch.setattr(store.layout, "seal", slow)
    writer = write_pages(store, keys_of(store, 3))
    assert sealing.wait(FLUSH_SECONDS)
    with caplog.at_level(logging.WARNING):
        store.close(timeout=0.1)
    assert "pages may be lost" in caplog.text
    assert "closed while its backend is busy" in caplog.text
    may_seal.set()
    wait_until(lambda: backend.closed)
    assert writer.acknowledged == []
    assert backend.content == {}
    assert store.stats.failed == 3


def test_a_patient_writer_waits_for_room(backend: FakeBackend) -> None:
    store = new_store(backend, pages=4, patience=10.0)
    for seed in range(20):
        keys = keys_of(store, 4, seed)
        fill(store.cache, keys, range(4))
        with store.writer(keys, range(4)) as writer:  # type: ignore[union-attr]
            for layer in range(3):
                writer.write_layer(layer)
    assert store.flush()
    assert store.stats.refused == 0
    for seed in range(20):
        assert read_back(store, keys_of(store, 4, seed)) == 4
    assert_all_room_can_be_had(store)


@pytest.mark.parametrize("busy", ["storing", "reading"])
def test_closing_never_hangs(backend: FakeBackend, busy: str, caplog: pytest.LogCaptureFixture) -> None:
    other, store = new_store(backend), new_store(backend, timeout=0.1)
    keys = keys_of(store, 3)
    store_pages(other, keys)
    backend.open_gate.clear()
    if busy == "storing":
        writer = store.writer(keys_of(store, 3, seed=1), range(3))
        assert writer is not None
        with writer:
            for layer in range(3):
                writer.write_layer(layer)
    else:
        assert store.read(keys, range(3)) == 0
    with caplog.at_level(logging.WARNING):
        store.close(timeout=0.5)  # the backend hangs until the test has ended
    assert ("pages may be lost" in caplog.text) == (busy == "storing")
    for call in (lambda: store.match(keys), lambda: store.read(keys, range(3)), lambda: store.writer(keys, range(3))):
        with pytest.raises(RuntimeError, match="the store is closed"):
            call()


def test_times_that_cannot_be_waited_for_are_refused_before_anything_happens(backend: FakeBackend) -> None:
    store = new_store(backend)
    keys = keys_of(store, 1)
    fill(store.cache, keys, range(1))
    backend.open_gate.clear()
    with store.writer(keys, range(1)) as writer:  # type: ignore[union-attr]
        for layer in range(3):
            writer.write_layer(layer)
    for seconds in (-1, float("nan"), float("inf")):
        for name, call in (("flush", store.flush), ("close", store.close)):
            with pytest.raises(ValueError, match=f"CacheStore.{name}: timeout: expected 0 to .* s, got {seconds}"):
                call(seconds)
    backend.open_gate.set()
    assert store.flush()
    assert read_back(store, keys) == 1


def test_closing_flushes(backend: FakeBackend) -> None:
    store = new_store(backend)
    keys = keys_of(store, 6)
    fill(store.cache, keys, range(6))
    with store.writer(keys, range(6)) as writer:  # type: ignore[union-attr]
        for layer in range(3):
            writer.write_layer(layer)
    store.close()
    assert set(backend.content) == set(keys)
    assert backend.closed


def test_a_store_that_is_dropped_unclosed_ends_its_threads(backend: FakeBackend) -> None:
    others = set(threading.enumerate())
    store = new_store(backend)
    keys = keys_of(store, 2)
    store_pages(store, keys)
    assert read_back(store, keys) == 2
    own = set(threading.enumerate()) - others
    names = {thread.name.rsplit("_", 1)[0] for thread in own}
    assert names == {f"cache-store-{work}" for work in ("seal", "send", "receive", "check")}
    del store
    gc.collect()
    wait_until(lambda: not any(thread.is_alive() for thread in own))
