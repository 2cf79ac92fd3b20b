"""mooncake:// against real servers on loopback: what is stored comes back, and every kind of failure is a miss."""

import logging
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from mooncake_cluster import HOST, Cluster, running_cluster
from store_harness import keys_of, memory_for, read_back, small_cache, store_pages

from sparse_cp_ops.cache_store import CacheStore, backend_link
from sparse_cp_ops.cache_store.backend import StoreUrl, open_backend

pytestmark = pytest.mark.mooncake

# An owner that is silent for six seconds is given up, and a client retries every second: all of it several times over.
RECOVERY = 40.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("mooncake")) as running:
        yield running


@pytest.fixture
def own_cluster(tmp_path: Path) -> Iterator[Cluster]:
    """For what leaves traces in the master for a while."""
    with running_cluster(tmp_path) as running:
        yield running


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_link, "RETRY_SECONDS", 0.5)


def open_store(cluster: Cluster, pages: int = 8, model: str = "", **times: float) -> CacheStore:
    return CacheStore.open(cluster.url(str(memory_for(small_cache(), pages))), small_cache(), model, **times)


def stored_again(cluster: Cluster, model: str, seed: int) -> None:
    """Within a while a new store can store and another one can read."""
    end = time.monotonic() + RECOVERY
    writing, reading = open_store(cluster, model=model), open_store(cluster, model=model)
    keys = keys_of(writing, 3, seed)
    while store_pages(writing, keys) != keys or read_back(reading, keys) != 3:
        assert time.monotonic() < end
        time.sleep(0.3)
        seed += 1000
        keys = keys_of(writing, 3, seed)
    for store in (writing, reading):
        store.close()


@pytest.mark.parametrize("pages", [1, 8])
def test_another_client_reads_what_was_acknowledged(cluster: Cluster, pages: int) -> None:
    model = f"round trip {pages}"
    writing, reading = open_store(cluster, 8, model), open_store(cluster, pages, model)
    keys = keys_of(writing, 6)
    assert reading.match(keys) == 0
    assert store_pages(writing, keys) == keys
    assert reading.match([*keys, b"unknown".ljust(16)]) == 6
    assert read_back(reading, keys) == 6
    assert reading.stats.backend_hits == 6
    # Stored once more: it is there, and stays as it is.
    assert store_pages(open_store(cluster, 8, model), keys) == keys
    assert read_back(open_store(cluster, 8, "another model"), keys) == 0


def test_damaged_objects_are_misses_and_are_replaced(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    store = open_store(cluster, model="damage")
    keys = keys_of(store, 3)
    store_pages(store, keys)
    backend = open_backend(StoreUrl.parse(cluster.url("1MiB")), store.layout.entry_bytes)
    assert backend is not None
    entry = bytearray(store.layout.entry_bytes)
    assert backend.get([(keys[1], memoryview(entry))]) == [True]
    entry[-1] ^= 1
    backend.remove(keys[1])
    assert backend.put([(keys[1], memoryview(entry))]) == [True]
    reading = open_store(cluster, model="damage")
    with caplog.at_level(logging.WARNING):
        assert read_back(reading, keys) == 1
    assert "its bytes have lost their checksum" in caplog.text
    # One of another length, as another program might leave it.
    backend.remove(keys[0])
    short = open_backend(StoreUrl.parse(cluster.url("1MiB")), 1000)
    assert short is not None
    assert short.put([(keys[0], memoryview(bytearray(1000)))]) == [True]
    again = open_store(cluster, model="damage")
    assert read_back(again, keys) == 0
    assert "has 1000 bytes, expected" in caplog.text
    assert store_pages(again, keys) == keys[:2]  # the third one was good and is in memory
    assert read_back(open_store(cluster, model="damage"), keys) == 3
    for each in (backend, short):
        each.close()


def test_more_than_the_cluster_holds(tmp_path: Path) -> None:
    """16 MB take some 430 of these entries: old ones leave, or new ones are refused, and nothing is ever wrong."""
    with running_cluster(tmp_path, "16 MB") as cluster:
        store = open_store(cluster, 64, "full", patience=5.0)
        many = [keys_of(store, 8, seed) for seed in range(100)]
        acknowledged = sum(len(store_pages(store, keys)) for keys in many)
        assert acknowledged >= 300
        reading = open_store(cluster, 64, "full")
        found = [read_back(reading, keys) for keys in many]
        assert 50 < sum(found) < 450
        assert reading.stats.damaged == 0
        stored_again(cluster, "full", 1)
        for each in (store, reading):
            each.close()


def test_a_stopped_master_holds_up_neither_look_ups_nor_the_process(own_cluster: Cluster) -> None:
    """Calls to it hang for seconds; the threads of this process go on meanwhile."""
    store = open_store(own_cluster, timeout=0.3)
    keys = keys_of(store, 2)
    assert store_pages(store, keys) == keys
    own_cluster.send("mooncake_master", signal.SIGSTOP)
    for call in (
        lambda: store.match(keys_of(store, 2, 1)),
        lambda: read_back(store, keys_of(store, 2, 1)),
        lambda: store.close(timeout=0.5),
    ):
        start = time.monotonic()
        assert not call()
        assert time.monotonic() - start < 2
        time.sleep(0.6)


def test_a_stopped_owner_is_a_timeout_and_then_a_hit_again(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    store = open_store(cluster, model="slow")
    keys = keys_of(store, 4)
    assert store_pages(store, keys) == keys
    reading = open_store(cluster, model="slow", timeout=0.7)
    assert reading.match(keys) == 4  # connected
    cluster.send("mooncake_client", signal.SIGSTOP)
    try:
        start = time.monotonic()
        with caplog.at_level(logging.WARNING):
            assert read_back(reading, keys) == 0
        assert time.monotonic() - start < 2
        assert "has not answered in time" in caplog.text
        start = time.monotonic()
        assert read_back(reading, keys) == 0
        reading.close(timeout=0.5)
        assert time.monotonic() - start < 2
    finally:
        cluster.send("mooncake_client", signal.SIGCONT)
    stored_again(cluster, "slow", 1)


@pytest.mark.parametrize("killed", ["mooncake_client", "mooncake_master"])
def test_a_killed_and_restarted_server(own_cluster: Cluster, killed: str) -> None:
    """The stores stay open: they miss, say so, and use the server again when it is back."""
    cluster = own_cluster
    model = f"kill {killed}"
    writing, reading = open_store(cluster, model=model), open_store(cluster, 1, model, timeout=3.0)
    keys = keys_of(writing, 3)
    assert store_pages(writing, keys) == keys
    assert read_back(reading, keys) == 3
    cluster.send(killed, signal.SIGKILL)
    start = time.monotonic()
    assert read_back(reading, keys_of(writing, 3, 1)) == 0
    assert store_pages(writing, keys_of(writing, 3, 1)) == []
    assert time.monotonic() - start < 20
    assert writing.stats.failed == 3
    assert read_back(writing, keys) == 3  # from its own memory
    cluster.start_master() if killed == "mooncake_master" else cluster.start_owner()
    end = time.monotonic() + RECOVERY
    seed = 2
    while store_pages(writing, keys_of(writing, 3, seed)) != keys_of(writing, 3, seed) or not read_back(
        reading, keys_of(writing, 3, seed)
    ):
        assert time.monotonic() < end
        time.sleep(0.3)
        seed += 1
    for store in (writing, reading):
        store.close()


def test_a_store_without_a_server_recomputes_until_there_is_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = Cluster(tmp_path)
    try:
        start = time.monotonic()
        store = open_store(cluster, timeout=3.0)
        keys = keys_of(store, 2)
        with caplog.at_level(logging.WARNING):
            assert store.match(keys) == 0
            assert read_back(store, keys) == 0
        assert "miss" in caplog.text
        assert time.monotonic() - start < 15
        cluster.start()
        end = time.monotonic() + RECOVERY
        while not store_pages(store, keys_of(store, 2, int(time.monotonic() * 1000))):
            assert time.monotonic() < end
            time.sleep(0.3)
        store.close()
    finally:
        cluster.stop()


def test_urls_that_lack_something() -> None:
    for url in ("mooncake://", "mooncake://host:1", f"mooncake://{HOST}?metadata=http://x/metadata"):
        with pytest.raises(ValueError, match="expected mooncake://master:port"):
            CacheStore.open(url, small_cache())


def test_inspection_lists_the_cluster(own_cluster: Cluster) -> None:
    store = open_store(own_cluster, model="to be listed")
    assert store_pages(store, keys_of(store, 3)) == keys_of(store, 3)
    command = [sys.executable, "-m", "sparse_cp_ops", "cache", "inspect", own_cluster.url("1MiB"), "--verify"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    (line,) = [line for line in result.stdout.splitlines() if "to be listed" in line]
    assert " 3 " in line
