"""The blocks on models of other families than Qwen's."""

from typing import Any

from bench.report.tables import Row, load, table

PROGRAMS = OURS, THEIRS = "coldstream", "llama.cpp"
BUDGETS = ("gpu/budgets_gpt_oss_20b", "gpu/budgets_laguna_xs")
PARTS_SHOWN = 3


def families_gpu() -> str:
    """Files of the shapes of other families on a GPU, beside llama.cpp within as much memory."""
    rows, sources = list[Row](), list[str]()
    for name in BUDGETS:
        r = load(name)
        by_budget: dict[str, dict[str, Any]] = {}
        for row in r["rows"]:
            by_budget.setdefault(row["budget"], {})[row["side"]] = row["figures"]
        for budget, by_program in by_budget.items():
            for figure in by_program[OURS]:
                ours, theirs = (
                    by_program[program][figure]["tok_s"] if program in by_program else None
                    for program in PROGRAMS
                )
                what = "decode" if figure == "decode" else f"prompt of {int(figure):,}"
                ratio = ["–", "–"] if theirs is None else [f"{theirs:,.0f}", f"{ours / theirs:.2f}×"]
                rows.append([r["model"].split(",")[0], budget, what, f"**{ours:,.0f}**", *ratio])
        sources.append(f"{r['machine']['gpu']}, commit {r['commit']}: `{r['command']}`")
    header = ["file", "memory of the GPU", "what", "tok/s", "llama.cpp", "ratio"]
    return table(header, rows) + "\n" + "\n\n".join(sources) + "\n"


def families_cpu() -> str:
    """Parts of files of other families on two cores, beside the better of two programs in each case."""
    r = load("family_speed")
    rows = list[Row]()
    for name, found in r["models"].items():
        cells = list[str]()
        for case in found["cases"].values():
            peer = case["better_peer"]
            ratio = case["ratios"][peer]
            low, high = ratio["interval"]
            cells.append(
                f"**{case['tok_s']['ours']:,.0f}**, {ratio['median']:.2f}× {peer} ({low:.2f}–{high:.2f})"
            )
        layers = f"{found['layers']} layers, {found['experts']} experts"
        rows.append([name, layers, found["mix"], *cells])
    cases = next(iter(r["models"].values()))["cases"]
    header = ["shape", "part", "types", *(f"{case}, tok/s, over the better" for case in cases)]
    source = f"{r['machine']['cpu_name']}, {r['threads']} threads, commit {r['commit']}: `{r['command']}`"
    return table(header, rows) + f"\n{source}\n"


def families_agreement() -> str:
    """Choices beside llama.cpp's, and with a part of the family left out."""
    r = load("agreement_families")
    rows = list[Row]()
    for name, found in r["models"].items():
        worst = sorted(found["without"], key=lambda each: each["clear_top1_agreement"])[:PARTS_SHOWN]
        parts = [f"{each['part']} {each['clear_top1_agreement']:.1%}" for each in worst]
        rows.append(
            [
                name,
                found["mix"],
                f"{found['positions']:,}",
                f"{found['top1_agreement']:.2%}",
                f"{found['clear_positions']:,}",
                f"{found['clear_top1_agreement']:.2%}",
                "; ".join(parts),
            ]
        )
    header = ["shape", "types", "positions", "same choice", "clear positions", "same choice there"]
    source = f"llama.cpp of xllamacpp {r['xllamacpp']}, commit {r['commit']}: `{r['command']}`"
    return table([*header, "the same without a part"], rows) + f"\n{source}\n"
