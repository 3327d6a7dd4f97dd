"""The block on residents of a plan, in RAM and on a GPU."""

import statistics

from bench.report.tables import Row, has, load, table

RESULTS = ("planned_residents", "gpu/planned_residents")
BEGINS = {
    ("cpu", "kept"): "with the plan's residents",
    ("cpu", "forgotten"): "empty",
    ("cuda", "kept"): "with the plan's residents",
    ("cuda", "forgotten"): "with them, and nothing is expected",
    ("cuda", "unprofiled"): "with those of a plan without a profile",
}


def planned_residents() -> str:
    """Hits and speed with the plan's residents and without; nothing while it isn't measured."""
    results = [load(name) for name in RESULTS if has(name)]
    if not results:
        return ""
    rows: list[Row] = []
    lines = []
    for r in results:
        memory = f"{r['experts_bytes'] / 2**20:,.0f} MiB ({r['experts_share']:.0%})"
        memory = f"{'a GPU' if r['device'] == 'cuda' else 'RAM'}, {memory}"
        for row in r["rows"]:
            ratios = row["kept_ratios"]
            spread = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}–{ratios[-1]:.2f})"
            rows.append(
                [
                    memory,
                    BEGINS[r["device"], row["way"]],
                    f"{row['first_hit_rate']:.1%}",
                    f"{row['hit_rate']:.1%}",
                    f"{row['tok_s']:.0f}",
                    "" if row["way"] == "kept" else spread,
                ]
            )
        machine = r["machine"].get("gpu", r["machine"]["cpu"])
        lines.append(
            f"{r['model']}, {r['texts']} texts, a profile of {r['profile_tokens']:,} tokens; {machine}, "
            f"{r['threads']} threads, commit {r['commit']}: `{r['command']}`"
        )
    first, all_tokens = (results[0][name] for name in ("first_tokens", "tokens"))
    header = ["experts in", "slots begin", f"hits, first {first} tokens", f"hits, {all_tokens} tokens"]
    header += ["tok/s", "residents kept : this (least–most)"]
    return table(header, rows) + "".join(f"\n{line}\n" for line in lines)
