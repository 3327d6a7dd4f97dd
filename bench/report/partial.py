"""The blocks on models of which a GPU holds a part: layers of a dense one, and three tiers of experts."""

from typing import Any

from bench.report.peer_figures import step_ms
from bench.report.tables import has, load, table

GIB = 2**30
DEPTH = 512  # of the steps
SAME_SHARE = 0.03


def gpu_layers() -> str:
    """A dense model without the FFNs of some layers, beside llama.cpp with as many on the CPU."""
    r = load("gpu/27b/layers")
    peers = load("gpu/27b/peer")["placements"] + load("gpu/27b/peer_whole")["placements"]
    whole = peers[-1]
    same = {each["cpu_expert_layers"]: each for each in peers[:-1]}
    prompts = [str(each["tokens"]) for each in r["placements"][0]["prefill"]]
    header = ["missing", "a token, tok/s", "of the floor", "llama.cpp", "ratio"]
    header += [f"{n} rows, ms" for n in (8, 16, 64)] + ["llama.cpp, ms"]
    header += [f"pp{n}" for n in prompts] + ["llama.cpp, pp512, pp2048"]
    rows = []
    for each in r["placements"]:
        peer = same.get(each["missing"])
        rate = 1e3 / each["generated_ms"]
        rows.append(
            [
                f"{each['missing']} of {each['layers']}, {each['cold_bytes'] / 1e9:.1f} GB",
                f"{rate:.1f}",
                f"{each['floor_ms'] / each['generated_ms']:.0%}",
                f"{decode_tok_s(peer):.1f}" if peer else "",
                f"{rate / decode_tok_s(peer):.2f}×" if peer else "",
                *(f"{each['step_ms'][str(n)]:.0f}" for n in (8, 16, 64)),
                " / ".join(f"{step_ms(peer, DEPTH)[str(n)]:.0f}" for n in (8, 16, 64)) if peer else "",
                *(f"{prompt['tok_s']:.0f}" for prompt in each["prefill"]),
                _prompts(peer) if peer else "",
            ]
        )
    note = (
        f"llama.cpp with {whole['cpu_expert_layers']} whole layers on the CPU: "
        f"{decode_tok_s(whole):.1f} tok/s. "
        f"{r['machine']['gpu']}, {r['machine']['cores']} cores, commit {r['commit']}: `{r['command']}` and "
        f"`{load('gpu/27b/peer')['command']}`, on machines of one kind"
    )
    return table(header, rows) + f"\n{note}\n"


def decode_tok_s(placement: dict[str, Any]) -> float:
    """Of one of gpu_peer.py's placements, at its first depth."""
    found = [row["decode_tok_s"]["median"] for row in placement["depths"] if "decode_tok_s" in row]
    return float(found[0])


def _prompts(placement: dict[str, Any]) -> str:
    rates = {row["tokens"]: f"{row['tok_s']['median']:.0f}" for row in placement["prefill"]}
    return ", ".join(rates.get(n, "–") for n in (512, 2048))


TIERS = ("gpu/three_tiers", "gpu/three_tiers_18")  # the later one's budgets count
TIERS_PEER = "gpu/three_tiers_peer_{}"  # by GiB of RAM


def tiers() -> dict[int, tuple[dict[str, Any], str]]:
    """Runs with less RAM than the file has bytes, by GiB, and the results that they are of."""
    found = {int(ram) // GIB: (each, name) for name in TIERS for ram, each in load(name)["budgets"].items()}
    return dict(sorted(found.items(), reverse=True))


def peer_of_tiers(gib: int) -> dict[str, Any]:
    """llama.cpp with so much RAM, at the fastest of its placements."""
    placements: list[dict[str, Any]] = load(TIERS_PEER.format(gib))["placements"]
    return max(placements, key=decode_tok_s)


def gpu_three_tiers() -> str:
    """A GPU with less RAM than the file has bytes, beside llama.cpp with as much."""
    r = load(TIERS[-1])
    header = [
        "RAM",
        "tok/s",
        "expected",
        "of the budget",
        "read from the disk",
        "prompt, s",
        "llama.cpp, tok/s",
        "commit",
    ]
    rows = [[*_tier(r["mapped"], "all, mapped", "", None), r["commit"]]]
    for gib, (found, source) in tiers().items():
        peer = peer_of_tiers(gib) if has(TIERS_PEER.format(gib)) else None
        share = max(found["memory"].values()) / (gib * GIB)
        rows.append([*_tier(found, f"{gib} GiB", f"{share:.0%}", peer)])
        rows[-1].append(load(source)["commit"])
    note = (
        f"{r['vram_bytes'] / GIB:.0f} GiB of the GPU's memory, a file of {r['file_bytes'] / 1e9:.0f} GB, a "
        f"prompt of {r['prompt']} tokens; the same text each time. Limit: {r['limit']}. "
        "Ours: `python -m bench.engine.three_tiers full.gguf --vram 4G --ram … --fill --tokens 128`. "
        "llama.cpp, which maps the file, with the experts of 40 or 36 layers on the CPU: "
        "`python -m bench.peers.gpu_peer full.gguf --llama llama --cpu-layers 40,36 --ram …`. "
        "With 18 GiB both ran in the same call. With 10 and 14 GiB llama.cpp ran on another machine of the "
        "kind, with 40 layers"
    )
    return table(header, rows) + f"\n{note}\n"


def gpu_locked_memory() -> str:
    """A GPU whose system page-locks a part of the file, or nothing."""
    r = load("gpu/locked_memory")
    rows = [
        [
            f"{run['locked_bytes'] / GIB:.1f} GiB",
            f"{run['load_s']:.1f}",
            f"{run['prompt_rate']:,.0f}",
            f"{run['decode_rate']:.0f}",
        ]
        for run in r["runs"]
    ]
    header = ["page-locked", "opening, s", f"a prompt of {r['prompt']}, tok/s", "decoding, tok/s"]
    machine = f"{r['machine']['gpu']}, {r['machine']['cores']} cores, commit {r['commit']}"
    return table(header, rows) + f"\nThe same text each time. {machine}: `{r['command']}`\n"


def _tier(found: dict[str, Any], name: str, share: str, peer: dict[str, Any] | None) -> list[str]:
    disk = found["disk"]
    return [
        name,
        f"{found['tok_s']:.1f}",
        f"{found['forecast']['decode']:.0f}",
        share,
        f"{disk['bytes_read'] / 1e9:.1f} GB" if disk else "",
        f"{found['prompt_s']:.2f}",
        f"{decode_tok_s(peer):.3g}" if peer else "",
    ]


def gpu_desktop() -> str:
    """Decoding with the cores and the bus of a desktop, beside llama.cpp with the same."""
    header = ["bus, GB/s", "experts on the GPU", "tok/s", "hits", "llama.cpp, tok/s", "ratio"]
    rows, notes = [], []
    for suffix in ("", "_slow_bus"):
        r, peer = load(f"gpu/desktop_hybrid{suffix}"), load(f"gpu/desktop_peer{suffix}")
        by_share = {f"{each['resident_share']:.2g}": decode_tok_s(each) for each in peer["placements"]}
        for row in r["rows"]:
            other = next(
                (by_share[key] for key in by_share if abs(float(key) - row["experts_share"]) < SAME_SHARE),
                None,
            )
            rows.append(
                [
                    f"{r['hardware']['gpu']['link_bytes_per_s'] / 1e9:.0f}",
                    f"{row['experts_bytes'] / GIB:.1f} GiB",
                    f"{row['tok_s']:.0f}",
                    f"{row['hit_rate']:.0%}",
                    f"{other:.1f}" if other else "",
                    f"{row['tok_s'] / other:.1f}×" if other else "",
                ]
            )
        notes.append(f"`{r['command']}` and `{peer['command']}`")
    note = (
        f"{r['machine']['gpu']}, {r['hardware']['num_logical_cpus']} cores, commit {r['commit']}: {notes[0]}"
    )
    return table(header, rows) + f"\n{note}\n"


def gpu_desktop_rows() -> str:
    """Steps of several rows and prompts without most experts, with the cores of a desktop and with all."""
    default, all_ = load("gpu/desktop_cold_rows"), load("gpu/desktop_cold_rows_16")
    rows = []
    for row, other in zip(default["rows"], all_["rows"], strict=True):
        times = (row["ms"], other["ms"], row["floor_ms"])
        rows.append([f"{row['gib']:g} GiB", str(row["rows"]), *(f"{ms:.1f}" for ms in times)])
    steps = table(["experts on the GPU", "rows", "6 cores, ms", "16 cores, ms", "floor of 6, ms"], rows)
    slow, fast = load("gpu/desktop_streaming"), load("gpu/desktop_streaming_16")
    pairs = [
        [str(row["tokens"]), *(f"{each['tok_s']:,.0f}" for each in (row, other))]
        for row, other in zip(slow["rows"], fast["rows"], strict=True)
        if row["experts_gib"] == 0
    ]
    prompts = table(["prompt, no experts on the GPU", "6 cores, tok/s", "16 cores, tok/s"], pairs)
    gpu, commit = default["machine"]["gpu"], default["commit"]
    note = f"{gpu}, commit {commit}: `{default['command']}` and `{slow['command']}`"
    return f"{steps}\n{prompts}\n{note}\n"
