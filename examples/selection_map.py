"""The demo's picture: which keys each query attends to, and which rank computed it."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import numpy as np
import torch
from cp_prefill_checks import merged_picks
from cp_prefill_steps import Settings, Step
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.patches import Patch
from numpy.typing import NDArray

mpl.use("Agg")

# Okabe and Ito's colours, which colour-blind people can tell apart; from the seventh rank on they repeat.
RANK_COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"]
CACHED = "#80868b"
DECODED = "#222222"
INK = "#202124"


def draw_selection_map(path: Path, ranks: list[list[Step]], settings: Settings, source: str) -> None:
    """Write the picture of the second prompt, last layer: cached rows, the ranks' rows, decoded rows."""
    by_name = {steps[0].name: steps for steps in zip(*ranks, strict=True)}
    hit = by_name["second"][0].prefix_hit
    first, second, decoded = (merged_picks(by_name[name])[-1] for name in ("first", "second", "decode"))
    picks = torch.cat([first[:hit], second, decoded])
    total = len(picks)
    owners = np.full(total, -1)
    for rank, step in enumerate(by_name["second"]):
        owners[step.positions.numpy()] = rank
    owners[hit + len(second) :] = -2

    colours = [RANK_COLOURS[rank % len(RANK_COLOURS)] for rank in range(len(ranks))]
    row_colours = np.array([to_rgb([*colours, DECODED, CACHED][owner]) for owner in owners])
    selected = np.zeros((total, total), dtype=np.float32)
    rows, columns = np.nonzero(picks.numpy() >= 0)
    selected[rows, picks.numpy()[rows, columns]] = 1

    plt.rcParams.update(
        {"font.family": "DejaVu Sans", "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": INK}
    )
    figure = plt.figure(figsize=(11, 11.6), dpi=150, facecolor="white")
    grid = figure.add_gridspec(
        2,
        2,
        height_ratios=(1, 8),
        width_ratios=(1, 50),
        hspace=0.07,
        wspace=0.02,
        left=0.075,
        right=0.975,
        top=0.885,
        bottom=0.06,
    )
    main, above, owner = (figure.add_subplot(grid[place]) for place in ((1, 1), (0, 1), (1, 0)))
    draw_map(main, selected, row_colours, hit)
    draw_popularity(above, selected, hit)
    owner.imshow(row_colours[:, None], aspect="auto", extent=(0, 1, total, 0), interpolation="nearest")
    owner.set_xticks([])
    owner.set_ylabel("query position", fontsize=11)
    owner.set_ylim(total, 0)
    for spine in owner.spines.values():
        spine.set_visible(False)

    figure.text(0.075, 0.965, "Which keys does each query attend to?", fontsize=19, weight="bold")
    share = len(rows) / (total * (total + 1) / 2)
    figure.text(
        0.075,
        0.943,
        f"{settings.topk} of up to {total} keys: {share:.0%} of the causal pairs. "
        f"Last of {settings.layers} layers, bytes of {source}.",
        fontsize=11,
    )
    handles = [Patch(color=CACHED, label=f"cached prefix, {hit} tokens")]
    handles += [Patch(color=colour, label=f"prefill on rank {rank}") for rank, colour in enumerate(colours)]
    handles += [Patch(color=DECODED, label="decode, every rank")]
    figure.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(0.067, 0.938),
        ncols=min(len(handles), 6),
        columnspacing=1.4,
        handlelength=1.4,
        frameon=False,
        fontsize=10.5,
    )
    figure.savefig(path)
    plt.close(figure)


def draw_map(axes: Axes, selected: NDArray[np.float32], row_colours: NDArray[np.float64], hit: int) -> None:
    """Query x key: a dot for every selected pair in its row's colour, on a pale triangle of all causal pairs."""
    total = len(selected)
    axes.imshow(
        map_image(selected, row_colours), extent=(0, total, total, 0), aspect="auto", interpolation="antialiased"
    )
    axes.axhline(hit, color=INK, linewidth=0.8, alpha=0.6)
    axes.plot((hit, hit), (hit, total), color=INK, linewidth=1, linestyle=(0, (4, 3)))
    middle, end = hit / total / 2, hit / total
    for text, at, colour in (
        (f"cached prefix: {hit} keys", middle, CACHED),
        (f"{total - hit} new keys", (1 + end) / 2, INK),
    ):
        axes.text(at, 1.008, text, transform=axes.transAxes, ha="center", fontsize=10, color=colour)
    axes.annotate(
        "The new queries read the cached prefix,\nwhich is not computed again.",
        (hit * 0.93, hit * 1.06),
        (total * 0.64, hit * 0.62),
        fontsize=10.5,
        arrowprops={"arrowstyle": "->", "color": INK, "connectionstyle": "arc3,rad=-0.25"},
    )
    axes.text(total * 0.64, hit * 0.3, "Keys after a query\nare not visible to it.", fontsize=10.5, color="#80868b")
    axes.set_xlim(0, total)
    axes.set_ylim(total, 0)
    axes.set_yticks([])
    axes.set_xlabel("key position", fontsize=11)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def map_image(selected: NDArray[np.float32], row_colours: NDArray[np.float64]) -> NDArray[np.float64]:
    """RGB [rows, keys, 3]: selected pairs in their row's colour, other visible pairs pale, the rest white."""
    visible = np.tril(np.ones_like(selected))[..., None]
    paper = 1 - visible * (1 - np.array(to_rgb("#f3f4f6")))
    image: NDArray[np.float64] = np.where(selected[..., None] > 0, row_colours[:, None], paper)
    return image


def draw_popularity(axes: Axes, selected: NDArray[np.float32], hit: int) -> None:
    """Above the map: which share of the new queries that see a key selects it."""
    total = len(selected)
    seen_by = np.minimum(np.arange(total, 0, -1), total - hit)
    share = selected[hit:].sum(axis=0) / seen_by
    axes.fill_between(np.arange(total), share, color=INK, alpha=0.75, linewidth=0, step="mid")
    axes.set_xlim(0, total)
    axes.set_ylim(0, 1)
    axes.set_yticks([0, 1], ["0 %", "100 %"], fontsize=9)
    axes.set_xticks([])
    axes.set_ylabel("new queries\nthat select it", fontsize=9)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
