"""What cp_scaling.py writes: everything measured as JSON, tables as Markdown, the time line of all ranks as PNG."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

# Kernel names on a GPU, op names on the CPU; the first match counts.
KINDS = [
    ("gather", "nccl|c10d|gloo"),
    ("attention", "sparse_mla|attend|SparseMla|merge_parts|sm90_workspace"),
    ("indexer", "indexer|scores|topk|threshold|survivor|narrow_|selection|plan_kernel"),
    ("records", "sparse_cp_ops"),
    ("GEMM", "gemm|nvjet|cutlass|cublas|xmma|splitK|aten::(b|add)?mm|gemv"),
    ("other", "."),
]
COLOURS = {
    "gather": "tab:red",
    "attention": "tab:blue",
    "indexer": "tab:green",
    "records": "tab:orange",
    "GEMM": "tab:purple",
    "other": "0.6",
}
Event = tuple[str, int, int, int]  # name, start ns, duration ns, stream


OK = "holds"  # a check that held
WRONG = "wrong: "  # before what the ranks saw, if it is not what they should have seen


def now() -> str:
    """As in the conditions."""
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")


class Results:
    """Everything so far; the files are written anew whenever something is added.

    Parts that a run leaves out keep what the JSON of an earlier run says.

    Raises:
        ValueError: there is a file of that name that holds something else.
    """

    def __init__(self, output: Path, ranks: int, parts: Sequence[str]) -> None:
        self.output, self.ranks = output, ranks
        path = output.with_suffix(".json")
        try:
            before = json.loads(path.read_text()) if path.exists() else {}
        except ValueError:
            before = None
        if not isinstance(before, dict):
            raise ValueError(f"expected results of an earlier run in {path}, or no such file")
        measured_before = {} if "scaling" in parts else before
        self.correctness: dict[str, str] = {} if "correctness" in parts else before.get("correctness", {})
        self.failures: dict[str, str] = {} if "failure" in parts else before.get("failures", {})
        self.checked: dict[str, str] = before.get("checked", {})  # part -> date
        self.left_out: list[str] = before.get("left_out", [])  # cases that need another device
        self.conditions: dict[str, str] = measured_before.get("conditions", {})
        self.rows: list[dict[str, Any]] = measured_before.get("rows", [])
        self.timeline: dict[str, Any] = measured_before.get("timeline", {})
        self.notes: list[str] = measured_before.get("notes", [])

    def add_row(self, row: dict[str, Any]) -> None:
        """The measurements of one batch; a later row of it replaces an earlier one."""
        before: dict[str, Any] = next((other for other in self.rows if _batch(other) == _batch(row)), {})
        new = {name: _short(value) for name, value in row.items() if name not in before}
        print(f"{_batch(row)}: {new}", flush=True)
        self.rows = [other for other in self.rows if _batch(other) != _batch(row)] + [row]
        self.rows.sort(key=lambda other: (other["prefix"], other["tokens"]))
        self.write()

    def note_missing(self, batches: Sequence[tuple[int, int]]) -> None:
        """Say which batches were asked for and not measured."""
        wanted = [_batch({"tokens": tokens, "prefix": prefix}) for tokens, prefix in batches]
        if missing := [batch for batch in wanted if batch not in map(_batch, self.rows)]:
            self.notes.append(f"Not measured: {', '.join(missing)} tokens.")

    def write(self) -> None:
        """JSON and Markdown."""
        self.output.parent.mkdir(parents=True, exist_ok=True)
        content = {name: value for name, value in vars(self).items() if name != "output"}
        texts = {".json": json.dumps(content, indent=1) + "\n", ".md": self.markdown()}
        for suffix, text in texts.items():  # a run that is ended meanwhile leaves the whole file of before
            self.output.with_suffix(".part").write_text(text)
            self.output.with_suffix(".part").replace(self.output.with_suffix(suffix))

    def markdown(self) -> str:
        """All tables."""
        name = self.output.name
        parts = [f"# Context parallelism on {name}", *self._of_fewer_ranks()]
        parts += [", ".join(f"{k} {v}" for k, v in self.conditions.items())]
        if self.correctness:
            table = _table(["case", "all ranks"], [[case, result] for case, result in self.correctness.items()])
            parts += ["## The bits of one rank", *self._when("correctness"), table]
        if self.rows:
            parts += [
                f"## One attention layer on {self.ranks} ranks",
                "Medians in ms of the slowest rank, all ranks starting together; one GPU: the fastest of them, all "
                "running the whole batch at once. Speed-up: one GPU over the faster split. Exposed: what the layer "
                "takes longer than one whose gather takes no time. In line, registered: zigzag. Balance: slowest over "
                "mean of the ranks without gathers. Memory: peak of the allocator, on a rank without the hidden "
                "states and outputs of the whole batch that are there for the comparison. Difference: norm of the "
                "output's difference to one GPU, relative (the GEMMs round differently with the row count).",
                _table(LAYER_COLUMNS, [layer_cells(row) for row in self.rows]),
                "## One gather",
                "Alone, back to back. Rate: bytes that a rank receives over time.",
                _table(GATHER_COLUMNS, [gather_cells(row, self.ranks) for row in self.rows if not row["prefix"]]),
            ]
        if self.timeline:
            hidden = ", ".join(f"rank {rank}: {share:.1f} %" for rank, share in enumerate(self.timeline["exposed"]))
            parts += [
                "## Time line",
                f"![time line]({name}.png)",
                f"One layer at {self.timeline['tokens']} tokens. Time in which only a gather ran: {hidden}.",
            ]
        if self.failures:
            table = _table(
                ["case", "what the ranks saw, seconds after the first had ended"],
                [[case, saw] for case, saw in self.failures.items()],
            )
            parts += ["## One rank fails in the middle of a forward", *self._when("failure"), table]
        if self.left_out:
            parts.append(f"Not run, as they need GPUs, like the columns without values: {', '.join(self.left_out)}.")
        return "\n\n".join([*filter(None, parts), *self.notes]) + "\n"

    def _of_fewer_ranks(self) -> list[str]:
        """Links to the results beside this file."""
        machine = self.output.name.removesuffix(f"x{self.ranks}")
        files = [f"{machine}x{ranks}.md" for ranks in range(2, self.ranks)]
        links = [f"[{file.removesuffix('.md')}]({file})" for file in files if (self.output.parent / file).exists()]
        return [f"Fewer ranks: {', '.join(links)}."] if links else []

    def _when(self, part: str) -> list[str]:
        return [f"Run on {self.checked[part]}."] if part in self.checked else []

    def draw_timeline(self, tokens: int, of_ranks: Sequence[Sequence[Event]]) -> None:
        """The PNG, and how long only gathers ran."""
        self.timeline = {"tokens": tokens, "exposed": [exposed_share(events) for events in of_ranks]}
        _draw(self.output.with_suffix(".png"), of_ranks, f"{self.output.name}, {tokens} tokens")
        self.write()


LAYER_COLUMNS = [
    "tokens (+ prefix)", "one GPU", "zigzag", "interleave", "speed-up", "exposed zigzag", "exposed interleave",
    "in line", "registered",
    "balance zigzag", "balance interleave", "GiB one GPU", "GiB a rank", "difference", "SM MHz",
]  # fmt: skip
GATHER_COLUMNS = [
    "tokens",
    "MB a rank",
    "packed us",
    "packed GB/s",
    "registered us",
    "three of bf16 us",
    "packed gains",
]
NOT_MEASURED = "-"


def layer_cells(row: dict[str, Any]) -> list[str]:
    """A row of the table of the layer."""
    slowest = {name: max(row[name]) if name in row else None for name in TIMES}
    one = min(row["one_gpu_ms"]) if "one_gpu_ms" in row else None
    best = min((t for t in (slowest["zigzag_ms"], slowest["interleave_ms"]) if t is not None), default=None)
    clocks = [clock for clock in row.get("clock_mhz", ()) if clock]
    return [
        _batch(row),
        *(_ms(value) for value in (one, slowest["zigzag_ms"], slowest["interleave_ms"])),
        NOT_MEASURED if one is None or best is None else f"{one / best:.2f}x",
        *(_exposed(slowest[f"{split}_ms"], slowest[f"{split}_silent_ms"]) for split in ("zigzag", "interleave")),
        *(_ms(slowest[name]) for name in ("in_line_ms", "registered_ms")),
        *(_balance(row.get(name)) for name in ("zigzag_silent_ms", "interleave_silent_ms")),
        *(f"{row[name]:.1f}" if row.get(name) else NOT_MEASURED for name in ("one_gpu_gib", "rank_gib")),
        f"{row['difference']:.1e}" if "difference" in row else NOT_MEASURED,
        f"{min(clocks):.0f}-{max(clocks):.0f}" if clocks else NOT_MEASURED,
    ]


TIMES = ("zigzag_ms", "interleave_ms", "zigzag_silent_ms", "interleave_silent_ms", "in_line_ms", "registered_ms")


def gather_cells(row: dict[str, Any], ranks: int) -> list[str]:
    """A row of the table of the gathers."""
    names = ("packed_gather_ms", "registered_gather_ms", "bf16_gathers_ms")
    packed, registered, three = (max(row[name]) if name in row else None for name in names)
    block = row.get("block_bytes", 0)
    return [
        f"{row['tokens']}",
        f"{block / 1e6:.2f}" if block else NOT_MEASURED,
        _us(packed),
        NOT_MEASURED if packed is None else f"{(ranks - 1) * block / packed / 1e6:.1f}",
        _us(registered),
        _us(three),
        NOT_MEASURED if packed is None or three is None else f"{three / packed:.2f}x",
    ]


def _batch(row: dict[str, Any]) -> str:
    return f"{row['tokens']} + {row['prefix']}" if row["prefix"] else f"{row['tokens']}"


def _short(value: object) -> object:
    if isinstance(value, list):
        return [_short(item) for item in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _ms(value: float | None) -> str:
    return NOT_MEASURED if value is None else f"{value:.3g}" if value < 10 else f"{value:.2f}"


def _us(value: float | None) -> str:
    return NOT_MEASURED if value is None else f"{value * 1000:.0f}"


def _exposed(time: float | None, silent: float | None) -> str:
    return NOT_MEASURED if time is None or silent is None else f"{100 * (time - silent) / time:.1f} %"


def _balance(times: Sequence[float] | None) -> str:
    return NOT_MEASURED if times is None else f"{max(times) / (sum(times) / len(times)):.3f}"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def kind_of(name: str) -> str:
    """Which part of the layer a kernel or op belongs to."""
    return next(kind for kind, pattern in KINDS if re.search(pattern, name))


def exposed_share(events: Sequence[Event]) -> float:
    """Percent of the layer's time in which a gather ran and nothing else did."""
    if not events:
        return 0.0
    edges = []
    for name, start, duration, _ in events:
        is_gather = kind_of(name) == "gather"
        edges += [(start, 1, is_gather), (start + duration, -1, is_gather)]
    running = {True: 0, False: 0}
    exposed, last = 0, min(edge[0] for edge in edges)
    begin, end = last, max(edge[0] for edge in edges)
    for time, change, is_gather in sorted(edges):
        if running[True] and not running[False]:
            exposed += time - last
        running[is_gather] += change
        last = time
    return 100 * exposed / (end - begin) if end > begin else 0.0


def _draw(path: Path, of_ranks: Sequence[Sequence[Event]], title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    origin = min((event[1] for events in of_ranks for event in events), default=0)
    figure, axes = plt.subplots(figsize=(12, 1.2 + 0.8 * len(of_ranks)), layout="constrained")
    for rank, events in enumerate(of_ranks):
        bars: dict[tuple[str, float], list[tuple[float, float]]] = {}
        for name, start, duration, _ in events:
            kind = kind_of(name)
            lane = rank + (0.3 if kind == "gather" else -0.1)
            bars.setdefault((kind, lane), []).append(((start - origin) / 1e6, duration / 1e6))
        for (kind, lane), spans in bars.items():
            axes.broken_barh(spans, (lane - 0.2, 0.25 if kind == "gather" else 0.4), color=COLOURS[kind], linewidth=0)
    axes.set(yticks=range(len(of_ranks)), yticklabels=[f"rank {rank}" for rank in range(len(of_ranks))])
    axes.set(xlabel="ms", title=title)
    axes.invert_yaxis()
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS.values()]
    axes.legend(handles, list(COLOURS), ncols=len(COLOURS), loc="upper center", bbox_to_anchor=(0.5, -0.25))
    figure.savefig(path, dpi=100)
    plt.close(figure)
