"""Command line of ``python -m sparse_cp_ops bench``."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def _duration(text: str) -> float:
    seconds = float(text)
    if not 0.0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number of seconds above 0, got {text!r}")
    return seconds


def _file(text: str) -> Path:
    """Looked at before anything is measured."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"expected a file in a folder that exists, got {text!r}")
    return path


def _picture(text: str) -> Path:
    if Path(text).suffix != ".png":
        raise argparse.ArgumentTypeError(f"expected a name that ends in .png, got {text!r}")
    return _file(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the bench command."""
    parser.add_argument("--op", action="append", help="only this op (may be given several times); default: all")
    parser.add_argument("--device", default=None, help="cpu, cuda or cuda:N; default: cuda where there is one")
    parser.add_argument("--match", default="", help="only shapes that contain this text, e.g. 'H=128' or 'decode'")
    parser.add_argument("--seconds", type=_duration, default=0.5, help="time spent on each measurement (default 0.5)")
    parser.add_argument("--json", type=_file, help="write everything measured to this file")
    parser.add_argument("--markdown", type=_file, help="write the table to this file")
    parser.add_argument("--roofline", type=_picture, help="write a roofline picture (PNG) to this file")
    parser.add_argument("--no-peers", action="store_true", help="measure only our own ops")
    parser.add_argument(
        "--peer-seconds",
        type=_duration,
        default=300.0,
        help="most time for an answer of a peer, which may compile first",
    )


def find_device(name: str | None) -> torch.device:
    """The device that the ops are to run on.

    Raises:
        ValueError: it is none of the CPU and this machine's CUDA devices.
    """
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    known = ["cpu", *(["cuda"] if count else []), *(f"cuda:{index}" for index in range(count))]
    if name is not None and name not in known:
        raise ValueError(f"--device: expected {', '.join(known)}, got {name!r}")
    return torch.device(name or ("cuda" if count else "cpu"))


def run(arguments: argparse.Namespace) -> int:
    """Measure the chosen cases and write the reports; returns the exit status, 1 if a case could not be measured."""
    try:
        import rich  # noqa: F401
    except ImportError:
        print("bench needs rich and matplotlib: pip install 'sparse_cp_ops[bench]'", file=sys.stderr)
        return 2
    import torch

    from sparse_cp_ops.bench import cases, ceilings, report
    from sparse_cp_ops.bench.peer_process import PeerProcess
    from sparse_cp_ops.bench.peers import Peers, versions
    from sparse_cp_ops.bench.timing import measure

    try:
        device = find_device(arguments.device)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    every = list(cases.all_cases(device.type))
    known = list(dict.fromkeys(case.op for case in every))
    if unknown := [op for op in arguments.op or () if op not in known]:
        print(
            f"--op: no cases on {device.type} for {', '.join(unknown)}; there are {', '.join(known)}", file=sys.stderr
        )
        return 2
    chosen = [case for case in every if case.op in (arguments.op or known) and arguments.match in case.shape]
    if not chosen:
        shapes = ", ".join(case.shape for case in every if case.op in (arguments.op or known))
        print(f"--match: no shape contains {arguments.match!r}; there are {shapes}", file=sys.stderr)
        return 2
    beside = {} if arguments.no_peers or device.type == "cpu" else versions()
    limits = ceilings.measure_ceilings(device)
    peers = None if arguments.no_peers else PeerProcess(device, arguments.seconds, arguments.peer_seconds)
    rows: list[report.Row] = []
    failed: dict[str, str] = {}

    def measured(case: cases.Case) -> report.Row:
        work = case.build(device, Peers())
        timing = measure(work.run, device, arguments.seconds, case.graph)
        answers = peers.measure(case) if peers else {}
        return report.Row(
            case.op, case.shape, timing, work.bytes_moved, work.flop, case.ceiling,
            report.limit_us(work, case, limits),
            {name: answer for name, answer in answers.items() if isinstance(answer, float)},
            {name: answer for name, answer in answers.items() if isinstance(answer, str)},
        )  # fmt: skip

    for case in chosen:
        print(f"{case.op}  {case.shape}", file=sys.stderr, flush=True)
        try:
            rows.append(measured(case))
        except RuntimeError as error:  # not enough memory, above all: the other cases may have it
            failed[f"{case.op} {case.shape}"] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        if device.type == "cuda":
            torch.cuda.empty_cache()  # for what runs beside us and for the next case
        facts = report.conditions(device) | beside
        if failed:
            facts["not measured"] = "; ".join(f"{name} ({reason})" for name, reason in failed.items())
        if arguments.json:  # case by case, so that an interrupted run leaves what it measured
            report.write_json(arguments.json, rows, limits, facts)
        if arguments.markdown:
            arguments.markdown.write_text(report.markdown(rows, limits, facts))
    if peers:
        peers.close()
    report.print_table(rows, limits, facts)
    if arguments.roofline:
        report.write_roofline(arguments.roofline, rows, limits, facts)
    return int(bool(failed))
