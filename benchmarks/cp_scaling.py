"""Context parallelism on several GPUs: the bits of one, speed-up, what communication costs, and ranks that fail.

    python benchmarks/cp_scaling.py --ranks 2

Starts one process a rank. The checks are the cases of the distributed tests; the layer has the dimensions of
DeepSeek-V3.2 and random weights. ``--device cpu`` runs the same steps over gloo at tiny sizes, but for the cases that
need GPUs, which it names. Results are written to ``benchmarks/results/<device>x<ranks>`` .md, .json and .png as they
come.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks")]

from cp_scaling_rank import Settings, run_rank, timelines  # noqa: E402
from cp_scaling_report import OK, WRONG, Results, now  # noqa: E402
from process_groups import EXIT_STATUS, Ending, results_of, run_groups  # noqa: E402
from rank_process import Case  # noqa: E402

# In the order of measuring. The small ones, and new tokens behind a long prefix, show where sharing begins to pay.
BATCHES = {
    "cpu": "256 512 64+256",
    "cuda": "32768 131072 8192 65536 256 512 1024 2048 4096 128+65536 512+65536",
}
# In the third place where there are so many GPUs that a rank has no more rows than one GPU takes at once.
LONG_BATCH, RANKS_FOR_IT = (524288, 0), 4
# Processes of the checks at a time. GPUs: the seven groups of two ranks were seen to get along; with more ranks it is
# rare that all processes of a group have their GPUs at the same moment, and the others' kernels spin meanwhile.
# CPU: three a core, so that starting one does not take the timeout of those that wait for it.
CHECKS_AT_ONCE = {"cpu": 3 * (os.cpu_count() or 1), "cuda": 24}
# Of the budget; what is not finished by then is ended, so that something is left for the measurements.
CHECKS_SHARE = 0.6
# Processes that have told all they know are ended after this time.
GRACE_SECONDS = 20.0
MAX_TOKENS = 2**31 - 1  # positions are int32


@dataclass
class Checks:
    """The cases of the tests that are to run.

    Attributes:
        groups: cases that hold on all ranks; each group has processes of its own.
        failing: cases that end processes, one a group.
        left_out: names of those that other devices run.
    """

    groups: list[list[Case]]
    failing: list[Case]
    left_out: list[str]

    @classmethod
    def of(cls, device: str, parts: Sequence[str], only: Sequence[str] | None) -> Checks:
        """What the parts consist of on a device; ``only`` the named cases, if names are given.

        Raises:
            ValueError: there is no case of a given name.
        """
        # Not at the top: ranks import this module too, and those that measure do without torch._dynamo.
        from distributed_cases import CPU_GROUPS
        from failure_cases import FAILING_RANK, different_batches_on_gpus
        from gpu_cases import GPU_GROUPS

        on_gpus = (GPU_GROUPS, [*FAILING_RANK, different_batches_on_gpus])
        groups, failing = on_gpus if device == "cuda" else (CPU_GROUPS, FAILING_RANK)
        known = _names(groups, failing)
        left_out = [name for name in _names(*on_gpus) if name not in known]
        if only is not None:
            if unknown := [name for name in only if name not in known]:
                raise ValueError(f"expected some of {', '.join(known)}, got {', '.join(unknown)}")
            groups = [[case for case in group if case.__name__ in only] for group in groups]
            failing = [case for case in failing if case.__name__ in only]
        return cls(
            [group for group in groups if group] if "correctness" in parts else [],
            failing if "failure" in parts else [],
            left_out,
        )


def _names(groups: Sequence[Sequence[Case]], failing: Sequence[Case]) -> list[str]:
    return list(dict.fromkeys(case.__name__ for group in [*groups, failing] for case in group))


def check_cases(
    checks: Checks, ranks: int, device: str, folder: Path, results: Results, parts: Sequence[str], deadline: float
) -> None:
    """Run them and file how they ended."""
    from failure_cases import complaint

    groups, failing = checks.groups, checks.failing
    all_cases = [*groups, *([case] for case in failing)]
    at_once = max(1, CHECKS_AT_ONCE[device] // ranks)
    ended = run_groups(ranks, all_cases, folder, device, max(0.0, deadline - time.time()), at_once)
    for endings, cases in zip(ended[: len(groups)], groups, strict=True):
        for case, reports in results_of(endings, cases).items():
            different = dict.fromkeys(report for report in reports if report)
            for report in different:
                print(f"{case}:\n{report}", flush=True)
            outcome = "; ".join(map(_last_line, different)) or OK
            if case != EXIT_STATUS or results.correctness.get(EXIT_STATUS, OK) == OK:
                results.correctness[case] = outcome
    for endings, case in zip(ended[len(groups) :], failing, strict=True):
        how = [f"rank {rank}: {_how_it_ended(ending, case)}" for rank, ending in enumerate(endings)]
        wrong = complaint(endings, case, device).replace("|", "/")
        results.failures[case.__name__] = (f"{WRONG}{wrong}. " if wrong else "") + "; ".join(how)
    results.checked |= dict.fromkeys({"correctness", "failure"} & set(parts), now())
    results.left_out = checks.left_out
    for name, outcome in (results.correctness | results.failures).items():
        print(f"{name}: {outcome}", flush=True)
    results.write()


def _how_it_ended(ending: Ending, case: Case) -> str:
    report = ending.report(case)
    saw = "an exception" if report == "" else _last_line(report)
    return f"{saw} after {ending.seconds:.1f} s"


def _last_line(report: str) -> str:
    return report.strip().splitlines()[-1].replace("|", "/")[:200]


def measure(settings: Settings, results: Results) -> bool:
    """Run the ranks and file what rank 0 sends; a rank that ends with an error ends all of them.

    Returns:
        Whether all ended well.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    processes = [
        context.Process(target=run_rank, args=(rank, settings, sender if rank == 0 else None))
        for rank in range(settings.ranks)
    ]
    for process in processes:
        process.start()
    sender.close()
    open_pipe, give_up = True, settings.deadline + GRACE_SECONDS
    # Looked at once a turn: waiting for nothing takes all the time there is.
    while waited_for := [*([receiver] if open_pipe else []), *(p.sentinel for p in processes if p.is_alive())]:
        ready = connection.wait(waited_for, max(0.0, give_up - time.time()))
        if not ready:
            results.notes.append("Not all processes ended in time.")
            break
        if receiver in ready:
            try:
                file_message(*receiver.recv(), settings, results)
            except EOFError:
                open_pipe = False
                give_up = min(give_up, time.time() + GRACE_SECONDS)
        elif any(process.exitcode for process in processes):
            give_up = min(give_up, time.time() + GRACE_SECONDS)
    for process in processes:
        process.kill()
        process.join()
    statuses = [process.exitcode for process in processes]
    if any(statuses):
        results.notes.append(f"Exit statuses of the ranks that measured: {statuses}.")
    results.note_missing(settings.batches)
    results.write()
    return not any(statuses)


def file_message(kind: str, content: dict[str, Any], settings: Settings, results: Results) -> None:
    """One message of rank 0."""
    if kind == "conditions":
        results.conditions = content
        results.write()
    elif kind == "row":
        results.add_row(content)
    else:
        results.draw_timeline(content["tokens"], timelines(Path(settings.folder), settings.ranks))


def parse_batch(text: str) -> tuple[int, int]:
    """ "NEW" or "NEW+PREFIX" -> (new, prefix)."""
    parts = re.fullmatch(r"(\d+)(?:\+(\d+))?", text)
    new, prefix = (int(number or 0) for number in parts.groups()) if parts else (0, 0)
    if not 1 <= new + prefix <= MAX_TOKENS or new < 1:
        raise argparse.ArgumentTypeError(
            f"expected NEW or NEW+PREFIX, at least one new token and {MAX_TOKENS} in all at most, got {text!r}"
        )
    return new, prefix


def parse_output(text: str) -> Path:
    """The result files: the suffixes are added."""
    path = Path(text)
    if path.suffix or not path.name:
        raise argparse.ArgumentTypeError(f"expected a path without a suffix, got {text!r}")
    return path


def parse_seconds(text: str) -> float:
    """A budget: more than nothing."""
    seconds = float(text)
    if not 0.0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number of seconds above 0, got {text!r}")
    return seconds


def main() -> int:
    """Parse the command line and run the parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    batches = "batches in the order of measuring: NEW or NEW+PREFIX tokens"
    parser.add_argument("--tokens", nargs="+", type=parse_batch, help=batches)
    parser.add_argument("--parts", nargs="+", choices=["correctness", "failure", "scaling"], default=None)
    parser.add_argument(
        "--cases", nargs="+", help="of correctness and failure, these alone (with an --output of its own)"
    )
    parser.add_argument("--budget-seconds", type=parse_seconds, default=900.0, help="nothing is begun after it")
    parser.add_argument("--output", type=parse_output, help="path of the result files, without a suffix")
    arguments = parser.parse_args()
    start = time.time()
    device, ranks = arguments.device, arguments.ranks
    if device == "cuda" and torch.cuda.device_count() < ranks:
        parser.error(f"--ranks: expected at most the {torch.cuda.device_count()} GPUs of this machine, got {ranks}")
    if ranks < 2:
        parser.error(f"--ranks: expected at least 2, got {ranks}")
    name = torch.cuda.get_device_name(0).split()[-1] if device == "cuda" else "CPU"
    parts = arguments.parts or ["correctness", "failure", "scaling"]
    try:
        results = Results(arguments.output or ROOT / "benchmarks" / "results" / f"{name}x{ranks}", ranks, parts)
    except ValueError as error:
        parser.error(f"--output: {error}")
    try:
        checks = Checks.of(device, parts, arguments.cases)
    except ValueError as error:
        parser.error(f"--cases: {error}")
    if arguments.cases and not (checks.groups or checks.failing):
        parser.error(f"--cases: none of {', '.join(arguments.cases)} belongs to --parts {' '.join(parts)}")
    batches = arguments.tokens or [parse_batch(batch) for batch in BATCHES[device].split()]
    if not arguments.tokens and device == "cuda" and ranks >= RANKS_FOR_IT:
        batches.insert(2, LONG_BATCH)
    batches = tuple(dict.fromkeys(batches))
    measured = True
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # for the spawned processes
    with tempfile.TemporaryDirectory() as folder:
        if checks.groups or checks.failing:
            own = Path(folder, "cases")
            own.mkdir()
            share = CHECKS_SHARE if "scaling" in parts else 1.0
            deadline = start + share * arguments.budget_seconds
            check_cases(checks, ranks, device, own, results, parts, deadline)
            print(f"checks: {time.time() - start:.0f} s", flush=True)
        if "scaling" in parts:
            deadline = start + arguments.budget_seconds
            measured = measure(Settings(ranks, device, batches, batches[0], deadline, folder), results)
            print(f"in all: {time.time() - start:.0f} s", flush=True)
    wrong = [f"{case}: {outcome}" for case, outcome in results.correctness.items() if outcome != OK]
    wrong += [f"{case}: {saw}" for case, saw in results.failures.items() if saw.startswith(WRONG)]
    if "scaling" in parts and not (measured and results.rows):
        wrong += results.notes or ["nothing was measured"]
    for line in wrong:
        print(line, file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
