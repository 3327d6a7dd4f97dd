"""The tables of README.md."""

from bench.report.cards import PROMPT_RESULTS, prompts
from bench.report.gpu_mixes import fitting, speeds
from bench.report.peer_figures import peer_figures
from bench.report.tables import load, table
from coldstream.planning.config import parse_size

PROMPT = 2048  # tokens
# GiB of experts on the GPU, of decoding and of a prompt, and the share of layers whose experts llama.cpp has
# there with about as much.
SIZES = ((0, 0, "0"), (3, 3, "0.15"), (10.67, 10, "0.6"))


def first_page() -> str:
    """Generation and prompts of the full-size model by the memory that they take on a GPU."""
    decode, prefill, peer = load("gpu/hybrid_ahead"), prompts(), peer_figures()
    rows = []
    for gib, prompt_gib, share in SIZES:
        (ours,) = [
            row
            for row in decode["rows"]
            if row["depth"] == 0 and abs(row["experts_bytes"] / 2**30 - gib) < 0.1
        ]
        rows.append(
            [
                f"{ours['vram_bytes'] / 2**30:.0f} GiB",
                f"{ours['experts_share']:.0%}",
                f"**{ours['tok_s']:.0f}**",
                str(peer["partial"]["decode_tok_s"][share]),
                f"**{prefill[prompt_gib][PROMPT]:.0f}**",
                str(peer["partial"]["prefill_tok_s_2048"][share]),
            ]
        )
    whole = max((row for row in decode["rows"] if row["depth"] == 0), key=lambda row: row["experts_share"])
    rows.append(
        [
            f"{whole['vram_bytes'] / 2**30:.0f} GiB",
            "100%",
            f"**{whole['tok_s']:.0f}**",
            str(peer["tok_s"]["tg128"]),
            f"**{prefill[None][PROMPT]:.0f}**",
            str(peer["tok_s"]["pp2048"]),
        ]
    )
    header = ["GPU memory to generate", "experts in it", "generated tok/s", "llama.cpp"]
    header += [f"prompt of {PROMPT}, tok/s", "llama.cpp"]
    commits = [
        decode["commit"],
        *(load(f"gpu/{name}")["commit"] for name in PROMPT_RESULTS),
    ]
    machine = decode["machine"]
    ram = f"RAM {decode['hardware']['read_bytes_per_s'] / 1e9:.0f} GB/s"
    where = f"{machine['gpu']}, {machine['cores']} cores, {ram}, commits {', '.join(commits)}"
    return table(header, rows) + f"\n{where}\n"


def desktop() -> str:
    """A small mix on six cores and a slow bus, by the memory that it takes on a GPU."""
    result, peer = load("gpu/desktop_mix"), load("gpu/desktop_mix_peer")
    rows = []
    (mix,) = result["mixes"].values()
    for row in mix["rows"]:
        theirs = speeds(fitting(peer, parse_size(row["budget"])))
        cells = [row["budget"], f"{row['experts_share']:.0%}"]
        for name in ("decode", str(PROMPT)):
            cells += [f"**{row['figures'][name]['measured_tok_s']:.0f}**", f"{theirs[name]:.0f}"]
        rows.append(cells)
    header = ["GPU memory", "experts in it", "generated tok/s", "llama.cpp"]
    header += [f"prompt of {PROMPT}, tok/s", "llama.cpp"]
    machine, rates = result["machine"], mix["rows"][0]["rates"]
    where = f"{machine['gpu']}, {machine['cores']} cores, bus {rates['link_bytes_per_s'] / 1e9:.0f} GB/s"
    return table(header, rows) + f"\n{where}, commit {result['commit']}\n"


def laptop() -> str:
    """The bundled model on two cores with AVX2, which is what anybody can compare with."""
    r = load("cpu_demo_avx2")
    row = [f"{r['ours']['threads']} threads, {r['ours']['tier']}"]
    for name in ("pp512", "tg128"):
        row += [f"**{r['cases'][name]['ours_tok_s']:.0f}**", f"{r['cases'][name]['llama_cpp_tok_s']:.0f}"]
    header = ["bundled model", "prompt of 512, tok/s", "llama.cpp", "generated tok/s", "llama.cpp"]
    return table(header, [row]) + f"\n{r['machine']['cpu_name']}, commit {r['commit']}: `{r['command']}`\n"


def own_card() -> str:
    """The full-size model on cards: measured where there was one, forecast by a plan elsewhere."""
    decode, prefill, expected = load("gpu/hybrid_ahead"), prompts(), load("card_forecast")
    whole = max((row for row in decode["rows"] if row["depth"] == 0), key=lambda row: row["experts_share"])
    measured = [("all that it takes", whole, f"{prefill[None][PROMPT]:,.0f}")]
    measured += [
        (f"{row['vram_bytes'] / 2**30:.0f} GiB of its memory", row, f"{prefill[prompt_gib][PROMPT]:,.0f}")
        for gib, prompt_gib, _ in SIZES
        for row in decode["rows"]
        if row["depth"] == 0 and abs(row["experts_bytes"] / 2**30 - gib) < 0.1
    ]
    name = decode["machine"]["gpu"]
    rows = [
        [f"{name}, {budget}", f"{row['experts_share']:.0%}", f"{row['tok_s']:.0f}", prompt, "**measured**"]
        for budget, row, prompt in measured
    ]
    rows += [
        [
            f"{row['name']}, {row['memory_gib']} GB",
            f"{row['experts_share']:.0%}",
            f"{row['decode_tok_s']:.0f}",
            f"{row['prefill_tok_s']:,.0f}",
            "forecast",
        ]
        for row in expected["rows"]
    ]
    header = ["card", "experts on it", "generated tok/s", f"prompt of {PROMPT}, tok/s", "how it is known"]
    machine, computer = decode["machine"], expected["computer"]
    ram = decode["hardware"]["read_bytes_per_s"] / 1e9
    where = (
        f"Measured with {machine['cores']} cores and RAM of {ram:.0f} GB/s, commit {decode['commit']}. "
        f"Forecast for {computer['cores']} cores with AVX2 and RAM of "
        f"{computer['read_bytes_per_s'] / 1e9:.0f} GB/s, commit {expected['commit']}: `{expected['command']}`"
    )
    return table(header, rows) + f"\n{where}\n"
