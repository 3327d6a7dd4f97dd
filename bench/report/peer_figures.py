"""What llama.cpp does on the GPU, for the tables beside our figures: from gpu_peer.py's result, or, while
there is none, from the figures of an older version that were written down by hand.
"""

from typing import Any

from bench.report.tables import has, load

ROWS_DEPTH = 512
MEASURED, WRITTEN = "gpu/peer", "gpu/peer_llama_cpp"


def peer_figures() -> dict[str, Any]:
    """`tok_s` by test, `partial` by the share of layers with experts on the GPU, and `depth` by depth;
    measured ones also have `rows` and `sequences` by that share: milliseconds of a step.
    """
    return figures_of(load(MEASURED)) if has(MEASURED) else load(WRITTEN)


def figures_of(result: dict[str, Any]) -> dict[str, Any]:
    """The result of gpu_peer.py in the shape of the older figures."""
    placements = {f"{each['resident_share']:.2g}": each for each in result["placements"]}
    version, ggml = result["llama_cpp"]["version"], result["llama_cpp"]["ggml"]
    figures: dict[str, Any] = {
        "source": f"llama.cpp {version} (ggml {ggml}), {result['date']}: `{result['command']}`",
        "gpu": result["machine"]["gpu"],
        "tok_s": {},
        "partial": {
            "decode_tok_s": decode_by_share(placements, 0),
            "decode_tok_s_at_8k": decode_by_share(placements, 8192),
            "prefill_tok_s_none_resident": {},
            "prefill_tok_s_2048": {},
        },
        "depth": {"fill_tok_s": {}, "last_chunk_ms": {}, "step_ms": {}},
        "sequences": {
            share: {str(each["sequences"]): each["step_ms"]["median"] for each in placement["sequences"]}
            for share, placement in placements.items()
        },
        "rows": {share: step_ms(placement, ROWS_DEPTH) for share, placement in placements.items()},
    }
    for share, placement in placements.items():
        prompts = {row["tokens"]: round(row["tok_s"]["median"]) for row in placement["prefill"]}
        if 2048 in prompts:
            figures["partial"]["prefill_tok_s_2048"][share] = prompts[2048]
        if share == "0":
            figures["partial"]["prefill_tok_s_none_resident"] = {str(n): rate for n, rate in prompts.items()}
        if share == "1":
            figures["tok_s"] = {f"pp{n}": rate for n, rate in prompts.items()}
            figures["tok_s"] |= decode_by_test(placement, result["generate"])
            figures["depth"] = by_depth(placement)
    return figures


def nearest(by_share: dict[str, Any], share: float) -> Any:
    """The figures of the placement with about that share of the experts on the GPU."""
    return by_share[min(by_share, key=lambda each: abs(float(each) - share))]


def step_ms(placement: dict[str, Any], depth: int) -> dict[str, float]:
    """Milliseconds of a step by its rows, behind so many tokens."""
    found = [row["step_ms"] for row in placement["depths"] if row["depth"] == depth and "step_ms" in row]
    return {count: step["median"] for steps in found for count, step in steps.items()}


def decode_by_share(placements: dict[str, dict[str, Any]], depth: int) -> dict[str, int]:
    return {
        share: round(row["decode_tok_s"]["median"])
        for share, placement in placements.items()
        for row in placement["depths"]
        if row["depth"] == depth and "decode_tok_s" in row
    }


def decode_by_test(placement: dict[str, Any], generated: int) -> dict[str, int]:
    """Under llama-bench's names."""
    rows = [row for row in placement["depths"] if "decode_tok_s" in row]
    names = [f"tg{generated}" + (f" @ d{row['depth']}" if row["depth"] else "") for row in rows]
    return {name: round(row["decode_tok_s"]["median"]) for name, row in zip(names, rows, strict=True)}


def by_depth(placement: dict[str, Any]) -> dict[str, dict[str, Any]]:
    rows = {str(row["depth"]): row for row in placement["depths"] if row["depth"]}
    return {
        "fill_tok_s": {depth: round(row["fill_tok_s"]) for depth, row in rows.items()},
        "last_chunk_ms": {depth: round(row["last_chunk_ms"]) for depth, row in rows.items()},
        "step_ms": {
            depth: {count: float(f"{step['median']:.3g}") for count, step in row["step_ms"].items()}
            for depth, row in rows.items()
            if "step_ms" in row
        },
    }
