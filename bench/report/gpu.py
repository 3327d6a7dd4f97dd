"""The figures of the GPU, from the JSON files in docs/results/gpu."""

import statistics
from typing import Any

from bench.full_size_forecast import expected_tok_s
from bench.report.peer_figures import peer_figures
from bench.report.tables import RESULTS, has, load, table

GPU_CASES = ("pp168", "pp512", "pp2048", "pp8192", "tg128", "tg128 @ d8192", "tg128 @ d16384")

LEAST_US = 150.0  # of a kind of kernel in the table of steps by rows


def gpu_name(case: str) -> str:
    """The file of a case of gpu.py."""
    return f"gpu/{case.replace(' @ ', '_')}"


def gpu() -> str:
    """The full-size model on a GPU beside llama.cpp; nothing while it isn't measured."""
    peer = peer_figures()["tok_s"]
    rows, machines = [], set()
    for case in GPU_CASES:
        if not has(gpu_name(case)):
            continue
        r = load(gpu_name(case))
        machines.add(f"{r['machine']['gpu']}, driver {r['machine']['driver']}, commit {r['commit']}")
        theirs = peer.get(case)
        rows.append(
            [
                case,
                f"{r['median_tok_s']:.0f} ± {50 * r['spread']:.1f} %",
                f"{theirs:.0f}" if theirs else "",
                f"{r['median_tok_s'] / theirs:.1f}×" if theirs else "",
                f"{100 * r['share_of_floor']:.0f} %" if "share_of_floor" in r else "",
            ]
        )
    if not rows:
        return ""
    header = ["35B-A3B shape, Q4_K_M", "coldstream tok/s", "llama.cpp tok/s", "ratio", "of bandwidth"]
    return table(header, rows) + f"\n{'; '.join(sorted(machines))}\n"


def gpu_depth() -> str:
    """Long contexts on a GPU beside llama.cpp; nothing while they aren't measured."""
    results = [load(name) for name in ("gpu/depth", "gpu/depth_i8") if has(name)]
    if not results:
        return ""
    peer = peer_figures()["depth"]
    rows = []
    for number, depth in enumerate(str(each["depth"]) for each in results[0]["depths"]):
        at = [r["depths"][number] for r in results]
        filled, last = peer["fill_tok_s"][depth], peer["last_chunk_ms"][depth]
        rows.append([f"filling {depth}, tok/s", *(f"{each['fill_tok_s']:.0f}" for each in at), str(filled)])
        rows.append(
            [f"the last 2048 of {depth}, ms", *(f"{each['last_chunk_ms']:.0f}" for each in at), str(last)]
        )
        steps = peer["step_ms"].get(depth, {})
        for count in at[0]["step_ms"]:
            ours = [f"{each['step_ms'][count]:.1f}" if count in each["step_ms"] else "" for each in at]
            rows.append([f"a step of {count} at {depth}, ms", *ours, str(steps.get(count, ""))])
        if all("generated_ms" in each for each in at):
            ours = [f"{each['generated_ms']:.2f}" for each in at]
            rows.append([f"a token of a text at {depth}, ms", *ours, str(steps.get("1", ""))])
    header = ["35B-A3B shape, Q4_K_M", *(r["cache_type"] for r in results), "llama.cpp, f16"]
    machines = sorted({f"{r['machine']['gpu']}, commit {r['commit']}" for r in results})
    return table(header, rows) + f"\n{'; '.join(machines)}\n"


def gpu_attention() -> str:
    """What attention's kernels reach of the GPU; nothing while it isn't measured."""
    if not has("gpu/attention_shares"):
        return ""
    r = load("gpu/attention_shares")
    rows = [
        [
            case["cache_type"],
            f"{case['depth']:,}",
            f"{case['rows']:,}",
            case["kernel"],
            *(f"{case[f'{part}_us']:,.1f}" for part in ("prepare", "attend", "merge")),
            f"{case['share_of_copy']:.0%}",
            f"{case['share_of_int8']:.0%}",
        ]
        for case in r["cases"]
    ]
    header = ["type", "depth", "rows", "kernel", "prepare µs", "attend µs", "merge µs"]
    note = (
        f"{r['machine']['gpu']}, commit {r['commit']}: `{r['command']}`. A copy reaches "
        f"{r['copy_bytes_s'] / 1e12:.2f} TB/s, int8 tensor cores {r['int8_ops_s'] / 1e12:,.0f} TOP/s."
    )
    return table([*header, "of the bandwidth", "of int8"], rows) + f"\n{note}\n"


def gpu_profile() -> str:
    """Where a decoded token's time goes on the GPU; nothing while it isn't measured."""
    if not has("gpu/profile"):
        return ""
    r = load("gpu/profile")
    rows = [
        [f"`{kind['kind']}`", str(kind["launches"]), f"{kind['us']:.1f}", f"{kind['us'] / r['step_us']:.1%}"]
        for kind in r["kinds"]
    ]
    summary = [
        f"{r['launches_per_step']} launches a token, {r['launches_per_layer']:.1f} a layer, in "
        f"{r['step_us']:.0f} µs, then {r['between_steps_us']:.0f} µs to the next token; weights alone take "
        f"{r['share_of_bandwidth']:.0%} of the {r['bandwidth_bytes_s'] / 1e12:.2f} TB/s that a copy reaches. "
        "The largest gaps:",
        "",
        *(
            f"- `{gap['after']}` → `{gap['before']}`: {gap['count']} of {gap['median_us']:.1f} µs, "
            f"{gap['us']:.0f} µs a token"
            for gap in r["largest_gaps"]
        ),
    ]
    return table(["kind of kernel", "launches", "µs", "share"], rows) + "\n" + "\n".join(summary) + "\n"


def gpu_rows() -> str:
    """Milliseconds of a step by its number of rows, and before small steps had one family of kernels."""
    r, before = load("gpu/rows"), load("gpu/rows_before")
    now, old = (each["depths"][0]["step_ms"] for each in (r, before))
    rows = [
        [count, f"{old[count]:.2f}" if count in old else "", f"{ms:.2f}", f"{int(count) / ms * 1e3:.0f}"]
        for count, ms in now.items()
    ]
    head = ["rows", f"{before['commit']}, ms", f"{r['commit']}, ms", "rows a second"]
    return table(head, rows) + f"\n{r['machine']['gpu']}: `{r['command']}`\n"


def gpu_profile_rows() -> str:
    """Where the time of a step goes by its number of rows: the kinds that take most of any."""
    paths = (RESULTS / "gpu/profile_rows").glob("*.json")
    return _kinds_by_rows([load(f"gpu/profile_rows/{path.stem}") for path in paths])


def gpu_dense() -> str:
    """The dense model on a GPU: prompts, decoding and steps by their number of rows."""
    names = [gpu_name(case).replace("gpu/", "gpu/27b/") for case in GPU_CASES]
    results = [load(name) for name in names if has(name)]
    rows = [
        [
            r["case"],
            f"{r['median_tok_s']:.0f} ± {50 * r['spread']:.1f} %",
            f"{100 * r['share_of_floor']:.0f} %" if "share_of_floor" in r else "",
        ]
        for r in results
    ]
    steps = load("gpu/27b/rows")
    rows += [
        [f"a step of {count} behind 512, ms", f"{ms:.2f}", ""]
        for count, ms in steps["depths"][0]["step_ms"].items()
    ]
    r = results[0]
    note = f"{r['machine']['gpu']}, commit {r['commit']}: `{r['command']}` and `{steps['command']}`"
    return table(["27B shape, Q4_K_M", "tok/s", "of bandwidth"], rows) + f"\n{note}\n"


def gpu_dense_profile() -> str:
    """Where the time of a step of the dense model goes."""
    return _kinds_by_rows([load(f"gpu/27b/profile_{count}") for count in (1, 16)])


def _kinds_by_rows(results: list[dict[str, Any]]) -> str:
    results.sort(key=lambda r: r["rows"])
    times = [{kind["kind"]: kind["us"] for kind in r["kinds"]} for r in results]
    most = {kind: max(each.get(kind, 0.0) for each in times) for kind in set().union(*times)}
    kinds = sorted((kind for kind in most if most[kind] >= LEAST_US), key=lambda kind: -most[kind])
    rows = [[f"`{kind}`", *(f"{each[kind]:.0f}" if kind in each else "" for each in times)] for kind in kinds]
    rows.append(["launches", *(str(r["launches_per_step"]) for r in results)])
    rows.append(["whole step", *(f"{r['step_us']:.0f}" for r in results)])
    r = results[0]
    command = r["command"].rsplit(" ", 1)[0]
    note = f"{r['machine']['gpu']}, commit {r['commit']}: `{command} …`"
    heads = (f"{r['rows']} row{'s' * (r['rows'] > 1)}" for r in results)
    return table(["µs of kernels", *heads], rows) + f"\n{note}\n"


def gpu_hybrid(name: str = "gpu/hybrid") -> str:
    """Decoding with a part of the experts on the GPU; nothing while it isn't measured."""
    if not has(name):
        return ""
    r, peer = load(name), peer_figures()["partial"]["decode_tok_s"]
    whole = {row["depth"]: row["tok_s"] for row in r["rows"] if row["experts_share"] >= 1.0}
    header = ["experts on the GPU", "context", "tok/s", "of all resident"]
    header += ["llama.cpp", "hits", "prefetched a layer", "of the floor", "forecast"]
    rows = []
    for row in sorted(r["rows"], key=lambda row: (row["depth"], row["experts_share"])):
        share = row["experts_share"]
        expected = expected_tok_s(r, row)
        nearest = next((peer[key] for key in peer if abs(float(key) - share) < 0.03), "")
        rows.append(
            [
                f"{row['experts_bytes'] / 2**30:.1f} GiB ({share:.0%})",
                f"{row['depth'] or 'short'}",
                f"{row['tok_s']:.0f}",
                f"{row['tok_s'] / whole[row['depth']]:.2f}",
                f"{nearest if not row['depth'] else ''}",
                f"{row['hit_rate']:.1%}",
                f"{row['prefetch'] or ''}",
                f"{row['share_of_floor']:.0%}",
                f"{expected:.0f} ({expected / row['tok_s'] - 1:+.0%})",
            ]
        )
    return table(header, rows) + f"\n{_machine(r)}\n"


def _machine(r: dict[str, Any]) -> str:
    """Where experts were placed: its rates bound what is missing."""
    ram, link = r["hardware"]["read_bytes_per_s"], r["hardware"]["gpu"]["link_bytes_per_s"]
    rates = f"RAM {ram / 1e9:.0f} GB/s, bus {link / 1e9:.0f} GB/s"
    machine = f"{r['machine']['gpu']}, {r['machine']['cores']} cores, {rates}"
    return f"{machine}, commit {r['commit']}: `{r['command']}`"


def gpu_prefetch() -> str:
    """Decoding with and without prefetching; empty while it is not measured."""
    if not has("gpu/hybrid_prefetch"):
        return ""
    r = load("gpu/hybrid_prefetch")
    header = [
        "experts on the GPU",
        "prefetched",
        "tok/s",
        "pairs left to the CPU and the bus",
        "guessed right",
    ]
    header += ["fetched in time", "given up", "fetched for nothing"]
    rows = []
    for row in r["rows"]:
        if row["experts_share"] >= 1.0:
            continue
        left = statistics.mean(text["cpu_pairs"] + text["bus_pairs"] for text in row["texts"])
        rows.append(
            [
                f"{row['experts_bytes'] / 2**30:.1f} GiB ({row['experts_share']:.0%})",
                f"up to {row['prefetch']} a layer" if row["prefetch"] else "none",
                f"{row['tok_s']:.0f}",
                f"{left:.1f} a token",
                *_guesses(row["guesses"]),
            ]
        )
    return table(header, rows) + f"\n{_machine(r)}\n"


def _guesses(guesses: dict[str, list[int]] | None) -> list[str]:
    """Cells: of all guesses the right ones, and what came of those that no slot held."""
    if guesses is None:
        return ["", "", "", ""]
    fetched, given_up = sum(guesses["fetched"]), sum(guesses["given_up"])
    begun = fetched + given_up
    return [
        f"{sum(guesses['right']) / sum(guesses['guessed']):.0%}",
        f"{sum(guesses['used']) / begun:.0%}",
        f"{given_up / begun:.0%}",
        f"{(fetched - sum(guesses['used'])) / begun:.0%}",
    ]


def gpu_layer_step() -> str:
    """One layer's step with missing experts; nothing while it isn't measured."""
    if not has("gpu/prefetch"):
        return ""
    r = load("gpu/prefetch")
    header = ["missing", "time before, µs", "resident µs", "on demand µs", "prefetched µs", "saved µs"]
    header += ["bus alone µs", "in time", "copied, on demand and prefetched"]
    rows = [
        [
            str(row["missing"]),
            f"{row['window_us']:.0f}",
            *(f"{row[f'{name}_us']:.1f}" for name in ("resident", "on_demand", "prefetched", "saved")),
            f"{row['link_floor_us']:.0f}",
            f"{row['used'] / row['missing']:.0%}",
            f"{row['on_demand_bytes'] / 1e6:.1f} and {row['prefetched_bytes'] / 1e6:.1f} MB",
        ]
        for row in r["rows"]
    ]
    machine = f"{r['machine']['gpu']}, commit {r['commit']}: `{r['command']}`"
    return table(header, rows) + f"\n{machine}\n"


def guess_recall() -> str:
    """How well routers guess ahead on the bundled model."""
    r = load("guess_recall")
    header = [
        "layers ahead",
        "guessed right",
        f"of experts unused for {r['recent']} tokens",
        "right of those guesses",
    ]
    names = ("recall", "recall_of_unused", "precision_of_unused")
    rows = [[str(row["layers_ahead"]), *(f"{row[name]:.0%}" for name in names)] for row in r["rows"]]
    return table(header, rows) + f"\nThe bundled model, {r['tokens']} tokens: `{r['command']}`\n"


def gpu_parts() -> str:
    """Where a token's time goes with a part of the experts on the GPU; nothing while it isn't measured."""
    rows = [row for row in load("gpu/hybrid")["rows"] if row.get("parts_s")] if has("gpu/hybrid") else []
    if not rows:
        return ""
    rows.sort(key=lambda row: (row["depth"], row["experts_share"]))
    header = ["experts on the GPU", "context", *(f"{part} µs" for part in rows[0]["parts_s"]), "token µs"]
    lines = [
        [
            f"{row['experts_bytes'] / 2**30:.1f} GiB ({row['experts_share']:.0%})",
            f"{row['depth'] or 'short'}",
            *(f"{1e6 * seconds:.0f}" for seconds in row["parts_s"].values()),
            f"{1e6 * sum(row['parts_s'].values()):.0f}",
        ]
        for row in rows
    ]
    return table(header, lines)


def same_bits() -> str:
    """Differences between the quantised products in C++ and on the GPU."""
    r = load("gpu/same_bits")
    rows = [
        [name, str(counts["products"]), str(counts["experts"])]
        for name, counts in r["differing_values"].items()
    ]
    tokens = ", ".join(map(str, r["tokens"]))
    summary = (
        f"{r['rows']:,} random rows of {r['cols']} weights of each type, by {tokens} rows of activations; "
        f"experts with {r['expert_rows']:,} rows. {r['machine']['gpu']}, C++ tier {r['cpu_tier']}, commit "
        f"{r['commit']}: `python -m bench.kernels.same_bits`"
    )
    return table(["type", "products that differ", "experts' outputs that differ"], rows) + f"\n{summary}\n"


def gpu_first_token() -> str:
    """Seconds from the command to the first token, and the phases of one start; nothing if not measured."""
    if not has("gpu/first_token"):
        return ""
    r = load("gpu/first_token")
    later, resident = r["later_starts_s"], r["resident_starts_s"]
    rows = [
        ["first start, nothing kept", f"{r['first_start_s']:.1f}"],
        ["later starts", f"{min(later):.1f}–{max(later):.1f}"],
        ["with all experts on the GPU", f"{min(resident):.1f}–{max(resident):.1f}"],
        ["one more, to the end of the program, of which:", f"{r['profiled_run_s']:.1f}"],
    ]
    rows += [[f"… {phase}", f"{seconds:.2f}"] for phase, seconds in r["phases_s"].items()]
    if peer := r.get("llama_cpp"):
        ways = {"llama.cpp": "starts_s", "llama.cpp, --no-warmup --no-repack": "bare_starts_s"}
        for name, key in ways.items():
            rows.append([name, f"{min(peer[key]):.1f}–{max(peer[key]):.1f}"])
    machine = f"{r['machine']['gpu']}, {r['machine']['cores']} cores, commit {r['commit']}: `{r['command']}`"
    note = f" ({r['note']})" if "note" in r else ""
    return table(["from the command to the first token", "s"], rows) + f"\n{machine}{note}\n"


def gpu_spills() -> str:
    """Kernels that set registers aside, before and after they did not; nothing if not measured."""
    if not has("gpu/spills"):
        return ""
    r = load("gpu/spills")
    rows = [
        [
            row["case"],
            str(row["rows"]),
            f"{row['before_us']:.2f}",
            f"{row['after_us']:.2f}",
            f"{min(row['ratios']):.2f}–{max(row['ratios']):.2f}×",
        ]
        for row in r["rows"]
    ]
    where = f"{r['machine']['gpu']}, commits {r['before']} and {r['commit']}: `{r['command']}`"
    return table(["kernel", "rows", "before µs", "after µs", "before : after"], rows) + f"\n{where}\n"
