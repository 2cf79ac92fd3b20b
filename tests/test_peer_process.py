"""What is measured beside our ops may hang, crash or fail: the run goes on and says why a figure is missing."""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from sparse_cp_ops.bench.cases import Case, Work
from sparse_cp_ops.bench.peer_process import PeerProcess
from sparse_cp_ops.bench.peers import Peers, Runners, versions

CPU = torch.device("cpu")


def hang() -> None:
    threading.Event().wait()


def crash() -> None:
    os._exit(3)


def refuse() -> None:
    raise RuntimeError("no such head count")


def work() -> None:
    torch.ones(10).sum()


def beside(**others: Runners) -> Callable[[torch.device, Peers], Work]:
    return lambda device, peers: Work(work, 1.0, others=dict(others))


def cannot_build(device: torch.device, peers: Peers) -> Work:
    raise ValueError("too large")


def cases(device_type: str) -> Iterator[Case]:
    yield Case("op", "good", beside(quick=[work], double=[work, work]))
    yield Case("op", "bad", beside(refusing=[refuse], quick=[work]))
    yield Case("op", "unbuilt", cannot_build)
    yield Case("op", "crash", beside(crashing=[work, crash], quick=[work]))
    yield Case("op", "hang", beside(quick=[work], hanging=[hang]))
    yield Case("op", "hang again", beside(hanging=[hang], quick=[work]))


def test_answers_and_reasons(capfd: pytest.CaptureFixture[str]) -> None:
    process = PeerProcess(CPU, 0.0, 10.0, cases)
    answers = {case.shape: process.measure(case) for case in cases("cpu")}
    process.close()
    assert answers["good"].keys() == {"quick", "double"}
    assert all(isinstance(answer, float) and answer > 0 for answer in answers["good"].values())
    assert answers["bad"]["refusing"] == "RuntimeError: no such head count"
    assert isinstance(answers["bad"]["quick"], float)
    assert answers["unbuilt"] == {"peers": "ValueError: too large"}
    assert answers["crash"] == {"crashing": "ended with status 3 at crash"}
    assert answers["hang"]["hanging"] == "no answer in 10 s at hang"
    assert isinstance(answers["hang"]["quick"], float)  # a new process has taken the place of the crashed one
    assert answers["hang again"]["hanging"] == "no answer in 10 s at hang"  # nobody waits for the same peer twice
    assert isinstance(answers["hang again"]["quick"], float)
    assert "in hang" in capfd.readouterr().err  # where it sat


def test_versions_of_the_packages_that_bring_peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, version in (("vllm", "0.20.0"), ("flashinfer-python", "0.6"), ("flash_attn", "2")):
        metadata = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    monkeypatch.setenv("SPARSE_CP_OPS_PEERS", str(tmp_path))
    monkeypatch.setattr(sys, "path", [])
    assert versions() == {"vllm": "0.20.0", "flashinfer_python": "0.6"}


def fail_to_start(device_type: str) -> Iterator[Case]:
    os._exit(5)
    yield from cases(device_type)


def test_a_process_that_ends_before_it_names_its_peers() -> None:
    process = PeerProcess(CPU, 0.0, 10.0, fail_to_start)
    for case in list(cases("cpu"))[:2]:
        assert process.measure(case) == {"peers": "ended with status 5 at good"}
    process.close()
