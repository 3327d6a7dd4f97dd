"""The block on weight types: speeds on a CPU beside llama.cpp and ik_llama.cpp, by type."""

from collections.abc import Mapping, Sequence
from typing import Any

from bench.report.tables import Row, load, table

RESULTS = ("cpu_types", "cpu_types_avx2", "cpu_types_beside", "cpu_types_avx2_beside")
MODELS = {"cut": "35B shape, 4 layers, experts in", "small": "small model, all in"}


def weight_types(names: Sequence[str] = RESULTS) -> str:
    """A table per model of each result, and where they come from."""
    parts = []
    for name in names:
        result = load(name)
        parts += [one_model(result, model) for model in result["models"] if result["models"][model]]
        peers = ", ".join(f"{peer} {about['version']}" for peer, about in result["peers"].items())
        machine = f"{result['machine']['cpu_name']}, {result['threads']} threads, tier {result['tier']}"
        parts.append(f"{machine}, commit {result['commit']}, {peers}: `{result['command']}`\n")
    return "\n".join(parts)


def one_model(result: Mapping[str, Any], model: str) -> str:
    """A row for each type: speeds of all programs, and ours over the better of the others."""
    types = result["models"][model]
    cases = list(next(iter(types.values()))["cases"])
    programs = ["ours", *result["peers"]]
    header = [MODELS[model]]
    for case in cases:
        header += [f"{case}, tok/s: {' / '.join(programs)}", "ours over the better"]
    rows = [row_of(kind, found, cases, programs) for kind, found in types.items()]
    return table([*header, "share of RAM's bandwidth in decode"], rows)


def row_of(kind: str, found: Mapping[str, Any], cases: Sequence[str], programs: Sequence[str]) -> Row:
    """One type; a dash for a program that refuses it."""
    row = [kind]
    for name in cases:
        case = found["cases"][name]
        speeds = (f"{case['tok_s'][each]:,.0f}" if each in case["tok_s"] else "–" for each in programs)
        row.append(" / ".join(speeds))
        better = case["better_peer"]
        row.append(ratio_text(case["ratios"][better]) if better else "–")
    shares = found["share_of_bandwidth"]
    row.append(" / ".join(f"{shares[each]:.0%}" if each in shares else "–" for each in programs))
    return row


def ratio_text(ratio: Mapping[str, Any]) -> str:
    """A ratio and its interval."""
    low, high = ratio["interval"]
    return f"{ratio['median']:.2f}× ({low:.2f}–{high:.2f})"
