"""The layer benchmark's tables in Markdown, from its JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sparse_cp_ops.bench.layer import goals, trace

NOT_MEASURED = "not measured"


def markdown(results: dict[str, Any]) -> str:
    """One section a part, whatever order they were measured in; parts without results say so."""
    sections = [
        "# The attention layer: measured",
        "",
        "Written by `python -m sparse_cp_ops bench-layer --json FILE --markdown THIS --pictures FOLDER`. Dimensions of "
        "DeepSeek-V3.2, random bf16 weights. Ranks are simulated on one device: each rank's own work is measured, the "
        "time of what travels between ranks is *modelled* from a table measured on two GPUs "
        "(`sparse_cp_ops/bench/layer/ranks.py`).",
    ]
    reached = list(goals.rows(results))
    if reached:
        sections += ["", "## Goals", "", *_table(["", "at most", "measured", ""], reached)]
    for name, (title, body) in _SECTIONS.items():
        part = results.get(name)
        sections += ["", f"## {title}", ""]
        if part is None:
            sections.append(NOT_MEASURED.capitalize() + ".")
            continue
        facts = {k: v for k, v in part["conditions"].items() if k in ("device", "torch", "date")}
        rehearsal = " (rehearsal with tiny dimensions)" if part["tiny"] else ""
        sections += [f"{', '.join(facts.values())}{rehearsal}. {part['note']}".rstrip(), ""]
        sections += body(part)
    return "\n".join(sections) + "\n"


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [
        "| " + " | ".join(headings) + " |",
        "|" + "---|" * len(headings),
        *("| " + " | ".join(row) + " |" for row in rows),
    ]


def _us(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


_GAPS = {
    "waits for the gather": "the gather",
    "host": "the host, which enqueued the next kernel late",
    "device": "nothing: its own time between dependent kernels",
}


def _timeline(part: dict[str, Any]) -> list[str]:
    cases = part["cases"]
    headings = ["part, us"] + [_named(c) for c in cases]
    rows = [[name] + [_us(c["parts_us"][name]) for c in cases] for name in trace.PARTS]
    sums = [
        ("layer, slowest rank", [_us(c["layer_us"]) for c in cases]),
        ("slowest rank / mean", [f"{c['layer_us'] * c['ranks'] / sum(c['ranks_us']):.3f}" for c in cases]),
        ("small work (neither GEMM, indexer nor attention)", [f"{100 * _small(c) / _busy(c):.1f} %" for c in cases]),
        ("indexer + attention + small work", [_us(_small(c) + _both(c)) for c in cases]),
        ("idle between kernels", [_us(c["idle_us"]) for c in cases]),
        ("exposed part of the gather", [f"{100 * c['exposed_gather_us'] / _busy(c):.1f} %" for c in cases]),
    ]
    lines = [
        "Local rows x keys at the end of the chunk. A row is the median over 7 forwards of the kernels' time in the "
        'profiler\'s trace; "layer" is the median of event pairs without the profiler. Fast modes: `precision="f16"` '
        'of the indexer and `attention_precision="fp8"`, both declared and off by default.',
        "",
        "![time line](../../docs/pictures/layer_timeline.png)",
        "",
        *_table(headings, rows + [[name, *cells] for name, cells in sums]),
        "",
    ]
    reasons = [(c, why, [g for g in c["gaps"] if g["why"] == why]) for c in cases for why in _GAPS]
    rows = []
    for c, why, gaps in reasons:
        if gaps:
            most = max(gaps, key=lambda g: float(g["us"]))
            longest = f"{_us(most['us'])}, between {most['before']} and {most['after']}"
            rows.append([_named(c), _GAPS[why], str(len(gaps)), _us(sum(g["us"] for g in gaps)), longest])
    if not rows:
        return [*lines, "No gap of more than 3 us between two kernels in any of these traces."]
    return [
        *lines,
        "Gaps of more than 3 us between two kernels of the layer's own stream, in one forward each:",
        "",
        *_table(["case", "what the device waits for", "gaps", "us in all", "longest, us"], rows),
    ]


def _named(case: dict[str, Any]) -> str:
    fast = ", fast modes" if case.get("fast") else ""
    return f"{case['rows']} x {case['keys'] // 1024}K, S = {case['ranks']}{fast}"


def _small(case: dict[str, Any]) -> float:
    return float(sum(case["parts_us"][name] for name in trace.SMALL))


def _both(case: dict[str, Any]) -> float:
    return float(case["parts_us"][trace.INDEXER] + case["parts_us"][trace.ATTENTION])


def _busy(case: dict[str, Any]) -> float:
    return float(sum(us for name, us in case["parts_us"].items() if name != trace.GATHER))


def _host(part: dict[str, Any]) -> list[str]:
    rows = [
        ("plan (`prepare`)", f"{part['prepare_us']:.1f} us"),
        ("a layer, eager, host time", f"{part['layer_us']:.0f} us"),
        ("its GEMM and norm calls alone", f"{part['bare_calls_us']:.0f} us"),
        ("difference", f"{part['layer_us'] - part['bare_calls_us']:.0f} us"),
        (
            "the package's ops in it, each alone, launches included",
            ", ".join(f"`{name}` {us:.0f}" for name, us in part["ops_us"].items()) + " us",
        ),
        ("synchronisations in prepare + layers (any raises)", "none"),
    ]
    if "graph_step_us" in part:
        rows += [
            (f"decode step of {part['layers']} layers, eager", f"{part['eager_step_us']:.0f} us"),
            ("the same as one CUDA graph", f"{part['graph_step_us']:.0f} us"),
            ("host time of the next step: prepare, `copy_`, replay", f"{part['refill_and_replay_host_us']:.0f} us"),
            ("replays with other lengths, largest difference to eager", f"{part['graph_difference']:.2g}"),
        ]
    intro = f"{part['requests']} decoding requests of {part['keys']} keys; lowest deciles of five calls in a row."
    return [intro, "", *_table(["", ""], rows)]


def _compiled(part: dict[str, Any]) -> list[str]:
    on_device = "eager_graph_us" in part["times"][0]
    clocks = ["", "_graph"] if on_device else [""]
    rows = [
        (
            f"{t['kind']}, {t['rows']} rows",
            *(_us(t[f"{which}{clock}_us"]) for clock in clocks for which in ("eager", "compiled")),
            *(f"{t[f'eager{clock}_us'] / t[f'compiled{clock}_us']:.2f}x" for clock in clocks),
            f"{t['relative_difference']:.1e}",
        )
        for t in part["times"]
    ]
    headings = ["", "eager, us", "compiled, us"]
    if on_device:
        headings += ["device alone (CUDA graph): eager", "compiled", "gain", "gain on the device"]
    else:
        headings += ["gain"]
    return [
        f"`torch.compile(layer, fullgraph=True)` over {part['lengths']} lengths of at least 2: "
        f"{part['prefill_graphs']} graphs in prefill ({part['prefill_compile_s']:.0f} s to make), "
        f"{part['decode_graphs']} in decode ({part['decode_compile_s']:.0f} s).",
        "",
        *_table([*headings, "relative difference"], rows),
    ]


def _balance(part: dict[str, Any]) -> list[str]:
    keyed = {(r["batch"], r["ranks"], r["split"]): r for r in part["shares"]}
    sizes = sorted({r["ranks"] for r in part["shares"]})
    splits = list(dict.fromkeys(r["split"] for r in part["shares"]))
    rows = []
    for batch in dict.fromkeys(r["batch"] for r in part["shares"]):
        cells = [f"{keyed[batch, s, split]['slowest_over_mean']:.3f}" for s in sizes for split in splits]
        slowest = [f"{max(keyed[batch, s, split]['ranks_us']) / 1e3:.2f}" for s in sizes for split in splits]
        rows.append((batch, *(f"{cell} ({ms} ms)" for cell, ms in zip(cells, slowest, strict=True))))
    return [
        "Indexer + attention: slowest rank over mean of the ranks (time of the slowest).",
        "",
        "![balance](../../docs/pictures/layer_balance.png)",
        "",
        *_table(["batch", *(f"S = {s}, {split}" for s in sizes for split in splits)], rows),
    ]


def _break_even(part: dict[str, Any]) -> list[str]:
    lines = [
        "Layer time with S ranks (the last one's; the modelled gather runs beside it) and without, us, eager / device "
        "alone (CUDA graph):",
        "",
        "![break-even](../../docs/pictures/layer_break_even.png)",
        "",
    ]
    even = {(r["prefix"], r["new_tokens"], r["ranks"]): r for r in part["forwards"]}
    ranks = sorted({r["ranks"] for r in part["forwards"]})

    def cell(entry: dict[str, Any]) -> str:
        return _us(entry["eager_us"]) + (f" / {_us(entry['graph_us'])}" if "graph_us" in entry else "")

    pairs = dict.fromkeys((r["prefix"], r["new_tokens"]) for r in part["forwards"])
    return lines + _table(
        ["new tokens", "prefix", *("no ranks" if s == 1 else f"S = {s}" for s in ranks)],
        [(str(new), str(prefix), *(cell(even[prefix, new, s]) for s in ranks)) for prefix, new in pairs],
    )


def _memory(part: dict[str, Any]) -> list[str]:
    if not part["tensors"]:
        return [NOT_MEASURED.capitalize() + " (needs CUDA)."]

    def mib(value: int) -> str:
        return f"{value / 2**20:.1f}"

    rows = [
        (mib(t["bytes"]), mib(t["most_bytes"]), f"`{t['where']}`", f"`{t['line'].replace('|', ' ')}`")
        for t in part["tensors"]
        if t["most_bytes"] >= 2**20
    ]
    return [
        f"{part['rows']} local rows, {part['ranks']} ranks: {part['peak_bytes'] / 2**30:.2f} GiB at the peak, beside "
        "weights, cache, hidden states and the registered gather buffer. "
        "MiB alive at that moment, and at most at any moment, of every line of the package that has allocated at least "
        "1 MiB, workspaces of the ops included (the allocator's history):",
        "",
        *_table(["at the peak", "at most", "where", "line"], rows),
    ]


def _decode(part: dict[str, Any]) -> list[str]:
    keyed = {(s["requests"], s["mode"], s["ranks"]): s for s in part["steps"]}
    columns = list(dict.fromkeys((s["mode"], s["ranks"]) for s in part["steps"]))
    sizes = sorted({ranks for _, ranks in columns if ranks > 1})
    rows, fastest = [], []
    for requests in dict.fromkeys(s["requests"] for s in part["steps"]):
        entries = [keyed[requests, mode, ranks] for mode, ranks in columns]
        cells = [_us(e["step_us"]) + (f" ({_us(e['modelled_us'])})" if e["modelled_us"] else "") for e in entries]
        rows.append((str(requests), *cells))
        own = [[e for e in entries if e["ranks"] in (1, size)] for size in sizes]
        fastest.append((str(requests), *(min(of, key=lambda e: float(e["step_us"]))["mode"] for of in own)))
    return [
        f"One layer, one new token a request, {part['keys']} keys each, CUDA graph, us; in brackets the modelled "
        "communication that is in it (its table starts at 45 us, messages of 100 KB).",
        "",
        *_table(["requests", *(m if s == 1 else f"{m}, S = {s}" for m, s in columns)], rows),
        "",
        "Which mode to take, by these times:",
        "",
        *_table(["requests", *(f"S = {size}" for size in sizes)], fastest),
    ]


def _end_to_end(part: dict[str, Any]) -> list[str]:
    if "missing" in part:
        return [f"{NOT_MEASURED.capitalize()}: {part['missing']}"]

    def rate(of: dict[str, Any], name: str) -> str:
        return f"{of[name]['tokens_per_s']:.0f}" if name in of else NOT_MEASURED

    ours, theirs = part["ours"], part["transformers"]

    def gib(value: int | None) -> str:
        return NOT_MEASURED if value is None else f"{value / 2**30:.2f}"

    rows = [
        ("prefill, tokens/s", rate(ours, "prefill"), rate(theirs, "prefill")),
        ("prefill with a prefix hit, tokens/s", rate(ours, "prefill with a prefix hit"), "no reuse"),
        (f"{part['steps']} decode steps, tokens/s", rate(ours, "decode"), rate(theirs, "decode")),
        ("peak memory beside weights and our cache, GiB", gib(part["ours_bytes"]), gib(theirs.get("bytes"))),
    ]
    other = part.get("rows_with_other_experts")
    apart = (
        "rows that went to other experts, if any, are among them, and the bound does not cover those"
        if other is None
        else f"{other} rows, not in these figures, went to other experts"
    )
    lines = [
        f"Two layers (one dense, one with 8 experts), {part['tokens']} bytes of text as tokens, chunks of "
        f"{part['chunk']} (transformers: {theirs['chunk']}); the second prompt hits {part['prefix_hit']} cached "
        "tokens.",
        "",
        *_table(["", "SparseCpModel", "transformers eager"], rows),
        "",
        f"Logits after chunks, prefix hit and {part['steps']} teacher-forced steps against one forward over "
        f"everything: relative difference {part['relative_difference']:.2e}, largest of a step "
        f"{part['largest_step_difference']:.2e}, bound {part['bound']:.2e}; {apart}. The same first token in "
        f"{100 * part['same_first_token']:.0f} % of the steps.",
    ]
    if "does_not_fit" in theirs:
        lines += ["", f"transformers' eager attention did not fit: {theirs['does_not_fit']}"]
    return lines


_SECTIONS = {
    "timeline": ("Time line of a layer", _timeline),
    "host": ("Host cost and CUDA graphs", _host),
    "compiled": ("torch.compile", _compiled),
    "balance": ("Balance of the splits", _balance),
    "break_even": ("When context parallelism pays", _break_even),
    "memory": ("Memory of a layer", _memory),
    "decode": ("Decode: which head mode", _decode),
    "end_to_end": ("A transformers model end to end", _end_to_end),
}
