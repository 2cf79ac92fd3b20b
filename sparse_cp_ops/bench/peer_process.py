"""What is measured beside our ops runs in a process of its own, case by case.

Peers compile kernels at their first call (FlashInfer's top-k: 80 s on one core), and what hangs, crashes or poisons the
device there must cost its own figure, not the run: each answer has a time limit.
"""

import faulthandler
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from typing import Any

import torch

from sparse_cp_ops.bench.cases import Case, all_cases
from sparse_cp_ops.bench.peers import Peers, find_peers
from sparse_cp_ops.bench.timing import measure

Cases = Callable[[str], Iterable[Case]]  # of a device type

START_SECONDS = 300.0  # a fresh interpreter that imports torch, on a slow or busy machine
STACK_SECONDS = 5.0  # until a process that gave no answer has written where it sits


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:120]}"


def _serve(connection: Connection, device: torch.device, seconds: float, cases: Cases) -> None:
    """Runs in the other process: takes (op, shape, names not to run); gives names, then an answer for each run."""
    os.setsid()  # one group with the compilers that it starts
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    connection.send("started")
    found = find_peers() if device.type == "cuda" else Peers()
    connection.send("peers loaded")
    while True:
        try:
            op, shape, silent = connection.recv()
        except EOFError:
            return
        case = next(case for case in cases(device.type) if (case.op, case.shape) == (op, shape))
        try:
            others = case.build(device, found).others
        except Exception as error:
            connection.send(_reason(error))
            continue
        connection.send(list(others))
        for runners in (runners for name, runners in others.items() if name not in silent):
            try:
                answer: float | str = sum(measure(run, device, seconds, case.graph).median_us for run in runners)
            except Exception as error:  # whatever it is, it is this peer's
                answer = _reason(error)
            connection.send(answer)


class PeerProcess:
    """Asks the other process; starts a new one when the last one gave no answer within ``limit`` seconds or ended."""

    def __init__(self, device: torch.device, seconds: float, limit: float, cases: Cases = all_cases) -> None:
        self.silent: dict[str, str] = {}  # peers that gave no answer, and why: not asked again
        self._arguments = (device, seconds, cases)
        self._limit = limit
        self._process: multiprocessing.process.BaseProcess | None = None
        self._connection: Connection

    def measure(self, case: Case) -> dict[str, float | str]:
        """By name the time in microseconds of what does the same as ``case``, or why there is none."""
        answers: dict[str, float | str] = {}
        name = "peers"
        try:
            if self._process is None:
                if "peers" in self.silent:  # not even loading them came to an end
                    return {"peers": self.silent["peers"]}
                self._start()
            self._connection.send((case.op, case.shape, list(self.silent)))
            names = self._answer()
            if isinstance(names, str):
                return {"peers": names}
            for name in names:
                answers[name] = self.silent.get(name) or self._answer()
        except (TimeoutError, EOFError, OSError) as error:
            self._stop()
            answers[name] = self.silent[name] = f"{error} at {case.shape}"
        return answers

    def close(self) -> None:
        """End the other process."""
        if self._process is not None:
            self._stop()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        device, seconds, cases = self._arguments
        self._process = context.Process(target=_serve, args=(theirs, device, seconds, cases), daemon=True)
        self._process.start()
        theirs.close()
        self._answer(START_SECONDS)
        self._answer()

    def _answer(self, limit: float | None = None) -> Any:
        assert self._process is not None
        assert self._process.pid is not None
        limit = limit or self._limit
        if not self._connection.poll(limit):
            print(f"no answer from the peers in {limit:.0f} s; they are here:", file=sys.stderr, flush=True)
            os.kill(self._process.pid, signal.SIGUSR1)
            self._process.join(STACK_SECONDS)
            raise TimeoutError(f"no answer in {limit:.0f} s")
        try:
            return self._connection.recv()
        except EOFError:
            self._process.join()
            raise EOFError(f"ended with status {self._process.exitcode}") from None

    def _stop(self) -> None:
        assert self._process is not None
        assert self._process.pid is not None
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:  # it has ended, or has no group yet
            self._process.kill()
        self._process.join()
        self._process = None
        self._connection.close()
