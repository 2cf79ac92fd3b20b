"""Random operations on a store by several processes that are killed at any moment, with damage and dying servers.

    PYTHONPATH=. python tests/store_stress.py file:///folder --minutes 30 [--damage]
    PYTHONPATH=. python tests/store_stress.py mooncake --minutes 30

Every page that comes back is compared with what its key stands for. A wrong byte, a process that makes no progress, or
(without --damage) an acknowledged page that is gone makes the exit status 1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
from mooncake_cluster import Cluster, running_cluster
from store_harness import fill, holds, keys_of, memory_for, small_cache, untouched, wipe

from sparse_cp_ops.cache_store import CacheStore, backend_link

WORKERS = 3
DOCUMENTS, LENGTH = 60, 8  # prompts, and pages of each
LAYERS = (True, False)
MEMORY = 12  # slots: fewer than two documents need
# No operation may take longer: a few timeouts of two seconds, on a busy machine.
STUCK_SECONDS = 60.0
MODEL = "stress"
DAMAGE = ("truncated", "flipped", "deleted", "garbage")


def open_store(url: str, timeout: float = 2.0) -> CacheStore:
    cache = small_cache(LENGTH, layers=LAYERS)
    separator = "&" if "?" in url else "?"
    return CacheStore.open(
        f"{url}{separator}memory={memory_for(cache, MEMORY)}", cache, MODEL, timeout=timeout, patience=0.2
    )


class Worker:
    """One process: random operations until it is killed or told to stop."""

    def __init__(self, url: str, seed: int, folder: Path, name: str) -> None:
        self.url, self.folder = url, folder
        self.random = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.heartbeat = folder / f"heartbeat.{name}"
        self.acknowledged = os.open(folder / f"acknowledged.{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def run(self) -> None:
        self.store = open_store(self.url)
        while not (self.folder / "stop").exists():
            self.heartbeat.write_text(json.dumps(self.counts))
            keys = keys_of(self.store, LENGTH, self.random.randrange(DOCUMENTS))
            chosen = self.random.choices((self.put, self.read, self.match, self.reopen), (40, 50, 8, 2))[0]
            chosen(keys[: self.random.randint(1, LENGTH)])
        # Every slot of the memory can be had: none is lost, and none is in use for ever.
        self.store.writer([], [])
        assert len(self.store.memory.take(MEMORY, STUCK_SECONDS / 2)) == MEMORY, "slots of the memory are lost"
        self.store.close()
        self.heartbeat.write_text(json.dumps(self.counts))

    def put(self, keys: list[bytes]) -> None:
        fill(self.store.cache, keys, range(len(keys)))
        writer = self.store.writer(keys, range(len(keys)))
        if writer is None:
            return
        last = self.random.choice((0, 1, 2, 2, 2, 2))  # of two layers: some writers give up in between
        with contextlib.suppress(KeyError), writer:
            for layer in range(last):
                writer.write_layer(layer)
            if self.random.random() < 0.1:
                raise KeyError
        if self.random.random() < 0.7:
            self.store.flush(5)
        acknowledged = list(writer.acknowledged)
        self.counts["acknowledged"] += len(acknowledged)
        os.write(self.acknowledged, b"".join(key.hex().encode() + b"\n" for key in acknowledged))

    def read(self, keys: list[bytes]) -> None:
        wipe(self.store.cache)
        restored = self.store.read(keys, range(len(keys)))
        self.counts["restored"] += restored
        self.counts["missed"] += len(keys) - restored
        for page, key in enumerate(keys):
            if not (holds(self.store.cache, key, page) if page < restored else untouched(self.store.cache, page)):
                raise AssertionError(f"page {page} of {restored} restored ones is not that of {key.hex()}")

    def match(self, keys: list[bytes]) -> None:
        assert 0 <= self.store.match(keys) <= len(keys)

    def reopen(self, _: list[bytes]) -> None:
        self.store.close(timeout=2)
        self.store = open_store(self.url)


def work(url: str, seed: int, folder: Path, name: str) -> None:
    torch.set_num_threads(1)
    backend_link.RETRY_SECONDS = 0.5
    logging.basicConfig(filename=folder / "log", level=logging.WARNING)
    Worker(url, seed, folder, name).run()


class Stress:
    """Starts the workers, kills them, damages what they share, and judges."""

    def __init__(self, url: str, folder: Path, seed: int, disturb: Callable[[random.Random], str]) -> None:
        self.url, self.folder, self.disturb = url, folder, disturb
        self.random = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.workers: list[BaseProcess] = []
        self.started = 0
        self.context = multiprocessing.get_context("fork")  # a start takes milliseconds

    def start_worker(self) -> None:
        self.started += 1
        arguments = (self.url, self.random.getrandbits(32), self.folder, f"{self.started}")
        worker = self.context.Process(target=work, args=arguments, name=f"{self.started}")  # a pid may come again
        worker.start()
        self.workers.append(worker)

    def run(self, seconds: float, least: Mapping[str, int] | None = None) -> None:
        """So long, and until so much of everything has been done; raises AssertionError at the first fault."""
        for _ in range(WORKERS):
            self.start_worker()
        end = time.monotonic() + seconds
        try:
            while time.monotonic() < end or self.lacks(least or {}):
                time.sleep(self.random.uniform(0.05, 1.0))
                self.check_progress()
                if self.random.random() < 0.5:
                    victim = self.workers.pop(self.random.randrange(len(self.workers)))
                    victim.kill()
                    victim.join()
                    self.counts["kills"] += 1
                    self.start_worker()
                else:
                    self.counts[self.disturb(self.random)] += 1
            (self.folder / "stop").touch()
            for worker in self.workers:
                worker.join(STUCK_SECONDS)
                assert worker.exitcode == 0, f"a worker did not end well: {worker.exitcode}"
        finally:
            for worker in self.workers:
                worker.kill()

    def check_progress(self) -> None:
        for worker in self.workers:
            assert worker.exitcode is None, f"a worker ended with {worker.exitcode}: see its traceback"
            heartbeat = self.folder / f"heartbeat.{worker.name}"
            if heartbeat.exists():
                age = time.time() - heartbeat.stat().st_mtime
                assert age < STUCK_SECONDS, f"a worker has made no progress for {age:.0f} s"

    def lacks(self, least: Mapping[str, int]) -> bool:
        totals = self.totals()
        return any(totals.get(name, 0) < count for name, count in least.items())

    def totals(self) -> dict[str, int]:
        counts = Counter(self.counts)
        for heartbeat in self.folder.glob("heartbeat.*"):
            with contextlib.suppress(ValueError):  # killed while it wrote
                counts.update(json.loads(heartbeat.read_text()))
        counts["damaged"] = sum(counts[kind] for kind in DAMAGE)
        return dict(counts)

    def acknowledged(self) -> set[bytes]:
        lines = [line for path in self.folder.glob("acknowledged.*") for line in path.read_text().split("\n")[:-1]]
        return {bytes.fromhex(line) for line in lines}


def damage_files(root: Path, generator: random.Random) -> str:
    """One file loses its end, a bit or everything, or becomes garbage."""
    files = sorted(root.glob("??/*.page"))
    if not files:
        return "nothing to damage"
    path = generator.choice(files)
    kind = generator.choice(DAMAGE)
    with contextlib.suppress(FileNotFoundError):
        if kind == "deleted":
            path.unlink()
        elif kind == "truncated":
            os.truncate(path, generator.randrange(path.stat().st_size))
        else:
            with open(path, "r+b") as file:
                position = generator.randrange(path.stat().st_size)
                file.seek(position)
                old = file.read(1)
                file.seek(position)
                file.write(bytes([old[0] ^ 1 << generator.randrange(8)]) if kind == "flipped" and old else b"garbage")
    return kind


def disturb_servers(cluster: Cluster, generator: random.Random) -> str:
    """A server is killed and restarted, or stopped for a while; mostly nothing happens, so that some work gets done."""
    name = generator.choice(("mooncake_master", "mooncake_client"))
    kind = generator.choices(("quiet", "stopped", "killed"), (6, 2, 1))[0]
    if kind == "stopped":
        cluster.send(name, signal.SIGSTOP)
        time.sleep(generator.uniform(0.1, 3.0))
        cluster.send(name, signal.SIGCONT)
    elif kind == "killed":
        cluster.send(name, signal.SIGKILL)
        time.sleep(generator.uniform(0.0, 2.0))
        cluster.start_master() if name == "mooncake_master" else cluster.start_owner()
    return f"{name} {kind}"


def verify_acknowledged(url: str, keys: set[bytes]) -> None:
    """Every page that any process was told is safe is there, and right."""
    store = open_store(url, timeout=60.0)
    for key in keys:
        wipe(store.cache)
        assert store.read([key], [0]) == 1, f"the acknowledged page {key.hex()} is gone"
        assert holds(store.cache, key, 0)
    store.close()


def main(arguments: list[str] | None = None) -> int:
    """Run it; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="file:///folder, or mooncake for servers of its own")
    parser.add_argument("--minutes", type=float, default=30.0, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument("--damage", action="store_true", help="also damage files, under a byte budget")
    parser.add_argument("--least", nargs="*", default=[], metavar="NAME=COUNT", help="go on until a count is reached")
    options = parser.parse_args(arguments)
    least = {name: int(count) for name, _, count in (text.partition("=") for text in options.least)}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url, disturb = options.url, lambda _: "quiet"
        if url == "mooncake":
            cluster = stack.enter_context(running_cluster(folder))
            url, disturb = cluster.url("0").replace("&memory=0", ""), lambda g: disturb_servers(cluster, g)
        elif options.damage:
            root = Path(url.removeprefix("file://"))
            budget = 200 * memory_for(small_cache(layers=LAYERS), 1)
            url, disturb = f"{url}?disk={budget}", lambda g: damage_files(root, g)
        stress = Stress(url, folder, options.seed, disturb)
        try:
            stress.run(options.minutes * 60, least)
            if options.url != "mooncake" and not options.damage:
                verify_acknowledged(url, stress.acknowledged())
        except AssertionError as error:
            print(f"FAULT: {error}\n{stress.totals()}")
            return 1
        print(f"{stress.totals()}, {len(stress.acknowledged())} different pages acknowledged")
    return 0


if __name__ == "__main__":
    sys.exit(main())
