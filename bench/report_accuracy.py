"""What roundings cost in accuracy: tables of `report.py`."""

from collections.abc import Sequence

from report_tables import load, table

MOST_OF_LLAMA_CPP = 1.1  # times its divergence


def kv_types() -> str:
    """What each type of keys and values costs the demo model on held-out text."""
    r = load("kv_types")
    rows = [
        [
            name,
            f"{figures['bits_per_value']:.0f}",
            f"{figures['perplexity']:.4f}",
            f"{100 * figures['loss']:+.3f} % ± {100 * figures['loss_standard_error']:.3f}",
            f"{figures['logit_distance']:.4f}",
            f"{100 * figures['same_top1']:.2f} %",
        ]
        for name, figures in r["types"].items()
    ]
    header = [
        "keys and values",
        "bits a value",
        "perplexity",
        "above f32",
        "distance of logits",
        "same top token",
    ]
    size = f"{r['scored_tokens']:,} tokens in windows of {r['window_tokens']}, heads of {r['head_dim']}"
    return table(header, rows) + f"\n{size}: `{r['command']}`\n"


def activation_scales() -> str:
    """Divergence from float activations, ours beside llama.cpp's, plain and with outliers."""
    r = load("activation_scales")
    factors = sorted({row["outliers"] for row in r["rows"]})
    found = {(row["type"], row["outliers"]): row for row in r["rows"]}
    rows = []
    for name, size in dict.fromkeys((row["type"], row["scale_inputs"]) for row in r["rows"]):
        cases = [found[name, factor] for factor in factors]
        figures = [
            f"{case['ours']:.1e} / {case['llama_cpp']:.1e} = {case['ratio']:.2f} "
            f"({case['ratio_low']:.2f}–{case['ratio_high']:.2f})"
            if size
            else f"– / {case['llama_cpp']:.1e}"
            for case in cases
        ]
        rows.append([name, str(size or "float32"), *figures])
    header = ["weights", "inputs to a scale"]
    header += ["plain" if factor == 1 else f"{r['channels']} channels × {factor}" for factor in factors]
    rounded = [row for row in r["rows"] if row["scale_inputs"]]
    missed = [f"{row['type']} × {row['outliers']}" for row in rounded if row["ratio"] > MOST_OF_LLAMA_CPP]
    counts = {row["outliers"]: row["passages"] for row in rounded}
    plain, *others = (counts[factor] for factor in factors)
    alone = [row for row in rounded if row["outliers"] == factors[0]]
    low = min(row["passage_ratio_low"] for row in alone)
    high = max(row["passage_ratio_high"] for row in alone)
    lines = [
        "KL in nats, coldstream's / llama.cpp's, their ratio and its interval of 95 %, over "
        f"{plain} passages of {r['positions']} tokens, with outliers {max(others)}: `{r['command']}`.",
        f"Single passages without outliers have ratios from {low:.1f} to {high:.1f}.",
        target(f"at most {MOST_OF_LLAMA_CPP} times llama.cpp's", missed),
    ]
    return table(header, rows) + "\n" + "\n".join(lines) + "\n"


def target(wanted: str, missed: Sequence[str]) -> str:
    """A target, and whether it is met."""
    return f"Target: {wanted}: " + (f"missed by {', '.join(missed)}." if missed else "met.")
