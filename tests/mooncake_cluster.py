"""A Mooncake cluster on this machine's loopback: a master with its HTTP metadata server, and one owner of memory."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import IO

HOST = "127.0.0.1"
DEADLINE = 30.0


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for found in sockets:
            found.bind((HOST, 0))
        return [found.getsockname()[1] for found in sockets]


def _state(pid: int) -> str:
    """Letter of a process's state: T = stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


class Cluster:
    """Both processes, on ports of their own; ``folder`` gets their logs."""

    def __init__(self, folder: Path, segment: str = "64 MB") -> None:
        self.folder = folder
        self.segment = segment
        self.rpc, self.metadata, self.metrics, self.owner_port = _free_ports(4)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def url(self, memory: str, **options: str) -> str:
        """Of a store in this cluster."""
        more = "".join(f"&{name}={value}" for name, value in options.items())
        return (
            f"mooncake://{HOST}:{self.rpc}?metadata=http://{HOST}:{self.metadata}/metadata"
            f"&metrics=http://{HOST}:{self.metrics}&memory={memory}{more}"
        )

    def start_master(self) -> None:
        """And wait until it answers. A killed one's clients come back to it by themselves."""
        arguments = {
            "rpc_address": HOST,
            "rpc_port": self.rpc,
            "enable_http_metadata_server": "true",
            "http_metadata_server_host": HOST,
            "http_metadata_server_port": self.metadata,
            "metrics_host": HOST,
            "metrics_port": self.metrics,
            # Milliseconds in which a read object can't be evicted; seconds until a silent owner is given up.
            "default_kv_lease_ttl": 2000,
            "client_ttl": 6,
        }
        self._start("mooncake_master", arguments)
        self._await(f"http://{HOST}:{self.metrics}/health")

    def start_owner(self) -> None:
        """And wait until the master knows its memory."""
        arguments = {
            "host": HOST,
            "port": self.owner_port,
            "global_segment_size": self.segment,
            "master_server_address": f"{HOST}:{self.rpc}",
            "metadata_server": f"http://{HOST}:{self.metadata}/metadata",
            "protocol": "tcp",
        }
        self._start("mooncake_client", arguments)
        self._await(f"http://{HOST}:{self.metrics}/get_all_segments", content=HOST.encode())

    def start(self) -> None:
        self.start_master()
        self.start_owner()

    def send(self, name: str, what: signal.Signals) -> None:
        """A signal to one of the processes; of killed ones nothing is left behind."""
        process = self.processes[name]
        process.send_signal(what)
        if what == signal.SIGKILL:
            process.wait(DEADLINE)
        end = time.monotonic() + DEADLINE
        while what == signal.SIGSTOP and _state(process.pid) != "T" and time.monotonic() < end:
            time.sleep(0.01)  # on a busy machine its threads run on for a moment

    def stop(self) -> None:
        for process in self.processes.values():
            process.kill()  # also ends a stopped one
            process.wait(DEADLINE)

    def _start(self, name: str, arguments: dict[str, object]) -> None:
        # The command of the package beside this Python.
        command = [str(Path(sys.executable).parent / name), *(f"-{key}={value}" for key, value in arguments.items())]
        log: IO[bytes]
        with open(self.folder / f"{name}.log", "ab") as log:
            self.processes[name] = subprocess.Popen(command, cwd=self.folder, stdout=log, stderr=log)

    def _await(self, address: str, content: bytes = b"") -> None:
        end = time.monotonic() + DEADLINE
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(address, timeout=2) as answer:
                if answer.status == 200 and content in answer.read():
                    return
            if time.monotonic() > end:
                raise TimeoutError(f"{address} did not answer; logs are in {self.folder}")
            time.sleep(0.05)


@contextlib.contextmanager
def running_cluster(folder: Path, segment: str = "64 MB") -> Iterator[Cluster]:
    """A cluster that has been started, and is stopped at the end."""
    cluster = Cluster(folder, segment)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
