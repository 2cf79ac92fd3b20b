"""Command line of ``python -m sparse_cp_ops bench-layer``."""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PARTS = ("timeline", "host", "compiled", "balance", "break_even", "memory", "decode", "end_to_end")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the bench-layer command."""
    parser.add_argument("--part", action="append", choices=PARTS, help="only this part (may be given several times)")
    parser.add_argument("--device", default=None, help="cpu, cuda or cuda:N; default: cuda where there is one")
    parser.add_argument("--seconds", type=float, default=0.5, help="time spent on each measurement (default 0.5)")
    parser.add_argument("--tiny", action="store_true", help="small dimensions and lengths: a rehearsal, for any device")
    parser.add_argument("--json", type=Path, required=True, help="results; parts that are in the file already are kept")
    parser.add_argument("--note", default="", help="a sentence about the conditions, shown with the parts measured now")
    parser.add_argument("--markdown", type=Path, help="write the tables of the whole JSON file here")
    parser.add_argument("--pictures", type=Path, help="folder for the pictures (PNG) of the whole JSON file")
    parser.add_argument("--report-only", action="store_true", help="measure nothing: only write what --json holds")


def run(arguments: argparse.Namespace) -> int:
    """Measure the chosen parts, merge them into the JSON file and write the reports; returns the exit status."""
    results: dict[str, Any] = json.loads(arguments.json.read_text()) if arguments.json.is_file() else {}
    status = 0
    if not arguments.report_only:
        for name in arguments.part or PARTS:
            try:
                results[name] = _measure(name, arguments)
            except Exception as error:  # the other parts are worth having
                print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
                status = 1
                if len(arguments.part or PARTS) == 1:
                    raise
            arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    if arguments.markdown:
        from sparse_cp_ops.bench.layer import report

        arguments.markdown.write_text(report.markdown(results))
    if arguments.pictures:
        from sparse_cp_ops.bench.layer import pictures

        pictures.write(results, arguments.pictures)
    return status


def _measure(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    import importlib

    import torch

    from sparse_cp_ops.bench.layer.model import TINY, V32, Bench
    from sparse_cp_ops.bench.report import conditions

    device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    config, scale = (TINY, 128) if arguments.tiny else (V32, 1)
    part: Callable[[Bench], dict[str, Any]] = importlib.import_module(f"sparse_cp_ops.bench.layer.{name}").run
    start = time.perf_counter()
    result = part(Bench(device, config, scale, arguments.seconds))
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    seconds = time.perf_counter() - start
    print(f"{name}: {seconds:.1f} s", file=sys.stderr, flush=True)
    return {
        "conditions": conditions(device),
        "tiny": arguments.tiny,
        "note": arguments.note,
        "seconds": round(seconds, 1),
        **result,
    }
