"""Compares the demo's steps with one process and with transformers, each within a bound whose reason stands here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from cp_prefill_steps import Settings, Step
from hf_reference import IndexerCall, attentions_of, bf16_noise, fp8_latents, given_picks, recorded_indexers
from torch import Tensor

# The kernels give a row the same bits whatever the rank, the split or the chunk. Between them, float64 GEMMs round by
# 1e-16 in an order that depends on the number of rows, and the kernels' bf16 inputs hide that. 1e-9 leaves room for the
# growth of 1e-16 over three layers, and is far below what one other bf16 input, byte or pick makes (1e-5 and more).
ONE_PROCESS = 1e-9
# Rounding the latents of transformers' own attention to FP8 moves its logits by what FP8 explains. Ours may be as far
# off again: the same rounding, and bf16 queries and outputs, whose noise is 16 times smaller.
FP8_FACTOR = 2.0
# What FP8 does not explain is bf16: queries, RoPE parts, attention outputs. Its noise in a layer is bf16_noise() times
# sqrt(2 * v + 2) for logits of variance v = scaling^2 * qk_head_dim; twice that, in each of three layers.
BF16_FACTOR = 2.0 * 3
# Nothing is rounded to 8 or 16 bits; both sides compute indexer scores in fp32.
UNQUANTISED = 2e-5
# Keys whose scores agree to within the rounding of transformers' fp32 sums may be picked for each other: 2^-24 of a
# score's largest term for each of the 128 + 8 additions that make it, in the worst case.
TIE = 2.0**-24 * (128 + 8)
FORWARDS = 8


@dataclass(frozen=True)
class Check:
    """One row of the demo's table; differences are those of logits, absolute."""

    title: str
    prompt_tokens: int
    prefix_hit: int
    ranks: int
    seconds: float
    to_one_process: float
    to_transformers: float
    bound_transformers: float
    same_picks: bool
    note: str = ""
    # Relative norm of the difference to transformers with latents rounded to FP8, and its bound.
    beyond_fp8: float = 0.0
    bound_beyond_fp8: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether everything is within its bound; a NaN is not."""
        return (
            self.to_one_process <= ONE_PROCESS
            and self.to_transformers <= self.bound_transformers
            and self.beyond_fp8 <= self.bound_beyond_fp8
            and self.same_picks
        )


class Transformers:
    """transformers' own model: logits of whole sequences."""

    def __init__(self, settings: Settings, tick: Callable[[], None]) -> None:
        self.model = settings.model()
        self.attentions = attentions_of(self.model)
        self.tick = tick

    @torch.no_grad()
    def logits(self, tokens: list[int], picks: list[Tensor] | None = None, fp8: bool = False) -> Tensor:
        """[tokens, vocab]; with given ``picks`` of each layer, or with latents rounded to FP8."""
        chosen = given_picks(self.attentions, picks) if picks else given_picks([], [])
        with chosen, fp8_latents(self.attentions if fp8 else []):
            logits: Tensor = self.model(torch.tensor([tokens])).logits[0]
        self.tick()
        return logits

    def exact_and_rounded(self, tokens: list[int], picks: list[Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """Logits without FP8, and with latents rounded to FP8."""
        return self.logits(tokens, picks), self.logits(tokens, picks, fp8=True)

    def beyond_fp8(self) -> float:
        """The share of the logits' norm that bf16 may account for."""
        attention = self.attentions[0]
        return BF16_FACTOR * bf16_noise() * (2 * attention.scaling**2 * attention.qk_head_dim + 2) ** 0.5


def check_steps(
    settings: Settings, ranks: list[list[Step]], single: list[Step], chosen: list[int], tick: Callable[[], None]
) -> list[Check]:
    """The rows of the demo's table.

    Args:
        settings: prompts and sizes.
        ranks: the steps of each rank.
        single: the steps of one process.
        chosen: the decoded tokens.
        tick: called after each of transformers' ``FORWARDS`` forwards.
    """
    theirs = Transformers(settings, tick)
    by_name = {steps[0].name: steps for steps in zip(*ranks, strict=True)}
    alone = {step.name: step for step in single}
    picks = {name: merged_picks(steps) for name, steps in by_name.items()}
    prompts = settings.prompts

    def check(
        name: str, title: str, exact: Tensor, rounded: Tensor | None, ties_only: bool = True, note: str = ""
    ) -> Check:
        steps, one = by_name[name], alone[name]
        other = sum(
            int((mine != its).any(dim=-1).sum()) for mine, its in zip(picks[name], merged_picks([one]), strict=True)
        )
        return Check(
            title,
            len(prompts["second" if name == "decode" else name]),
            steps[0].prefix_hit,
            len(ranks),
            max(step.seconds for step in steps),
            max(difference(step.logits, one.logits) for step in steps),
            max(difference(step.logits, exact) for step in steps),
            UNQUANTISED if rounded is None else FP8_FACTOR * difference(rounded, exact),
            ties_only and other == 0,
            f"{other} rows with other picks than one process" if other else note,
            0.0 if rounded is None else float((steps[0].logits - rounded).norm() / rounded.norm()),
            theirs.beyond_fp8(),
        )

    checks = [check("first", "prefill", *theirs.exact_and_rounded(prompts["first"], picks["first"]))]

    # The cached rows of the second prompt have the picks of the first one's; decoded rows follow.
    hit, end = by_name["second"][0].prefix_hit, len(prompts["second"])
    parts = zip(picks["first"], picks["second"], picks["decode"], strict=True)
    sequence = [torch.cat([cached[:hit], new, decoded]) for cached, new, decoded in parts]
    exact, rounded = theirs.exact_and_rounded(prompts["second"] + chosen, sequence)
    checks.append(check("second", "prefix reuse", exact[hit:end], rounded[hit:end]))
    checks.append(check("decode", f"decode x {len(chosen)}", exact[end:], rounded[end:]))

    # No more than topk keys: transformers' own indexers select all of them as well.
    checks.append(check("short", "T <= topk", *theirs.exact_and_rounded(prompts["short"])))

    with recorded_indexers(theirs.attentions) as calls:
        theirs.logits(prompts["plain"])
    exact = theirs.logits(prompts["plain"], picks["plain"])
    rows = len(prompts["plain"]) * settings.layers
    swaps = [swapped_keys(ours, call) for ours, call in zip(picks["plain"], calls, strict=True)]
    note = f"transformers' own indexers pick the same keys in {rows - sum(n for n, _ in swaps)} of {rows} rows"
    gap = max(gap for _, gap in swaps)
    if gap > 0:
        note += f"; elsewhere scores are equal to {gap:.0e} of their size (fp32 rounding: {TIE:.0e})"
    checks.append(check("plain", "unquantised", exact, None, gap <= TIE, note))
    return checks


def merged_picks(steps: list[Step] | tuple[Step, ...]) -> list[Tensor]:
    """Picks of all ranks in the order of positions, int32 [rows, topk] a layer; in decode all ranks have all rows."""
    split = steps[:1] if steps[0].name == "decode" else steps
    order = torch.cat([step.positions for step in split]).argsort()
    return [torch.cat(of_layer)[order] for of_layer in zip(*(step.picks for step in split), strict=True)]


def swapped_keys(ours: Tensor, call: IndexerCall) -> tuple[int, float]:
    """Rows in which transformers' indexer picked other keys, and by how much the scores of those differ at most.

    Relative to the largest |score| of the row. Hidden keys, which fill short rows up, are not counted.
    """
    rows = len(ours)
    mine, its = (
        torch.zeros(rows, rows + 1, dtype=torch.bool).scatter_(1, torch.where(keys < 0, rows, keys).long(), True)
        for keys in (ours, call.picks)
    )
    other = (mine ^ its)[:, :rows].tril()
    differing = other.any(dim=-1).nonzero().flatten()
    if not len(differing):
        return 0, 0.0
    scores, other = call.scores()[differing], other[differing]
    highest = scores.masked_fill(~other, -torch.inf).amax(dim=-1)
    lowest = scores.masked_fill(~other, torch.inf).amin(dim=-1)
    return len(differing), float(((highest - lowest) / scores.abs().amax(dim=-1)).max())


def difference(a: Tensor, b: Tensor) -> float:
    """The largest absolute difference; NaN if there is one."""
    return float((a - b).abs().max())
