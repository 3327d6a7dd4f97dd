"""The figures of the CPU: attention by type of keys and values, steps of several sequences, lists of prompts,
and a pair of commits.
"""

from typing import Any

from bench.report.tables import load, table

TYPES = ("f32", "i16", "i8", "i4", "i3")


def cpu_attention() -> str:
    """How many times as fast as over an f16 cache each type is, by tier."""
    r = load("cpu_attention")
    header = ["tier", "rows", "behind", "f16, ms", *TYPES]
    rows = [
        [
            case["tier"],
            str(case["rows"]),
            f"{case['depth']:,}",
            f"{case['f16_ms']:.1f}",
            *(f"{case['speed'][name]:.2f}×" for name in TYPES),
        ]
        for case in r["cases"]
    ]
    command = f"`{r['command']} --threads {r['threads']}`"
    return table(header, rows) + f"\nOne thread, commit {r['commit']}: {command}\n"


def model_and_limit(result: dict[str, Any]) -> str:
    """The model of a pair, and its bytes of RAM where the command ends with them."""
    ram = result["command"].partition(" --ram ")[2]
    return f"{result['model']}, {int(ram) / 1e6:.0f} MB of RAM" if ram else str(result["model"])


def cpu_pairs() -> str:
    """Models, one of them also within a limit of RAM, interleaved, with the sources of two commits."""
    header = ["model", "test", "before, tok/s", "after, tok/s", "ratio (min–max of pairs)"]
    rows, results = [], [load(f"pairs/{name}") for name in ("cpu_demo", "cpu_cut", "cpu_disk")]
    for r in results:
        rows += [
            [
                model_and_limit(r),
                name,
                f"{case['old_tok_s']:.0f}",
                f"{case['new_tok_s']:.0f}",
                f"{case['ratio']:.2f} ({case['ratio_min']:.2f}–{case['ratio_max']:.2f})",
            ]
            for name, case in r["cases"].items()
        ]
    r = results[0]
    commits = f"Commits {r['old_commit']} and {r['commit']}, tier {r['tiers'][0]}"
    return table(header, rows) + f"\n{commits}: `python -m bench.engine.versus_commit demo.gguf --old …`\n"


def cpu_rows() -> str:
    """Steps of a token of each of several sequences, and how many times the tokens of one they bring."""
    header = [
        "model", "tier", "sequences", "coldstream tok/s", "of one", "llama.cpp tok/s", "of one",
        "ratio (min–max of pairs)",
    ]  # fmt: skip
    rows, results = [], [load(f"cpu_rows_{name}") for name in ("demo", "demo_avx2", "cut")]
    for r in results:
        one = r["cases"]["1"]
        rows += [
            [
                r["model"],
                r["ours"]["tier"],
                name,
                f"{case['ours_tok_s']:.0f}",
                f"{case['ours_tok_s'] / one['ours_tok_s']:.2f}×",
                f"{case['llama_cpp_tok_s']:.0f}",
                f"{case['llama_cpp_tok_s'] / one['llama_cpp_tok_s']:.2f}×",
                f"{case['ratio']:.2f}× ({case['ratio_min']:.2f}–{case['ratio_max']:.2f})",
            ]
            for name, case in r["cases"].items()
        ]
    r = results[0]
    commits = " and ".join(dict.fromkeys(r["commit"] for r in results))
    return table(header, rows) + f"\nCommit {commits}, {r['ours']['threads']} threads: `{r['command']}`\n"


def side_by_side() -> str:
    """Lists of prompts on the CPU, both ways."""
    r = load("side_by_side")
    rows = [
        [
            str(each["num_prompts"]),
            f"{each['apart_tok_s']:.0f}",
            f"{each['together_tok_s']:.0f}",
            f"{each['ratio']:.2f} ({each['ratios'][0]:.2f}–{each['ratios'][-1]:.2f})",
        ]
        for each in r["lists"]
    ]
    header = ["prompts", "one after the other, tok/s", "side by side, tok/s", "ratio (least–most)"]
    conditions = f"{r['new_tokens']} tokens each, {r['threads']} threads, {r['cpu']}: `{r['command']}`"
    return table(header, rows) + f"\n{conditions}\n"


def disk_tier() -> str:
    """Generation under a memory limit, with its floors."""
    r = load("disk_tier")
    advice = "with read-ahead" if r["peer_read_ahead"] else "without read-ahead"
    rows = [
        ["file, memory limit", f"{r['file_bytes'] / 1e9:.2f} GB, {r['limit_bytes'] / 1e9:.2f} GB"],
        ["coldstream", f"{r['ours_tok_s']:.1f} tok/s"],
        [f"llama.cpp, mmap {advice}", f"{r['llama_cpp_tok_s']:.2f} tok/s"],
        ["text", "of both that of a run without a limit"],
        ["ratio (min–max of pairs)", f"{r['ratio']:.1f}× ({r['ratio_min']:.1f}–{r['ratio_max']:.1f})"],
        ["coldstream, all in memory", f"{r['in_memory_tok_s']:.1f} tok/s"],
        [
            "experts in memory, hit rate",
            f"{r['slot_share']:.0%}, {r['hit_rate']:.1%}",
        ],
        [
            "read a token, waited for",
            f"{r['read_bytes_per_token'] / 1e6:.1f} MB, {1000 * r['wait_s_per_token']:.1f} ms",
        ],
        [
            "the disk",
            f"{r['disk_bytes_s'] / 1e9:.2f} GB/s in pieces of {r['read_piece_bytes'] // 1024} KiB: "
            f"at most {r['disk_floor_tok_s']:.0f} tok/s",
        ],
        ["command", f"`{r['command']}`"],
        ["commit", r["commit"]],
    ]
    return table(["twice the memory", ""], rows)
