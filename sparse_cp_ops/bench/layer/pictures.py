"""Pictures of the layer benchmark, from its JSON."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sparse_cp_ops.bench.layer import trace

# One colour a part: GEMMs blue to grey, the two big kernels warm, small work green, communication purple.
COLOURS = {
    trace.PROJECTIONS: "#4c78a8",
    trace.INDEX_PROJECTIONS: "#7fa8d0",
    trace.OUTPUT: "#2f4f73",
    trace.INDEXER: "#f2a541",
    trace.ATTENTION: "#d1495b",
    trace.RECORDS: "#3a9d5d",
    trace.NORMS: "#8fce9f",
    trace.CASTS: "#b5d99c",
    trace.WRITE: "#1f6f43",
    trace.GATHER: "#8e5ea2",
}


def write(results: dict[str, Any], folder: Path) -> None:
    """layer_timeline.png, layer_balance.png and layer_break_even.png, as far as there are results for them."""
    folder.mkdir(parents=True, exist_ok=True)
    if "timeline" in results:
        _timeline(results["timeline"], folder / "layer_timeline.png")
    if "balance" in results:
        _balance(results["balance"], folder / "layer_balance.png")
    if "break_even" in results:
        _break_even(results["break_even"], folder / "layer_break_even.png")


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot


def _timeline(part: dict[str, Any], path: Path) -> None:
    """One panel a case: the layer's own stream above, the gather's below, in milliseconds."""
    plt = _pyplot()
    cases = part["cases"]
    figure, panels = plt.subplots(len(cases), 1, figsize=(11, 1.1 * len(cases) + 0.8), layout="constrained")
    for axes, case in zip(panels if len(cases) > 1 else [panels], cases, strict=True):
        for interval in case["intervals"]:
            lane = 0 if interval["part"] == trace.GATHER else 1
            axes.broken_barh(
                [(interval["start"] / 1e3, interval["duration"] / 1e3)], (lane, 0.85),
                facecolors=COLOURS[interval["part"]], edgecolor="white", linewidth=0.2,
            )  # fmt: skip
        ranks = "1 rank" if case["ranks"] == 1 else f"{case['ranks']} ranks"
        ranks += ", fast" if case.get("fast") else ""
        axes.set_ylabel(f"{case['rows']} x {case['keys'] // 1024}K\n{ranks}", fontsize=7, rotation=0, ha="right")
        axes.set(yticks=[], ylim=(-0.1, 2))
        axes.tick_params(labelsize=7)
        axes.set_xlim(0, max(c["intervals"][-1]["start"] + c["intervals"][-1]["duration"] for c in cases) / 1e3)
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS.values()]
    figure.legend(handles, COLOURS.keys(), loc="outside upper center", ncols=5, fontsize=7)
    figure.supxlabel(f"ms; {part['conditions']['device']}, {part['conditions']['date']}", fontsize=8)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _balance(part: dict[str, Any], path: Path) -> None:
    """Slowest rank over mean of each batch, both splits, one panel a number of ranks."""
    plt = _pyplot()
    rows = part["shares"]
    sizes, batches = _distinct(rows, "ranks"), _distinct(rows, "batch")
    figure, panels = plt.subplots(1, len(sizes), figsize=(11, 3.2), layout="constrained", sharey=True, sharex=True)
    for axes, size in zip(panels, sizes, strict=True):
        for offset, split in enumerate(_distinct(rows, "split")):
            values = {r["batch"]: r["slowest_over_mean"] for r in rows if r["ranks"] == size and r["split"] == split}
            places = [i + 0.35 * (offset - 0.5) for i in range(len(batches))]
            axes.barh(places, [values[batch] - 1 for batch in batches], height=0.33, label=split)
        axes.axvline(0.02, color="0.3", linewidth=1, linestyle=":")
        axes.set(yticks=range(len(batches)), yticklabels=batches, title=f"{size} ranks")
        axes.invert_yaxis()
        axes.tick_params(labelsize=7)
    panels[-1].legend(fontsize=8)
    figure.supxlabel("slowest rank over mean, less 1 (indexer + attention); dotted: 0.02", fontsize=8)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _break_even(part: dict[str, Any], path: Path) -> None:
    """Layer time with S ranks over the time with one, by new tokens; eager and device alone."""
    plt = _pyplot()
    rows = part["forwards"]
    prefixes = _distinct(rows, "prefix")
    figure, panels = plt.subplots(1, len(prefixes), figsize=(9, 3.4), layout="constrained", sharey=True)
    for axes, prefix in zip(panels, prefixes, strict=True):
        own = [r for r in rows if r["prefix"] == prefix]
        alone = {r["new_tokens"]: r for r in own if r["ranks"] == 1}
        for number, size in enumerate(s for s in _distinct(own, "ranks") if s > 1):
            for kind, style in (("eager_us", "-"), ("graph_us", "--")):
                points = [r for r in own if r["ranks"] == size and kind in r]
                if points:
                    axes.plot(
                        [r["new_tokens"] for r in points],
                        [r[kind] / alone[r["new_tokens"]][kind] for r in points],
                        style,
                        marker="o",
                        markersize=3,
                        color=f"C{number}",
                        label=f"{size} ranks, {'eager' if kind == 'eager_us' else 'device alone'}",
                    )
        axes.axhline(1.0, color="0.3", linewidth=1, linestyle=":")
        axes.set(xscale="log", xlabel="new tokens", title=f"prefix {prefix}")
    panels[0].set_ylabel("layer time / time without ranks")
    panels[-1].legend(fontsize=7)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _distinct(rows: Sequence[dict[str, Any]], key: str) -> list[Any]:
    return list(dict.fromkeys(row[key] for row in rows))
