"""The blocks on mixes of the full-size file: on a GPU beside llama.cpp, and beside the plan's forecasts."""

from collections.abc import Mapping, Sequence
from typing import Any

from bench.report.tables import Row, has, load, table
from coldstream.planning.config import parse_size

PROMPTS = ("512", "2048")


def gpu_mixes() -> str:
    """Every mix with all of its experts on the GPU, some, or none; beside llama.cpp where it was measured."""
    result = load("gpu/mixes")
    rows = []
    for name, mix in result["mixes"].items():
        placements = load(f"gpu/peer_{name}")["placements"] if has(f"gpu/peer_{name}") else []
        for row in mix["rows"]:
            placement = nearest(placements, row["experts_share"]) if placements else None
            first = [
                name,
                f"{mix['file_bytes'] / 1e9:.1f}",
                memory(row["budget"]),
                f"{row['experts_share']:.0%}",
            ]
            rows.append([*first, *figures(row, placement), forecasts(row)])
    header = ["mix", "GB", "memory of the GPU", "experts on it", "decode: ours, llama.cpp, ratio"]
    header += [f"prompt of {length}" for length in PROMPTS]
    where = f"{result['machine']['gpu']}, {result['machine']['cores']} cores, commit {result['commit']}"
    others = [(name, mix["commit"]) for name, mix in result["mixes"].items() if "commit" in mix]
    others += [
        (f"{name} with {row['budget']}", row["commit"])
        for name, mix in result["mixes"].items()
        for row in mix["rows"]
        if "commit" in row
    ]
    listed = ", ".join(f"{what} {commit}" for what, commit in others)
    commands = f"\n{where}: `{result['command']}`, and so for each mix with its memory."
    commands += f" Other commits: {listed}." if others else ""
    return table([*header, "forecast over measured"], rows) + commands + "\n"


def memory(budget: int | str) -> str:
    """A budget of the GPU's memory in MiB, or `auto`."""
    return budget if budget == "auto" else f"{parse_size(str(budget)) / 2**20:,.0f} MiB"


def desktop_mix() -> str:
    """A mix on few cores and a slow bus, by budget, beside llama.cpp at the most layers that fit into it."""
    result, peer = load("gpu/desktop_mix"), load("gpu/desktop_mix_peer")
    rows = []
    for name, mix in result["mixes"].items():
        for row in mix["rows"]:
            placement = fitting(peer, parse_size(row["budget"]))
            share = f"{row['experts_share']:.0%}, llama.cpp {placement['resident_share']:.0%}"
            rows.append([name, row["budget"], share, *figures(row, placement)])
    header = ["mix", "memory of the GPU", "experts on it", "decode: ours, llama.cpp, ratio"]
    header += [f"prompt of {length}" for length in PROMPTS]
    where = f"{result['machine']['gpu']}, commit {result['commit']}"
    return table(header, rows) + f"\n{where}: `{result['command']}`, and `{peer['command']}`\n"


def nearest(placements: Sequence[dict[str, Any]], share: float) -> dict[str, Any]:
    """llama.cpp's placement with about that share of the experts on the GPU."""
    return min(placements, key=lambda each: abs(each["resident_share"] - share))


def fitting(peer: Mapping[str, Any], budget: int) -> dict[str, Any]:
    """llama.cpp's placement with the most experts on the GPU that takes no more than `budget`.

    Raises ValueError if none does.
    """
    before = peer["gpu_memory_before_bytes"]
    fit = [each for each in peer["placements"] if each["gpu_memory_used_bytes"] - before <= budget]
    if not fit:
        raise ValueError(
            f"no placement of llama.cpp fits into {budget} bytes: measure more layers on the CPU"
        )
    return max(fit, key=lambda each: each["resident_share"])


def figures(row: Mapping[str, Any], placement: Mapping[str, Any] | None) -> Row:
    """Decoding and prompts, in tokens a second: ours, llama.cpp's, and the ratio."""
    theirs = {} if placement is None else speeds(placement)
    return [beside(row["figures"][name]["measured_tok_s"], theirs.get(name)) for name in ("decode", *PROMPTS)]


def over_llama_cpp(mix: str, row: Mapping[str, Any], case: str) -> float:
    """A figure of a mix over llama.cpp's with the nearest share of the experts on the GPU."""
    placement = nearest(load(f"gpu/peer_{mix}")["placements"], row["experts_share"])
    return float(row["figures"][case]["measured_tok_s"] / speeds(placement)[case])


def speeds(placement: Mapping[str, Any]) -> dict[str, float]:
    """llama.cpp's decoding, and its prompts by their length."""
    prompts = {str(each["tokens"]): each["tok_s"]["median"] for each in placement["prefill"]}
    return {"decode": placement["depths"][0]["decode_tok_s"]["median"], **prompts}


def beside(ours: float, theirs: float | None) -> str:
    """Two speeds and their ratio; a dash where the other was not measured."""
    return (
        f"**{ours:,.0f}**, –" if theirs is None else f"**{ours:,.0f}**, {theirs:,.0f}, {ours / theirs:.1f}×"
    )


def forecasts(row: Mapping[str, Any]) -> str:
    """The plan's forecasts over what was measured, of decoding and then of prompts."""
    return ", ".join(f"{both['ratio']:.2f}" for both in row["figures"].values())
