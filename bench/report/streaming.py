"""The blocks on prompts with experts in host memory, and on commits measured one after the other."""

import math
from collections.abc import Sequence
from statistics import mean

from bench.report.peer_figures import nearest, peer_figures
from bench.report.tables import RESULTS, Row, load, table


def gpu_streaming() -> str:
    """Prefill with a part of the experts on the GPU."""
    r = load("gpu/streaming")
    none_resident = peer_figures()["partial"]["prefill_tok_s_none_resident"]
    header = ["experts on the GPU", "tokens", "tok/s", "spread", "bus alone", "of the floor", "llama.cpp"]
    rows = []
    for row in r["rows"]:
        seconds, samples = row["tokens"] / row["tok_s"], row["samples_s"]
        is_whole = row["experts_gib"] is None
        peer = none_resident[str(row["tokens"])] if row["experts_gib"] == 0 else ""
        rows.append(
            [
                "all" if is_whole else f"{row['experts_gib']:g} GiB",
                str(row["tokens"]),
                f"{row['tok_s']:.0f}",
                f"{(max(samples) - min(samples)) / seconds:.0%}",
                "" if is_whole else f"{row['tokens'] / row['bus_alone_s']:.0f}",
                "" if is_whole else f"{row['share_of_floor']:.0%}",
                str(peer),
            ]
        )
    machine = (
        f"A ring of {r['ring_bytes'] / 2**20:.0f} MiB, chunks of {r['chunk_size']} tokens, {r['threads']} "
        f"threads. {r['machine']['gpu']}, {r['machine']['cores']} cores, commit {r['commit']}: "
        f"`{r['command']}`"
    )
    return table(header, rows) + f"\n{machine}\n"


def gpu_streaming_shared() -> str:
    """Prompts whose experts the device shares out itself, beside the host's way in the same run."""
    r = load("gpu/streaming_shared")
    none_resident = peer_figures()["partial"]["prefill_tok_s_none_resident"]
    header = ["experts on the GPU", "tokens", "tok/s", "divided by the host", "ratio", "bus alone"]
    rows: list[Row] = []
    for row in r["rows"]:
        if row["experts_gib"] is None:
            continue
        ratio = row["host_s"] * row["tok_s"] / row["tokens"]
        is_shared = not math.isclose(ratio, 1)  # or the host divides what is timed
        peer = none_resident.get(str(row["tokens"]), "") if row["experts_gib"] == 0 else ""
        rows.append(
            [
                f"{row['experts_gib']:g} GiB",
                str(row["tokens"]),
                f"{row['tok_s']:.0f}",
                f"{row['tokens'] / row['host_s']:.0f}" if is_shared else "",
                f"{ratio:.2f}" if is_shared else "",
                f"{row['tokens'] / row['bus_alone_s']:.0f}",
                f"{row['share_of_floor']:.0%}",
                str(peer),
            ]
        )
    machine = f"{r['machine']['gpu']}, {r['machine']['cores']} cores, commit {r['commit']}: `{r['command']}`"
    return table([*header, "of the floor", "llama.cpp"], rows) + f"\n{machine}\n"


def gpu_streaming_depth() -> str:
    """Long prompts without any expert on the GPU, by ring and chunk."""
    names = [path.stem for path in sorted((RESULTS / "gpu" / "streaming_depth").glob("*.json"))]
    results = [load(f"gpu/streaming_depth/{name}") for name in names]
    results.sort(key=lambda r: (r["chunk_size"], r["ring_bytes"]))
    rows: list[Row] = []
    for r in results:
        resident = {row["tokens"]: row["tok_s"] for row in r["rows"] if row["experts_gib"] is None}
        rows += [
            [
                f"{r['chunk_size']:,}",
                f"{r['ring_bytes'] / 2**20:.0f} MiB",
                f"{row['total_bytes'] / 2**30:.2f} GiB",
                f"{row['tokens']:,}",
                f"{row['tok_s']:,.0f}",
                f"{resident[row['tokens']]:,.0f}",
                f"{row['tok_s'] / resident[row['tokens']]:.2f}",
                f"{row['tokens'] / row['bus_alone_s']:,.0f}",
            ]
            for row in r["rows"]
            if row["experts_gib"] == 0
        ]
    header = ["tokens a step", "ring", "GPU memory", "tokens", "none resident, tok/s", "all, tok/s"]
    commands = "".join(
        f"\n{r['machine']['gpu']}, {r['machine']['cores']} cores, commit {r['commit']}: `{r['command']}`\n"
        for r in results
    )
    return table([*header, "ratio", "bus alone"], rows) + commands


def gpu_ahead() -> str:
    """Decoding with steps launched before their token is known, and one by one."""
    r = load("gpu/ahead")
    header = ["tokens are chosen", "ahead, tok/s", "one by one, tok/s", "ratio (min–max of pairs)"]
    rows = [
        [
            row["settings"],
            f"{row['ahead_tok_s']:.0f}",
            f"{row['one_by_one_tok_s']:.0f}",
            f"{row['ratio']:.2f} ({row['ratio_min']:.2f}–{row['ratio_max']:.2f})",
        ]
        for row in r["rows"]
    ]
    where = f"{r['machine']['gpu']}, behind {r['rows'][0]['depth']} tokens, commit {r['commit']}"
    return table(header, rows) + f"\n{where}: `{r['command']}`\n"


def gpu_pairs() -> str:
    """An older commit and a newer one in the same call on the same machine."""
    return _pairs((("", "gpu/pairs/hybrid_{}"), ("", "gpu/pairs/streaming_{}")))


def gpu_pairs_again() -> str:
    """The same old commit and a later one, decoding twice."""
    folder = "gpu/pairs/h100/"
    files = (folder + "hybrid_{}", folder + "hybrid_{}_again", folder + "streaming_{}")
    return _pairs(tuple(zip(("", " again", ""), files, strict=True)))


def gpu_interleaved() -> str:
    """The old commit and a later one, interleaved."""
    results = [load(f"gpu/pairs/h100/turns_{name}") for name in ("decode", "prefill")]
    rows: list[Row] = []
    for row in (row for result in results for row in result["rows"]):
        what = "decoding, 1 row" if row["what"] == "decode" else f"a prompt of {row['what']:,}"
        speeds = (" ".join(f"{each:,.0f}" for each in row[f"{side}_tok_s"]) for side in ("old", "new"))
        of_pairs = (row.get(f"{side}_cpu_us_a_pair", ()) for side in ("old", "new"))
        pairs = (" ".join(f"{each:.1f}" for each in of_side) for of_side in of_pairs)
        gib = "all" if row["gib"] is None else f"{row['gib']:g} GiB"
        rows.append([gib, what, *speeds, *pairs, f"{row['ratio']:.2f}"])
    header = ["experts on the GPU", "what", "before, tok/s", "after, tok/s", "CPU before, µs a pair", "after"]
    commands = " and ".join(
        f"`{r['command']} --old DIR --old-commit {r['old_commit']}` (commit {r['commit']})" for r in results
    )
    machine = results[0]["machine"]
    return table([*header, "ratio"], rows) + f"\n{machine['gpu']}, {machine['cores']} cores: {commands}\n"


def gpu_cold_rows() -> str:
    """Steps of several rows whose experts are in the host's memory, beside llama.cpp's."""
    r, peer = load("gpu/cold_rows"), peer_figures()
    header = ["experts on the GPU", "rows", "ms", "llama.cpp, ms", "ratio"]
    rows = []
    for row in r["rows"]:
        ms = nearest(peer["rows"], row["resident_bytes"] / row["expert_bytes"])[str(row["rows"])]
        rows.append(
            [
                f"{row['gib']:g} GiB",
                str(row["rows"]),
                f"{row['ms']:.1f}",
                f"{ms:.1f}",
                f"{ms / row['ms']:.1f}×",
                f"{row['experts_of_a_layer']:.1f}",
                f"{row['floor_ms']:.1f}",
            ]
        )
    where = f"{r['machine']['gpu']}, {r['machine']['cores']} cores, commit {r['commit']}: `{r['command']}`"
    return table([*header, "experts of a layer", "floor, ms"], rows) + f"\n{where}; {peer['source']}\n"


def gpu_streams() -> str:
    """Texts side by side at full size, beside llama.cpp's steps of as many sequences."""
    r, peer = load("gpu/streams"), peer_figures()
    header = [
        "experts on the GPU",
        "texts",
        "tok/s of all",
        "llama.cpp",
        "ratio",
        "between tokens, ms: p50",
        "p95",
    ]
    rows = []
    for placement in r["placements"]:
        steps = nearest(peer["sequences"], placement["experts_share"])
        for row in placement["rows"]:
            theirs = 1e3 * row["streams"] / steps[str(row["streams"])]
            rows.append(
                [
                    "all" if placement["experts_gib"] is None else f"{placement['experts_gib']:g} GiB",
                    str(row["streams"]),
                    f"{row['tok_s']:.0f}",
                    f"{theirs:.0f}",
                    f"{row['tok_s'] / theirs:.1f}×",
                    *(f"{row['between_ms'][name]:.1f}" for name in ("p50", "p95")),
                ]
            )
    where = f"{r['machine']['gpu']}, {r['machine']['cores']} cores, commit {r['commit']}: `{r['command']}`"
    return table(header, rows) + f"\n{where}; {peer['source']}\n"


def gpu_answers() -> str:
    """Whole answers side by side, of texts that have nothing in common and of those with popular experts."""
    header = [
        "texts",
        "experts on the GPU",
        "prompt",
        "answers at once",
        "tok/s of all",
        "lowest",
        "highest",
        "× one",
    ]
    rows: list[Row] = []
    notes = []
    for kind, name in (("nothing in common", "gpu/answers"), ("popular experts", "gpu/answers_shared")):
        r = load(name)
        notes.append(f"`{r['command']}`, commit {r['commit']}")
        for placement in r["placements"]:
            one = {row["prompt"]: mean(row["runs_tok_s"]) for row in placement["rows"] if row["streams"] == 1}
            rows += [
                [
                    kind,
                    f"{placement['experts_share']:.0%}",
                    str(row["prompt"]),
                    str(row["streams"]),
                    f"{mean(row['runs_tok_s']):.0f}",
                    *(f"{end(row['runs_tok_s']):.0f}" for end in (min, max)),
                    f"{mean(row['runs_tok_s']) / one[row['prompt']]:.2f}",
                ]
                for row in placement["rows"]
            ]
    where = f"{r['machine']['gpu']}, {r['machine']['cores']} cores, answers of {r['answer']} tokens"
    return table(header, rows) + f"\n{where}: {'; '.join(notes)}\n"


def _pairs(files: Sequence[tuple[str, str]]) -> str:
    """files: what is said of the runs, and the name with the place of old and new."""
    rows: list[Row] = []
    for again, name in files:
        old, new = (load(name.format(age)) for age in ("old", "new"))
        for before, after in zip(old["rows"], new["rows"], strict=True):
            gib = after.get("experts_gib", after.get("experts_bytes", 0) / 2**30)
            is_whole = gib is None or after.get("experts_share") == 1
            rows.append(
                [
                    "all" if is_whole else f"{gib:.4g} GiB",
                    f"a prompt of {after['tokens']:,}" if "tokens" in after else f"decoding, 1 row{again}",
                    "yes" if after.get("prefetch") else "",
                    *(f"{row['tok_s']:,.0f}" for row in (before, after)),
                    f"{after['tok_s'] / before['tok_s']:.2f}",
                ]
            )
    header = ["experts on the GPU", "what", "prefetching", "before, tok/s", "after, tok/s", "ratio"]
    return table(header, rows) + (
        f"\n{new['machine']['gpu']}, {new['machine']['cores']} cores, commits {old['commit']} and "
        f"{new['commit']}, one after the other: `python -m bench.engine.gpu_hybrid full.gguf "
        f"--experts 0,3,10.67 --depths 0` and `python -m bench.engine.gpu_streaming full.gguf --experts 0,3 "
        f"--texts 3`\n"
    )
