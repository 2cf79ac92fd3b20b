"""Host memory of a store: slots of one entry each, which of them are visible, and who uses them."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import Any, Self

from sparse_cp_ops.cache_store.entry import EntryLayout, allocate_entries


class HostMemory:
    """A fixed number of slots. Each has a count of its users, and may be shown under a key.

    A slot that nobody uses and that is not shown is free. One that is shown and that nobody uses makes room when room
    is needed, the least recently used first. All methods may be called from any thread.

    Attributes:
        slots: uint8 [count, entry_bytes], pinned beside CUDA caches.
        mla, indexer: the pages of each layer in all slots, see :meth:`EntryLayout.views`.
        lock: guards everything, also what the store keeps beside it; notified when room appears.
    """

    def __init__(self, count: int, layout: EntryLayout, pinned: bool) -> None:
        self.slots = allocate_entries(count, layout.entry_bytes, pinned)
        self.mla, self.indexer = layout.views(self.slots)
        self.lock = threading.Condition(threading.RLock())
        self._bytes = self.slots.numpy()
        self._free = list(range(count))
        self._users = [0] * count
        self._slot_of: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._key_of: dict[int, bytes] = {}
        self._copies: deque[tuple[Any, Sequence[int]]] = deque()  # CUDA event, slots that are in use until then

    def __len__(self) -> int:
        return len(self._users)

    def __contains__(self, key: bytes) -> bool:
        return key in self._slot_of

    def bytes_of(self, slot: int) -> memoryview:
        """The bytes of a slot."""
        view: memoryview = self._bytes[slot].data
        return view

    def take(self, count: int, patience: float = 0.0, for_copies_only: bool = False) -> list[int]:
        """Up to ``count`` slots that nobody else uses; the caller uses them until :meth:`release`.

        Args:
            count: slots.
            patience: seconds to wait if there are fewer.
            for_copies_only: wait for copies that have been started, and for nothing else.
        """
        deadline = time.monotonic() + patience
        with self.lock:
            while True:
                self._end_copies()
                if len(self._free) < count:
                    idle = [slot for slot in self._slot_of.values() if not self._users[slot]]
                    for slot in idle[: count - len(self._free)]:
                        self._hide(slot)
                remaining = deadline - time.monotonic()
                if len(self._free) >= count or remaining <= 0 or (for_copies_only and not self._copies):
                    taken, self._free = self._free[:count], self._free[count:]
                    for slot in taken:
                        self._users[slot] = 1
                    return taken
                # Copies tell nobody when they end; everything else notifies.
                self.lock.wait(min(remaining, 0.001) if self._copies else remaining)

    def show(self, key: bytes, slot: int) -> None:
        """Make a slot visible that the caller uses. Where another one has the key already, that one stays."""
        with self.lock:
            if key not in self._slot_of:
                self._slot_of[key] = slot
                self._key_of[slot] = key

    def find(self, keys: Iterable[bytes]) -> dict[bytes, int]:
        """Visible slots of some keys; the caller uses them until :meth:`release`."""
        with self.lock:
            found = {key: self._slot_of[key] for key in keys if key in self._slot_of}
            for slot in found.values():
                self._users[slot] += 1
            return found

    def touch(self, keys: Sequence[bytes]) -> None:
        """Used now. Of a chain of pages the end leaves first, because a chain without its head is useless."""
        with self.lock:
            for key in reversed(keys):
                if key in self._slot_of:
                    self._slot_of.move_to_end(key)

    def drop(self, slot: int) -> None:
        """Show a slot no longer."""
        with self.lock:
            if slot in self._key_of:
                self._hide(slot)

    def release(self, slots: Iterable[int]) -> None:
        """One user less of each."""
        with self.lock:
            for slot in slots:
                self._users[slot] -= 1
                if not self._users[slot] and slot not in self._key_of:
                    self._free.append(slot)
            self.lock.notify_all()

    def release_after(self, event: Any, slots: Sequence[int]) -> None:
        """One user less of each once a CUDA event has passed; at once without one."""
        if event is None:
            self.release(slots)
            return
        with self.lock:
            self._copies.append((event, slots))

    def clear(self) -> None:
        """Show nothing."""
        with self.lock:
            for slot in list(self._key_of):
                self._hide(slot)

    def _hide(self, slot: int) -> None:
        del self._slot_of[self._key_of.pop(slot)]
        if not self._users[slot]:
            self._free.append(slot)

    def _end_copies(self) -> None:
        while self._copies and self._copies[0][0].query():
            self.release(self._copies.popleft()[1])


class Lease:
    """Slots that one call uses: those that it has not released or handed on at its end are released then.

    As a context manager, so that an exception anywhere in the call loses no room.
    """

    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory
        self._slots: set[int] = set()

    def find(self, keys: Iterable[bytes]) -> dict[bytes, int]:
        """:meth:`HostMemory.find`, of keys for which this call uses no slot yet."""
        found = self._memory.find(keys)
        self._slots.update(found.values())
        return found

    def take(self, count: int, patience: float = 0.0, for_copies_only: bool = False) -> list[int]:
        """:meth:`HostMemory.take`, without waiting for slots that can't come: those that this call uses itself."""
        possible = len(self._memory) - len(self._slots)
        return self.adopt(self._memory.take(min(count, possible), patience, for_copies_only))

    def adopt(self, slots: list[int]) -> list[int]:
        """Slots that somebody else has used so far."""
        self._slots.update(slots)
        return slots

    def hand_on(self, slots: Sequence[int]) -> None:
        """Somebody else releases them."""
        self._slots.difference_update(slots)

    def release(self, slots: Iterable[int]) -> None:
        """They are not needed any more."""
        given = list(slots)
        self.hand_on(given)
        self._memory.release(given)

    def release_after(self, event: Any, slots: Sequence[int]) -> None:
        """They are needed until a CUDA event has passed."""
        self.hand_on(slots)
        self._memory.release_after(event, slots)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release(self._slots)
