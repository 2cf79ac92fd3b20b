"""Command line of ``python -m sparse_cp_ops bench``."""

import argparse
import sys
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the bench command."""
    parser.add_argument("--op", action="append", help="only this op (may be given several times); default: all")
    parser.add_argument("--device", default=None, help="cpu, cuda or cuda:N; default: cuda where there is one")
    parser.add_argument("--match", default="", help="only shapes that contain this text, e.g. 'H=128' or 'decode'")
    parser.add_argument("--seconds", type=float, default=0.5, help="time spent on each measurement (default 0.5)")
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    parser.add_argument("--markdown", type=Path, help="write the table to this file")
    parser.add_argument("--roofline", type=Path, help="write a roofline picture (PNG) to this file")
    parser.add_argument("--no-peers", action="store_true", help="measure only our own ops")
    parser.add_argument(
        "--peer-seconds", type=float, default=300.0, help="most time for an answer of a peer, which may compile first"
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure the chosen cases and write the reports; returns the exit status."""
    try:
        import rich  # noqa: F401
    except ImportError:
        print("bench needs rich and matplotlib: pip install 'sparse_cp_ops[bench]'", file=sys.stderr)
        return 2
    import torch

    from sparse_cp_ops.bench import cases, ceilings, report
    from sparse_cp_ops.bench.peer_process import PeerProcess
    from sparse_cp_ops.bench.peers import Peers
    from sparse_cp_ops.bench.timing import measure

    device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    chosen = [
        case
        for case in cases.all_cases(device.type)
        if (not arguments.op or case.op in arguments.op) and arguments.match in case.shape
    ]
    if not chosen:
        known = ", ".join(dict.fromkeys(case.op for case in cases.all_cases(device.type)))
        print(f"no case matches; ops with cases on {device.type}: {known}", file=sys.stderr)
        return 2
    limits = ceilings.measure_ceilings(device)
    peers = None if arguments.no_peers else PeerProcess(device, arguments.seconds, arguments.peer_seconds)
    rows: list[report.Row] = []
    for case in chosen:
        print(f"{case.op}  {case.shape}", file=sys.stderr, flush=True)
        work = case.build(device, Peers())
        timing = measure(work.run, device, arguments.seconds, case.graph)
        answers = peers.measure(case) if peers else {}
        rows.append(
            report.Row(
                case.op, case.shape, timing, work.bytes_moved, work.flop, case.ceiling,
                report.limit_us(work, case, limits),
                {name: answer for name, answer in answers.items() if isinstance(answer, float)},
                {name: answer for name, answer in answers.items() if isinstance(answer, str)},
            )
        )  # fmt: skip
        facts = report.conditions(device)
        if arguments.json:  # case by case, so that an interrupted run leaves what it measured
            report.write_json(arguments.json, rows, limits, facts)
        if arguments.markdown:
            arguments.markdown.write_text(report.markdown(rows, limits, facts))
    if peers:
        peers.close()
    report.print_table(rows, limits, facts)
    if arguments.roofline:
        report.write_roofline(arguments.roofline, rows, limits, facts)
    return 0
