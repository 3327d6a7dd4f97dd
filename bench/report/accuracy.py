"""The loss of accuracy by roundings: tables of `python -m bench.report`."""

from collections.abc import Mapping, Sequence
from typing import Any

from bench.report.tables import Row, load, table

MOST_OF_LLAMA_CPP = 1.1  # times its divergence
MOST_LOSS = 1e-5  # of perplexity, with the default types of keys and values
MOST_DISTANCES = {"i16": 0.003, "i8": 0.0143}  # of logits, by type


def kv_types() -> str:
    """The loss by each type of keys and values: the demo model on held-out text, and single heads."""
    r = load("kv_types")
    text = [
        [
            name,
            f"{figures['bits_per_value']:.0f}",
            f"{figures['perplexity']:.4f}",
            f"{100 * figures['loss']:+.4f} % ± {100 * figures['loss_standard_error']:.4f}",
            f"{figures['logit_distance']:.5f}",
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
    heads: list[Row] = [[name, *(f"{case['error'][name]:.1e}" for case in r["heads"])] for name in r["types"]]
    size = f"{r['scored_tokens']:,} tokens in windows of {r['window_tokens']}, heads of {r['head_dim']}"
    lines = [
        f"{size}: `{r['command']}`. Errors of single heads with two channels that are greater by a factor:",
        "",
        table([header[0], *(_case(case) for case in r["heads"])], heads),
        f"The root mean square over {r['seeds']} heads.",
        *kv_targets(r),
    ]
    return table(header, text) + "\n" + "\n".join(lines) + "\n"


def agreement_by_architecture() -> str:
    """Choices and logits of small random models beside llama.cpp's, and two measures of a difference."""
    rows: list[Row] = []
    lines = []
    for arch in ("qwen3moe", "qwen3next"):
        r = load(f"agreement_{arch}")
        rows += [
            [
                f"`{arch}`",
                row["of"],
                row["and"],
                f"{100 * row['top1_agreement']:.2f} %",
                f"{100 * row['clear_top1_agreement']:.2f} %",
                f"{row['logit_distance']:.4f}",
            ]
            for row in r["rows"]
        ]
        lines.append(
            f"`{arch}`: {r['positions']:,} positions; in {r['clear_positions']} of them llama.cpp's two best "
            f"logits are more than {r['clear_gap']} apart, in half of all more than {r['median_gap']:.2f}: "
            f"`{r['command']}`, commit {r['commit']}"
        )
    header = ["model", "logits of", "and of", "same most likely token", "where it is clear", "distance"]
    return table(header, rows) + "".join(f"\n{line}\n" for line in lines)


def key_sweep() -> str:
    """What became of each key of metadata, and which keys matter to one of the two programs."""
    r = load("key_sweep")
    kinds = ("alike", "refused", "llama.cpp refuses", "different")
    rows: list[Row] = [
        [f"`{arch}`", str(figures["settings"]), *(str(figures["outcomes"].get(kind, 0)) for kind in kinds)]
        for arch, figures in r["architectures"].items()
    ]
    keys: dict[str, set[str]] = {"alike": set(), "refused": set()}
    for figures in r["architectures"].values():
        for result in figures["effects"]:
            keys.setdefault(result["outcome"], set()).add(f"`{result['key']}`")
    furthest = max(figures["largest_difference_alike"] for figures in r["architectures"].values())
    header = ["model", "settings", "logits alike", "refused by name", "llama.cpp refuses", "different"]
    return table(header, rows) + (
        f"\n{len(r['keys'])} keys: `{r['command']}`, commit {r['commit']}, xllamacpp {r['xllamacpp']}. "
        f"Logits that are alike differ by {furthest:.0e} at most.\n\n"
        f"Followed, as they change llama.cpp's logits: {', '.join(sorted(keys['alike']))}.\n\n"
        f"Refused for some of their values: {', '.join(sorted(keys['refused']))}.\n"
    )


def _case(case: Mapping[str, Any]) -> str:
    factor = case["outliers"]
    return f"{case['head_dim']} × {factor}" if factor > 1 else f"{case['head_dim']}, plain"


def kv_targets(result: Mapping[str, Any]) -> list[str]:
    """What types of keys and values should keep to, and whether they do: lines."""
    types, heads = result["types"], result["heads"]
    far = {
        name: ["distance"] if types[name]["logit_distance"] > most else []
        for name, most in MOST_DISTANCES.items()
    }
    lost = ["perplexity"] if abs(types["i16"]["loss"]) > MOST_LOSS else []
    further = ["text"] if types["i16"]["logit_distance"] > types["f16"]["logit_distance"] else []
    further += [f"heads of {_case(case)}" for case in heads if case["error"]["i16"] > case["error"]["f16"]]
    near = f"logits of `i16` at most {MOST_DISTANCES['i16']} from those of `f32`"
    return [
        target(f"{near}, perplexity within {100 * MOST_LOSS:.3f} %", lost + far["i16"]),
        target("`i16` no further from `f32` than `f16` is", further),
        target(f"logits of `i8` at most {MOST_DISTANCES['i8']} from those of `f32`", far["i8"]),
    ]


def activation_scales() -> str:
    """Divergence from float activations, ours beside llama.cpp's, plain and with outliers."""
    r = load("activation_scales")
    factors = sorted({row["outliers"] for row in r["rows"]})
    found = {(row["type"], row["outliers"]): row for row in r["rows"]}
    rows = []
    for name, size in dict.fromkeys((row["type"], row["scale_inputs"]) for row in r["rows"]):
        rows.append([name, str(size), *(_divergences(found.get((name, factor))) for factor in factors)])
    header = ["weights", "inputs to a scale"]
    header += ["plain" if factor == 1 else f"{r['channels']} channels × {factor}" for factor in factors]
    rounded = [row for row in r["rows"] if "ratio" in row]
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


def _divergences(case: Mapping[str, Any] | None) -> str:
    """Both, their ratio and its interval; a dash for what was not measured."""
    if case is None:
        return "–"
    if "ratio" not in case:
        return f"{case['ours']:.1e} / –"
    interval = f"{case['ratio_low']:.2f}–{case['ratio_high']:.2f}"
    return f"{case['ours']:.1e} / {case['llama_cpp']:.1e} = {case['ratio']:.2f} ({interval})"


def target(wanted: str, missed: Sequence[str]) -> str:
    """A target, and whether it is met."""
    return f"Target: {wanted}: " + (f"missed by {', '.join(missed)}." if missed else "met.")
