"""What the layer was to reach, beside what was measured, and what is in the way of what it misses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from sparse_cp_ops.bench.layer import trace

Part = dict[str, Any]

POWER = (
    "The device runs at its power limit, so less energy a key is needed, not fewer gaps: the fast modes, or attention "
    "whose products take fewer bits."
)
LAUNCHES = (
    "Nine kernels are launched beside those of the bare calls, some 4 us each on this host; views, allocations and "
    "Python are the rest. A CUDA graph of the step has none of it."
)
GUARDS = (
    "Guards and wrappers of torch.compile and launches of generated code, which an eager layer has not. A CUDA graph "
    "has none of these."
)
ONE_CALL = "Few rows take one call between their projections in an eager prefill, and several in compiled code."
STREAMS = (
    "torch.compile puts all that it traces on one stream, so the first projections, which an eager layer's graph runs "
    "at once, follow each other."
)
ONE_BY_ONE = (
    "Interleaved ranks differ by one row at most and are measured one after another; which batch is above the bound "
    "has changed from run to run."
)
PLAN = "Half of it is the copy of the lengths and the launch that expands them; the rest changes with the host."


@dataclass(frozen=True)
class Goal:
    """A figure of one part that is to stay at or below a bound."""

    text: str
    part: str
    bound: float
    unit: str
    digits: int
    measured: Callable[[Part], float]
    in_the_way: str = ""


def _case(part: Part, rows: int) -> Part:
    return next(c for c in part["cases"] if c["rows"] == rows and c["ranks"] == 1 and not c.get("fast"))


def _sum(case: Part, parts: tuple[str, ...]) -> float:
    return float(sum(case["parts_us"][name] for name in parts))


def _small_share(part: Part) -> float:
    case = _case(part, 8192)
    return 100 * _sum(case, trace.SMALL) / _sum(case, tuple(p for p in trace.PARTS if p != trace.GATHER))


def _without_gemms(rows: int) -> Callable[[Part], float]:
    return lambda part: _sum(_case(part, rows), (trace.INDEXER, trace.ATTENTION, *trace.SMALL)) / 1e3


def _exposed(part: Part) -> float:
    return max(100 * float(c["exposed_gather_us"]) / _sum(c, tuple(c["parts_us"])) for c in part["cases"])


def _slower(kind: str, clock: str) -> Callable[[Part], float]:
    return lambda part: max(
        float(t[f"compiled{clock}_us"] / t[f"eager{clock}_us"]) for t in part["times"] if t["kind"] == kind
    )


def _imbalance(part: Part) -> float:
    """Of the default split, from 16K new tokens on."""
    small = ("sixteen prompts of 256", "three prompts")
    shares = (s for s in part["shares"] if s["split"] == "interleave" and not s["batch"].startswith(small))
    return max(float(share["slowest_over_mean"]) for share in shares)


GOALS = (
    Goal("work that is neither GEMM, indexer nor attention, 8192 rows x 64K", "timeline", 6, "%", 1, _small_share),
    Goal("indexer, attention and small work, 8192 x 64K", "timeline", 14, "ms", 1, _without_gemms(8192), POWER),
    Goal("the same, 4096 x 32K", "timeline", 5.4, "ms", 1, _without_gemms(4096), POWER),
    Goal("exposed part of the (modelled) gather", "timeline", 3, "%", 1, _exposed),
    Goal("plan", "host", 50, "us", 0, lambda part: float(part["prepare_us"]), PLAN),
    Goal(
        "eager layer above its bare calls",
        "host",
        25,
        "us",
        0,
        lambda part: float(part["layer_us"] - part["bare_calls_us"]),
        LAUNCHES,
    ),
    Goal("graphs that 50 lengths need in prefill", "compiled", 3, "", 0, lambda part: float(part["prefill_graphs"])),
    Goal("and in decode", "compiled", 3, "", 0, lambda part: float(part["decode_graphs"])),
    Goal(
        "compiled prefill, times the eager one", "compiled", 1, "x", 2, _slower("prefill", ""), f"{GUARDS} {ONE_CALL}"
    ),
    Goal(
        "the same on the device alone",
        "compiled",
        1,
        "x",
        2,
        _slower("prefill", "_graph"),
        "As much as one run differs from the next.",
    ),
    Goal("compiled decode, times the eager one", "compiled", 1, "x", 2, _slower("decode", ""), GUARDS),
    Goal("the same on the device alone", "compiled", 1, "x", 2, _slower("decode", "_graph"), STREAMS),
    Goal("slowest rank over mean, from 16K new tokens on", "balance", 1.02, "", 3, _imbalance, ONE_BY_ONE),
    Goal(
        "logits after chunks, prefix hits and decoding, of their bound",
        "end_to_end",
        1,
        "x",
        2,
        lambda part: float(part["relative_difference"] / part["bound"]),
    ),
)


def rows(results: dict[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    """Goal, bound, measured value, and what is in the way where it is missed.

    Parts that were not measured on a GPU at full size are left out; what rounds to the bound meets it.
    """
    for goal in GOALS:
        part = results.get(goal.part)
        if part is None or part["tiny"] or "missing" in part or "SMs" not in part["conditions"]["device"]:
            continue
        value = round(goal.measured(part), goal.digits)

        def shown(number: float, goal: Goal = goal) -> str:
            return f"{number:.{goal.digits}f} {goal.unit}".rstrip()

        met = value <= goal.bound
        yield goal.text, shown(goal.bound), shown(value), "met" if met else f"**missed.** {goal.in_the_way}".rstrip()
