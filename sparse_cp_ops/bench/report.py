"""Results: a rich table, JSON, Markdown and a roofline picture."""

import json
import platform
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import sparse_cp_ops
from sparse_cp_ops.bench.cases import Case, Work
from sparse_cp_ops.bench.timing import Timing


@dataclass(frozen=True)
class Row:
    """A measured case. Limits in microseconds: the larger of bytes / copy bandwidth and FLOP / GEMM rate."""

    op: str
    shape: str
    timing: Timing
    bytes_moved: float
    flop: float
    ceiling: str
    limit_us: float
    others_us: dict[str, float]
    not_measured: dict[str, str]  # what else was asked, and why it has no time

    @property
    def percent_of_limit(self) -> float:
        """How much of the limit's rate is reached."""
        return 100.0 * self.limit_us / self.timing.median_us

    @property
    def speedup(self) -> float | None:
        """Time of the fastest other implementation over ours; None where nothing was measured beside it."""
        return min(self.others_us.values()) / self.timing.median_us if self.others_us else None


def limit_us(work: Work, case: Case, ceilings: dict[str, float]) -> float:
    """The time below which no implementation can be on this machine, from the ceilings of this run."""
    by_bytes = work.bytes_moved / ceilings[case.ceiling if case.ceiling in COPIES else "copy"]
    by_flop = work.flop / ceilings[case.ceiling] if work.flop and case.ceiling in ceilings else 0.0
    return 1e6 * max(by_bytes, by_flop)


def conditions(device: torch.device) -> dict[str, str]:
    """Machine and versions of this run."""
    facts = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "sparse_cp_ops": sparse_cp_ops.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": str(torch.get_num_threads()),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts["device"] = f"{properties.name}, {properties.multi_processor_count} SMs"
        facts["SM clock after the run"] = f"{torch.cuda.clock_rate(device)} MHz" if _has_nvml() else "not measured"
    else:
        facts["device"] = f"{_cpu_name()}, {torch.backends.cpu.get_cpu_capability()}"
    return facts


def _has_nvml() -> bool:
    try:
        import pynvml  # noqa: F401
    except ImportError:
        return False
    return True


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown CPU"


def _cells(row: Row) -> list[str]:
    rate = f"{row.flop / row.timing.median_us / 1e6:.2f} TFLOP/s" if row.flop else _bandwidth(row)
    spread = f"{row.timing.p10_us:.1f}-{row.timing.p90_us:.1f}"
    others = [f"{name} {value:.0f}" for name, value in row.others_us.items()]
    others += [f"{name} not measured: {reason}" for name, reason in row.not_measured.items()]
    speedup = f"{row.speedup:.2f}x" if row.speedup is not None else ""
    return [
        row.op,
        row.shape,
        f"{row.timing.median_us:.1f}",
        spread,
        rate,
        f"{row.percent_of_limit:.0f} % of {row.ceiling}",
        ", ".join(others),
        speedup,
    ]


def _bandwidth(row: Row) -> str:
    return f"{row.bytes_moved / row.timing.median_us / 1e3:.1f} GB/s"


COPIES = ("copy", "host copy")  # ceilings in bytes/s
HEADINGS = ["op", "shape", "median us", "p10-p90", "rate", "limit", "others, us", "vs best other"]


def print_table(rows: list[Row], ceilings: dict[str, float], facts: dict[str, str]) -> None:
    """The table for a terminal."""
    table = Table(title=", ".join(f"{k} {v}" for k, v in facts.items()), caption=_ceiling_line(ceilings))
    for heading in HEADINGS:
        table.add_column(heading)
    for row in rows:
        table.add_row(*_cells(row))
    Console(width=None if Console().is_terminal else 200).print(table)


def _ceiling_line(ceilings: dict[str, float]) -> str:
    parts = [f"{name} {rate / 1e9:.0f} GB/s" for name, rate in ceilings.items() if name in COPIES]
    parts += [f"{name} GEMM {rate / 1e12:.4g} TFLOP/s" for name, rate in ceilings.items() if name not in COPIES]
    return "ceilings of this run: " + ", ".join(parts)


def markdown(rows: list[Row], ceilings: dict[str, float], facts: dict[str, str]) -> str:
    """The same table for a file under version control."""
    lines = [", ".join(f"{k} {v}" for k, v in facts.items()) + ".", _ceiling_line(ceilings) + ".", ""]
    lines += ["| " + " | ".join(HEADINGS) + " |", "|" + "---|" * len(HEADINGS)]
    lines += ["| " + " | ".join(_cells(row)) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def write_json(path: Path, rows: list[Row], ceilings: dict[str, float], facts: dict[str, str]) -> None:
    """Everything that was measured."""
    data: dict[str, Any] = {"conditions": facts, "ceilings": ceilings, "rows": [asdict(row) for row in rows]}
    path.write_text(json.dumps(data, indent=1) + "\n")


def write_roofline(path: Path, rows: list[Row], ceilings: dict[str, float], facts: dict[str, str]) -> None:
    """Rate over arithmetic intensity of every case that computes, under the measured roofs."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    figure, axes = plt.subplots(figsize=(9, 6), layout="constrained")
    points = [row for row in rows if row.flop]
    intensities = [row.flop / row.bytes_moved for row in points]
    x = np.logspace(0, np.log10(max([1e4, *intensities]) * 2), 200)
    for name, rate in ceilings.items():
        if name not in COPIES:
            roof = np.minimum(rate, x * ceilings["copy"]) / 1e12
            axes.plot(x, roof, color="0.35", linewidth=1)
            axes.annotate(f"{name} GEMM {rate / 1e12:.4g}", (x[-1], rate / 1e12), ha="right", va="bottom", fontsize=8)
    for op in dict.fromkeys(row.op for row in points):
        own = [row for row in points if row.op == op]
        axes.scatter(
            [row.flop / row.bytes_moved for row in own],
            [row.flop / row.timing.median_us / 1e6 for row in own],
            label=op,
        )
    axes.set(xscale="log", yscale="log", xlabel="FLOP per byte moved at least", ylabel="TFLOP/s")
    axes.set_title(f"{facts['device']}, {facts['date']}", fontsize=10)
    axes.grid(which="both", alpha=0.2)
    if points:
        axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)
