"""Measures attention and indexer scores on the CPU and holds them against their goals.

    python benchmarks/cpu.py [--seconds 3] [--json FILE] [--markdown FILE]

256 rows x 8192 keys, topk 2048, from the FP8 bytes, all cores. Goals, in percent of the fp32 GEMM rate of the same
run: attention (H = 16, 128) 50, scores (Hi = 16, 64) 40; both faster than vectorised PyTorch from the same bytes. The
table is that of ``python -m sparse_cp_ops bench``. Exit status 1 if a goal is missed.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

from sparse_cp_ops.bench import cli

GOALS = {"sparse_mla_fp8_cp": 50.0, "indexer_scores_ragged_cp": 40.0}  # percent of the fp32 GEMM rate


def missed_goals(results: Path) -> list[str]:
    """One sentence a missed goal, from the JSON of a bench run."""
    data = json.loads(results.read_text())
    missed = []
    for row in data["rows"]:
        name = f"{row['op']} {row['shape']}"
        microseconds = row["timing"]["median_us"]
        percent = 100 * row["flop"] / microseconds * 1e6 / data["ceilings"]["fp32"]
        if percent < GOALS[row["op"]]:
            missed.append(f"{name}: {percent:.0f} % of the GEMM rate, goal {GOALS[row['op']]:.0f} %")
        if min(row["others_us"].values()) <= microseconds:
            missed.append(f"{name}: not faster than vectorised PyTorch")
    return missed


def main() -> int:
    """Run the benchmark and print which goals were missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", default="3", help="time spent on each measurement (default 3)")
    parser.add_argument("--json", type=Path, help="keep everything measured in this file")
    parser.add_argument("--markdown", type=Path, help="write the table to this file")
    own = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = own.json or Path(folder) / "cpu.json"
        options = ["--device", "cpu", "--seconds", own.seconds, "--json", str(results)]
        options += [option for op in GOALS for option in ("--op", op)]
        options += ["--markdown", str(own.markdown)] if own.markdown else []
        bench = argparse.ArgumentParser()
        cli.add_arguments(bench)
        status = cli.run(bench.parse_args(options))
        if status:
            return status
        missed = missed_goals(results)
    print("\n".join(missed) or "all goals reached")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
