"""An exception in place of any call that the store makes: all of its memory comes back, and it works as before."""

import gc
import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from store_harness import (
    FakeBackend,
    assert_all_room_can_be_had,
    fill,
    keys_of,
    memory_for,
    read_back,
    small_cache,
    store_pages,
    write_pages,
)

from sparse_cp_ops import cache_store
from sparse_cp_ops.cache_store import CacheStore
from sparse_cp_ops.cache_store import store as store_module

OWN_FILES = {
    str(Path(cache_store.__file__).with_name(f"{name}.py")) for name in ("store", "reader", "writer", "backend_link")
}
PUBLISHER = str(Path(cache_store.__file__).with_name("publisher.py"))
# What gives room back or takes it over: its own failure is nobody's to mend, but the calls inside of ``ask`` do fail.
GIVING_BACK = {"release", "release_after", "hand_on", "adopt", "ask", "give_back", "abandoned", "__exit__"}
GIVING_BACK |= {"detach", "cancel", "add_done_callback"}
# In the publisher also the start of a job, and what ends one.
ENDING = GIVING_BACK | {
    "__enter__",
    "_seal",
    "_send",
    "_finish",
    "submit",
    "difference_update",
    "warning",
    "len",
    "notify_all",
}


class InjectedError(BaseException):
    """Stands for whatever a call may raise, also what nobody handles, such as KeyboardInterrupt."""


class Injection:
    """Raises instead of the n-th call that is made by code of some files; as a profile function of a thread."""

    def __init__(self, call: int, files: set[str], spared: set[str]) -> None:
        self.left, self.files, self.spared = call, files, spared
        self.raised_at: str | None = None

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            caller, name = frame.f_back, frame.f_code.co_name
        elif event == "c_call":
            caller, name = frame, argument.__name__
        else:
            return
        if self.raised_at or caller is None or caller.f_code.co_filename not in self.files:
            return
        if name in self.spared or caller.f_code.co_name == "give_back":
            return
        if self.left:
            self.left -= 1
            return
        self.raised_at = f"{caller.f_code.co_name}:{caller.f_lineno} {name}"
        raise InjectedError(self.raised_at)


def at_each_call(action: Callable[[], object]) -> Iterator[str]:
    """Run an action with each of its calls failing in turn; where that was."""
    for call in itertools.count():
        injection = Injection(call, OWN_FILES, GIVING_BACK)
        try:
            sys.setprofile(injection)
            action()
        except InjectedError:
            pass
        finally:
            sys.setprofile(None)
        gc.collect(0)  # a writer gives its room back when it goes
        if injection.raised_at is None:
            return
        yield injection.raised_at


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> CacheStore:
    """Eight slots in front of a backend, and batches of two pages."""
    monkeypatch.setattr(store_module, "BATCH", 2)
    monkeypatch.setattr(cache_store.backend_link, "RETRY_SECONDS", 0.0)
    cache = small_cache()
    return CacheStore(cache, memory_for(cache, 8), "", FakeBackend())


def content(store: CacheStore) -> dict[bytes, bytes]:
    found: dict[bytes, bytes] = store._link._backend.content
    return found


@pytest.mark.parametrize("where", ["memory", "backend", "both", "damaged in memory", "damaged in the backend"])
def test_reading(store: CacheStore, where: str) -> None:
    keys = keys_of(store, 5)
    store_pages(store, keys)
    good = dict(content(store))

    def read() -> None:
        assert store.read(keys, range(5)) == (3 if "damaged" in where else 5)

    def prepare() -> None:
        store.memory.clear()
        content(store).update(good)
        if where != "backend" and where != "damaged in the backend":
            assert store.read(keys[:4] if where == "both" else keys, range(5)) >= 4
        if where == "damaged in memory":
            (slot,) = store.memory.find(keys[3:4]).values()
            store.memory.slots[slot, -1] ^= 1
            store.memory.release([slot])
        elif where == "damaged in the backend":
            content(store)[keys[3]] = bytes(len(good[keys[3]]))

    prepare()
    places = []
    for place in at_each_call(read):
        places.append(place)
        assert_all_room_can_be_had(store)
        prepare()
    assert any(place.startswith("load:") for place in places)
    assert any("_take_good" in place for place in places)
    assert_all_room_can_be_had(store)
    content(store).update(good)
    assert read_back(store, keys) == 5


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("complete", [True, False])
def test_writing(store: CacheStore, shared: bool, complete: bool) -> None:
    if not shared:
        store = CacheStore(store.cache, memory_for(store.cache, 8))
    keys = keys_of(store, 5)
    fill(store.cache, keys, range(5))

    def write() -> None:
        writer = store.writer(keys, range(5))
        assert writer is not None
        with writer:
            for layer in range(3 if complete else 2):
                writer.write_layer(layer)

    places = []
    for place in at_each_call(write):
        places.append(place)
        assert_all_room_can_be_had(store)
        store.memory.clear()
    for name in ("__init__", "write_layer", "finish", "publish" if complete else "finish"):
        assert any(place.startswith(name) for place in places), name
    assert_all_room_can_be_had(store)
    store.memory.clear()
    content(store).clear() if shared else None
    assert store_pages(store, keys) == keys  # nobody is still thought to be writing them
    assert read_back(store, keys) == 5


def test_publishing(store: CacheStore) -> None:
    """On the threads that seal and send."""
    for call in itertools.count():
        injection = Injection(call, {PUBLISHER}, ENDING)
        threading.setprofile(injection)
        try:
            store = CacheStore(store.cache, memory_for(store.cache, 8), "", FakeBackend())
        finally:
            threading.setprofile(None)
        keys = keys_of(store, 5)
        write_pages(store, keys)
        assert_all_room_can_be_had(store)
        assert store.stats.stored + store.stats.failed == 5
        if injection.raised_at is None:
            break
        store.memory.clear()
        assert store_pages(store, keys) == keys
    assert call > 20
