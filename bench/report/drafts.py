"""The figures of drafts."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from bench.report.tables import has, load, table

DRAFTERS = ("mtp", "dflash", "ngram")

Way = Mapping[str, Any]


EQUALITY = (
    *("draft_equality", "draft_equality_disk"),
    *(f"gpu/draft_equality{which}" for which in ("", "_partial", "_dflash", "_dflash_partial")),
    *(f"gpu/draft_equality_random{which}" for which in ("", "_partial")),
)


def _of(ways: Sequence[Way], drafter: str) -> tuple[Way, Way]:
    """The best fixed size of a drafter, and the sizes by cost."""
    fixed = [way for way in ways if way["drafter"] == drafter and way["budget"] != "auto"]
    auto = next(way for way in ways if way["drafter"] == drafter and way["budget"] == "auto")
    return max(fixed, key=lambda way: float(way["ratio"])), auto


def cpu_drafts() -> str:
    """By kind of text: the best fixed size of each drafter, and the sizes that it chooses itself."""
    r = load("cpu_speculation")
    header = ["text", "sampling", "none, tok/s"]
    for drafter in DRAFTERS:
        header += [f"{drafter}, best size", f"{drafter}, by cost"]
    rows = []
    by_cost: dict[str, list[float]] = {"none, again": [], **{drafter: [] for drafter in DRAFTERS}}
    for each in r["results"]:
        plain = next(way for way in each["ways"] if way["drafter"] == "none")
        by_cost["none, again"].append(plain["ratio"])
        row = [each["kind"], each["sampling"], f"{plain['tok_s']:.0f}"]
        for drafter in DRAFTERS:
            best, auto = _of(each["ways"], drafter)
            by_cost[drafter].append(auto["ratio"])
            row.append(
                f"{best['ratio']:.2f}× ({best['budget']}: {best['tokens_per_step']:.2f} tokens a step)"
            )
            row.append(f"{auto['ratio']:.2f}×")
        rows.append(row)
    spread = ", ".join(
        f"{name} {fmean(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})"
        for name, ratios in by_cost.items()
    )
    conditions = (
        f"{r['texts']} texts of each kind, {r['new_tokens']} tokens each, {r['threads']} threads, "
        f"{r['tier']}, {r['cpu']}, commit {r['commit']}: `{r['command']}`"
    )
    means = f"By cost, the mean of all rows (min–max): {spread}."
    return table(header, rows) + f"\n{means}\n\n{conditions}\n"


def cpu_drafts_by_size() -> str:
    """Tokens a step and speed of every size on code, greedily."""
    r = load("cpu_speculation")
    ways = next(
        each["ways"] for each in r["results"] if (each["kind"], each["sampling"]) == ("code", "greedy")
    )
    header = ["nodes", *(f"{drafter}, {what}" for drafter in DRAFTERS for what in ("tokens a step", "speed"))]
    found = {(way["drafter"], way["budget"]): way for way in ways}
    budgets = [budget for drafter, budget in found if drafter == DRAFTERS[0]]
    rows = []
    for budget in budgets:
        row = ["by cost" if budget == "auto" else str(budget)]
        for drafter in DRAFTERS:
            way = found[drafter, budget]
            row += [f"{way['tokens_per_step']:.2f}", f"{way['ratio']:.2f}×"]
        rows.append(row)
    return table(header, rows)


def cpu_shallow_drafts() -> str:
    """Of the full-size model with few layers, and of the demo model: speeds over no drafts."""
    results = [load("cpu_shallow_drafts"), load("cpu_deep_drafts")]
    header = ["model", "accepted", "nodes", "tokens a step", "speed by CPU time", "by the clock"]
    rows = []
    for case in (case for r in results for case in r["cases"]):
        _, *ways, _ = case["ways"]
        accepted = "its own" if case["accepted"] is None else ", ".join(f"{a:.0%}" for a in case["accepted"])
        for way in ways:
            name = "by cost" if way["budget"] == "auto" else str(way["budget"])
            speed, by_clock = (
                f"{way[f'{kind}_ratio']:.2f} ({low:.2f}–{high:.2f})"
                for kind, (low, high) in ((kind, way[f"{kind}_interval"]) for kind in ("cpu", "wall"))
            )
            rows.append([case["name"], accepted, name, f"{way['tokens_per_step']:.2f}", speed, by_clock])
    conditions = "\n\n".join(
        f"Texts: {r['texts']} of {r['tokens']} tokens, threads: {r['machine']['threads']}, "
        f"{r['cases'][0]['tier']}, {r['machine']['cpu']}, commit {r['commit']}: `{r['command']}`"
        for r in results
    )
    return table(header, rows) + f"\n{conditions}\n"


def demo_drafter() -> str:
    """Tokens a step of the demo model by size of draft, and how often each depth is right, by drafter."""
    r = load("demo_drafter")
    found: dict[tuple[str, str], dict[str, Way]] = {}
    for way in r["results"]:
        found.setdefault((way["sampling"], way["drafter"]), {})[f"{way['shape']} of {way['nodes']}"] = way
    shapes = list(next(iter(found.values())))
    longest = max((shape for shape in shapes if shape.startswith("chain")), key=lambda s: int(s.split()[-1]))
    depths = range(int(longest.split()[-1]))
    sizes, right = [], []
    for key, ways in found.items():
        sizes.append([*key, *(f"{ways[shape]['tokens_per_step']:.2f}" for shape in shapes)])
        shares = dict(enumerate(ways[longest]["accepted_by_depth"]))
        right.append([*key, *(f"{shares.get(depth, 0):.0%}" for depth in depths)])
    conditions = (
        f"{r['held_out_files']} held-out files, {r['new_tokens']} tokens after a piece of each; the drafter "
        f"has {r['bytes']:,} bytes: `{r['command']}`"
    )
    return (
        table(["sampling", "tokens a step by", *shapes], sizes)
        + f"\nAlong a {longest}, the share of steps in which as many tokens and more are right:\n\n"
        + table(["sampling", "drafter", *(str(1 + depth) for depth in depths)], right)
        + f"\n{conditions}\n"
    )


def speeds(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """By row of a cell: how many times as fast as none it is, the median over its texts.

    Each text is compared with itself without drafts, timed twice around it: texts differ, and a machine's
    memory is faster at times.
    """
    none = [row["texts"] for row in rows if row["budget"] == 0]
    plain = [fmean(text["seconds"] for text in same) for same in zip(*none, strict=True)]
    return [
        median(one / text["seconds"] for one, text in zip(plain, row["texts"], strict=True)) for row in rows
    ]


def gpu_drafts() -> str:
    """Of the model's own block."""
    return _gpu_drafts("gpu/speculation")


def gpu_drafts_dflash() -> str:
    """Of a DFlash 2 drafter."""
    return _gpu_drafts("gpu/speculation_dflash")


def _gpu_drafts(name: str) -> str:
    """Without drafts, by every size, and by cost; by memory for experts."""
    r = load(name)
    header = ["experts on the GPU", "nodes", "tok/s", "speed"]
    header += ["tokens a step", "drafting, ms", "step, ms"]
    rows = []
    for cell in r["cells"]:
        where = "all" if cell["experts_gib"] is None else f"{cell['experts_gib']:.1f} GiB"
        for row, speed in list(zip(cell["rows"], speeds(cell["rows"]), strict=True))[:-1]:
            last = row["texts"][-1]
            name = {0: "none", "auto": "by cost"}.get(row["budget"], str(row["budget"]))
            name += ", by the device" if row.get("by") == "device" else ""
            found = [
                f"{last[key]:.2f}" for key in ("tokens_per_step", "draft_ms", "verify_ms") if key in last
            ]
            figures = (f"{row['tok_s']:.0f}", f"{speed:.2f}×", *(found or ["1.00", "", ""]))
            rows.append([where, name, *figures])
    accepted = ", ".join(f"{share:.0%}" for share in r["accepted"])
    where = f"{r['machine']['gpu']}, commit {r['commit']}: `{r['command']}`"
    conditions = f"Accepted at depths 1 to {len(r['accepted'])}: {accepted}. {where}"
    return table(header, rows) + f"\n{conditions}\n"


def draft_equality() -> str:
    """Answers with drafts that are those without, of all, by what drafted and where the model was."""
    found = [load(name) for name in EQUALITY if has(name)]
    rows = []
    for kind in sorted({pair["kind"] for r in found for pair in r["pairs"]}):
        row = [kind]
        for r in found:
            those = [pair for pair in r["pairs"] if pair["kind"] == kind]
            answers, equal = (sum(pair[name] for pair in those) for name in ("answers", "equal"))
            row.append(f"{equal} of {answers}" if answers else "")
        rows.append(row)
    rows.append(["all", *(f"{r['equal']} of {r['answers']}" for r in found)])
    header = ["drafts"]
    header += [" ".join(filter(None, (Path(r["model"]).stem, r["tier"], r.get("memory")))) for r in found]
    lines = [
        f"{r['model']}, {r['cpu']}, {r['tokens']} tokens an answer, commit {r['commit']}: `{r['command']}`"
        for r in found
    ]
    return table(header, rows) + "".join(f"\n{line}\n" for line in lines)
