"""The first tables of the page of performance: what a card does with the full-size model."""

from typing import Any

from bench.report.partial import decode_tok_s
from bench.report.peer_figures import peer_figures
from bench.report.tables import Row, load, table

GIB = 2**30
SAME_SHARE = 0.03  # of two runs that have about as many experts on the GPU
PROMPTS = (512, 2048, 8192)  # tokens
PROMPT_RESULTS = ("streaming_guess", "streaming_shared", "streaming")  # of none, 3 GiB, and the others


def cards_decode() -> str:
    """Decoding by the memory of the card, on three machines, each beside llama.cpp there."""
    machines = [
        (load("gpu/hybrid_ahead"), _shares(peer_figures()["partial"]["decode_tok_s"])),
        *(
            (load(f"gpu/desktop_hybrid{suffix}"), _decode(load(f"gpu/desktop_peer{suffix}")))
            for suffix in ("", "_slow_bus")
        ),
    ]
    header = ["memory of the GPU", "experts on it"]
    for result, _ in machines:
        ram, link = result["hardware"]["read_bytes_per_s"], result["hardware"]["gpu"]["link_bytes_per_s"]
        rates = f"RAM {ram / 1e9:.0f} GB/s, bus {link / 1e9:.0f} GB/s"
        header += [f"{result['machine']['cores']} cores, {rates}: tok/s", "llama.cpp"]
    rows: list[Row] = []
    for first in machines[0][0]["rows"]:
        share = first["experts_share"]
        row = [f"{first['vram_bytes'] / GIB:.0f} GiB", f"{share:.0%}"]
        for result, peer in machines:
            (ours,) = [each for each in result["rows"] if abs(each["experts_share"] - share) < SAME_SHARE]
            theirs = [rate for each, rate in peer.items() if abs(each - share) < SAME_SHARE]
            row += [f"**{ours['tok_s']:.0f}**", f"{theirs[0]:.0f}" if theirs else ""]
        rows.append(row)
    gpu = machines[0][0]["machine"]["gpu"]
    commits = ", ".join(dict.fromkeys(result["commit"] for result, _ in machines))
    return table(header, rows) + f"\n{gpu}, commits {commits}: `{machines[0][0]['command']}`\n"


def cards_prompts() -> str:
    """Prompts by the memory that experts have on the card, on the machine with sixteen cores."""
    ours, peer = prompts(), peer_figures()
    theirs = {0: peer["partial"]["prefill_tok_s_none_resident"]}
    theirs[None] = {str(tokens): peer["tok_s"][f"pp{tokens}"] for tokens in PROMPTS}
    rows: list[Row] = []
    for gib, rates in ours.items():
        row = ["all" if gib is None else f"{gib} GiB"]
        for tokens in PROMPTS:
            row += [f"**{rates[tokens]:,.0f}**", f"{theirs[gib][str(tokens)]:,}" if gib in theirs else ""]
        rows.append(row)
    header = ["experts on the GPU"]
    for tokens in PROMPTS:
        header += [f"{tokens:,} tokens: tok/s", "llama.cpp"]
    results = [load(f"gpu/{name}") for name in PROMPT_RESULTS]
    streamed = results[0]
    machine, commits = streamed["machine"], ", ".join(r["commit"] for r in results)
    where = f"{machine['gpu']}, {machine['cores']} cores, commits {commits}"
    return table(header, rows) + f"\n{where}: `{streamed['command']}`\n"


def prompts() -> dict[int | None, dict[int, float]]:
    """Tokens a second by the length of the prompt, by GiB of experts on the GPU; None: all.

    The newest figures, which are of none; those of 3 GiB and of the others are of older commits.
    """
    newest, shared, older = (load(f"gpu/{name}") for name in PROMPT_RESULTS)
    return {
        gib: {row["tokens"]: row["tok_s"] for row in result["rows"] if row["experts_gib"] == gib}
        for gib, result in ((0, newest), (3, shared), (10, older), (None, older))
    }


def _shares(by_share: dict[str, Any]) -> dict[float, float]:
    return {float(share): float(rate) for share, rate in by_share.items()}


def _decode(peer: dict[str, Any]) -> dict[float, float]:
    return {float(each["resident_share"]): decode_tok_s(each) for each in peer["placements"]}
