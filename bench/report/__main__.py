"""Writes the figures of README.md and of the pages in docs/ from the JSON files in docs/results.

    python -m bench.report           rewrite the blocks
    python -m bench.report --check   exit 1 if a block or a picture does not show what the JSON files say

A block stands between `<!-- figures: NAME -->` and `<!-- /figures -->`; nothing in it is typed by hand.
Pictures are files below docs/.
"""

import argparse
import re
import sys
from collections.abc import Callable
from typing import Any

from bench.report import aims
from bench.report.accuracy import activation_scales, agreement_by_architecture, key_sweep, kv_types
from bench.report.agents import agents
from bench.report.aims_machines import aims_machines
from bench.report.bodies import bad_bodies
from bench.report.cards import cards_decode, cards_prompts
from bench.report.commits import commit_bits, house, versus_commits
from bench.report.cpu import cpu_attention, cpu_pairs, cpu_rows, disk_tier, side_by_side
from bench.report.desktop import desktop_bus, forecasts
from bench.report.drafts import (
    cpu_drafts,
    cpu_drafts_by_size,
    cpu_shallow_drafts,
    demo_drafter,
    draft_equality,
    gpu_drafts,
    gpu_drafts_dflash,
)
from bench.report.failures import cancel_storm, conversations, kills
from bench.report.families import families_agreement, families_cpu, families_gpu
from bench.report.first_page import desktop, first_page, laptop, own_card
from bench.report.gpu import (
    gpu,
    gpu_attention,
    gpu_dense,
    gpu_dense_profile,
    gpu_depth,
    gpu_first_token,
    gpu_hybrid,
    gpu_layer_step,
    gpu_parts,
    gpu_prefetch,
    gpu_profile,
    gpu_profile_rows,
    gpu_rows,
    gpu_spills,
    guess_recall,
    same_bits,
)
from bench.report.gpu_mixes import desktop_mix, gpu_mixes
from bench.report.gpu_types import gpu_types
from bench.report.mixes import mixes
from bench.report.partial import (
    gpu_desktop,
    gpu_desktop_rows,
    gpu_layers,
    gpu_locked_memory,
    gpu_three_tiers,
)
from bench.report.programs import programs
from bench.report.residents import planned_residents
from bench.report.serving import gpu_serving, serving
from bench.report.streaming import (
    gpu_ahead,
    gpu_answers,
    gpu_cold_rows,
    gpu_interleaved,
    gpu_pairs,
    gpu_pairs_again,
    gpu_streaming,
    gpu_streaming_depth,
    gpu_streaming_shared,
    gpu_streams,
)
from bench.report.tables import Row, load, table
from bench.report.tests import (
    architectures,
    draft_trees,
    foreign_cases,
    gpu_sanitizer,
    gpu_tests,
    llama_cpp_server_tests,
    planted_faults,
)
from bench.report.weight_types import weight_types
from bench.report.wrong_rates import pictures, wrong_rates
from bench.results import ROOT

PAGES = (
    ROOT / "README.md",
    ROOT / "docs" / "agents.md",
    ROOT / "docs" / "benchmarks.md",
    ROOT / "docs" / "install.md",
    ROOT / "docs" / "notes" / "aims.md",
    ROOT / "docs" / "notes" / "experts-placement.md",
    ROOT / "docs" / "notes" / "history.md",
    ROOT / "docs" / "notes" / "profiles.md",
    ROOT / "docs" / "notes" / "startup.md",
    ROOT / "docs" / "performance.md",
    ROOT / "docs" / "server.md",
    ROOT / "docs" / "testing.md",
    ROOT / "docs" / "text.md",
    ROOT / "docs" / "chat_templates.md",
    ROOT / "tools" / "train_demo" / "README.md",
)
BLOCK = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- /figures -->)", re.DOTALL)


def speed_rows(result: dict[str, Any], label: str) -> list[Row]:
    """One row per case of a paired benchmark."""
    return [
        [
            label,
            f"{result['machine']['num_physical_cores']} cores, {result['ours']['tier']}",
            name,
            f"{case['ours_tok_s']:.0f}",
            f"{case['llama_cpp_tok_s']:.0f}",
            f"{case['ratio']:.2f}× ({case['ratio_min']:.2f}–{case['ratio_max']:.2f})",
        ]
        for name, case in result["cases"].items()
    ]


def speed() -> str:
    """The paired benchmarks against llama.cpp."""
    header = ["model", "CPU", "test", "coldstream tok/s", "llama.cpp tok/s", "ratio (min–max of pairs)"]
    models = {
        "cpu_demo": "bundled demo model",
        "cpu_demo_avx2": "bundled demo model",
        "cpu_cut": "35B-A3B shape, 4 layers, 16 experts",
    }
    return table(header, [row for name, model in models.items() for row in speed_rows(load(name), model)])


def ceilings() -> str:
    """The bound of decode by memory bandwidth, and the share that is reached."""
    header = ["model", "MB a token", "measured GB/s", "ceiling tok/s", "share reached", "command"]
    rows = []
    for name in ("cpu_demo", "cpu_cut"):
        r = load(name)
        rows.append(
            [
                r["model"],
                f"{r['bytes_per_token'] / 1e6:.1f}",
                f"{r['read_bandwidth_bytes_s'] / 1e9:.1f}",
                f"{r['ceiling_tok_s']:.0f}",
                f"{100 * r['share_of_ceiling']:.0f} %",
                f"`{r['command']}`",
            ]
        )
    return table(header, rows)


def memory() -> str:
    """Resident memory beside the file's size."""
    header = ["model", "file MB", "peak RSS MB", "above the file, MB", "command"]
    rows = []
    for name in ("memory_demo", "memory_cut"):
        r = load(name)
        sizes = [f"{r[key] / 1e6:.0f}" for key in ("file_bytes", "peak_rss_bytes", "above_file_bytes")]
        rows.append([r["model"], *sizes, f"`{r['command']}`"])
    return table(header, rows)


def agreement() -> str:
    """Our logits and greedy text beside llama.cpp's on the demo model."""
    r = load("agreement")
    rows = [
        ["positions compared", str(r["positions"])],
        ["same most likely token", f"{100 * r['top1_agreement']:.2f} %"],
        ["prompts, greedy tokens each", f"{r['num_prompts']}, {r['tokens_per_prompt']}"],
        ["equal text", str(r["equal_prompts"])],
        ["first difference at a near-tie", str(r["near_tie_prompts"])],
        ["largest gap at a first difference (logits)", f"{r['largest_gap']:.3f}"],
        ["command", f"`{r['command']}`"],
    ]
    return table(["agreement with llama.cpp", ""], rows)


def demo_model() -> str:
    """How well the bundled model predicts held-out files, and how it uses its experts."""
    r = load("demo_model")
    held_out, corpus = r["held_out"], r["corpus"]
    bits, behaviour = held_out["bits_per_byte"], held_out["behaviour"]
    entropy = behaviour["routing_entropy_bits_per_block"]
    rows = [
        ["`xz -9e` of the same files", f"{corpus['xz_9e_bits_per_byte']:.4f} bits per byte"],
        [
            "`xz -9e` that has seen the training files",
            f"{corpus['xz_9e_after_training_files_bits_per_byte']:.4f} bits per byte",
        ],
        [
            "trained weights, before rounding",
            f"{bits['trained_weights_float_bf16_products']:.4f} bits per byte",
        ],
        ["the file, float activations", f"{bits['file']:.4f} bits per byte"],
        ["… int8 activations, a scale per 256", f"{bits['file_int8_activations_per_256']:.4f} bits per byte"],
        ["… int8 activations, a scale per 32", f"{bits['file_int8_activations_per_32']:.4f} bits per byte"],
        ["the file in llama.cpp", f"{r['llama_cpp']['bits_per_byte']:.4f} bits per byte"],
        [
            "routing entropy per block",
            f"{min(entropy):.2f}–{max(entropy):.2f} of {behaviour['routing_entropy_maximum_bits']:.0f} bits",
        ],
        ["next token right", f"{100 * behaviour['top1']['trunk_correct']:.1f} %"],
        ["MTP block agrees with the trunk", f"{100 * behaviour['top1']['mtp_agrees_with_trunk']:.1f} %"],
        ["held-out files", f"{corpus['held_out']['files']}, {corpus['held_out']['bytes']:,} bytes"],
        ["command", f"`{r['command']}`"],
    ]
    return table(["the demo model on held-out files", ""], rows)


def startup() -> str:
    """Seconds before anything is computed."""
    r = load("startup")
    opening = f"open a header of {r['header_bytes'] / 1e6:.1f} MB, {r['header_strings']:,} strings"
    rows = [
        [opening, f"{r['open_s']:.2f} s (floor {r['floor_s']:.2f})"],
        ["`coldstream --help`", f"{r['help_s']:.2f} s"],
        [
            "`coldstream run -n 1` of the bundled model on the CPU, to its end",
            f"{r['token_s']:.2f} s, of which imports {r['token_imports_s']:.2f}",
        ],
        ["machine", f"{r['cpu']}, at a load of {r['load_average']:.0f}, commit {r['commit']}"],
        ["command", f"`{r['command']}`"],
    ]
    return table(["starting", ""], rows)


def at_rest() -> str:
    """CPU time of programs that nobody asks anything."""
    r = load("at_rest")
    names = {
        "serve": "`coldstream serve`",
        "chat": "`coldstream run`, a chat",
        "library": "a program with `LLM`",
    }
    rows = [
        [
            names[name],
            str(each["threads"]),
            f"{100 * each['share_of_core']:.2f} %",
            f"{each['wakes_per_s']:.1f}",
        ]
        for name, each in r["programs"].items()
    ]
    header = ["after an answer, nobody asks", "threads", "CPU time, of one core", "wakes a second"]
    where = f"{r['cpu']}, at a load of {r['load_average']:.0f}, commit {r['commit']}: `{r['command']}`"
    return f"{table(header, rows)}\n{where}\n"


def idle_unload() -> str:
    """A server with its model, and without it."""
    r = load("idle_unload")
    memory, first, rest = r["memory"], r["median_first_token_s"], r["rest"]
    rows = [
        ["RAM of the server's processes", *(f"{sum(memory[key].values()) / 1e6:.0f} MB" for key in first)],
        ["… of these the engine's", *(f"{memory[key]['others'] / 1e6:.0f} MB" for key in first)],
        ["first token of a short prompt", *(f"{seconds:.2f} s" for seconds in first.values())],
        ["CPU time, of one core", "", f"{100 * rest['share_of_core']:.2f} %"],
    ]
    where = f"{r['cpu']}, at a load of {r['load_average']:.0f}, commit {r['commit']}: `{r['command']}`"
    header = ["the bundled model on the CPU", "loaded", "unloaded"]
    return f"{table(header, rows)}\n{where}\n"


def install() -> str:
    """Downloads and disk space of each kind of installation."""
    r = load("install")
    build, machine = r["build"], r["machine"]
    rows = [
        [
            "the wheel, compiled from a checkout",
            "",
            f"{r['wheel_bytes'] / 1e6:.0f}",
            "",
            f"{build['wall_s']:.0f} s",
        ]
    ]
    names = {
        "cpu": "`coldstream`",
        "cuda": "`coldstream[cuda]`",
        "test": "`coldstream[test]`",
    }
    rows += [
        [
            names[kind],
            f"{figures['download_bytes'] / 1e6:.0f}",
            f"{figures['disk_bytes'] / 1e6:.0f}",
            str(figures["packages"]),
            f"{figures['wall_s']:.0f} s",
        ]
        for kind, figures in r["installs"].items()
    ]
    where = f"Python {machine['python']}, {machine['num_physical_cores']} cores, "
    where += f"at a load of {machine['load_average']:.0f}"
    header = ["what", "downloads, MB", "on disk, MB", "packages", "time"]
    return table(header, rows) + f"\n{where}, commit {r['commit']}: `{r['command']}`\n"


def wheels() -> str:
    """Sizes of the wheels, and their trials without a compiler."""
    r = load("wheels")
    rows = []
    for name, wheel in r["wheels"].items():
        size, build = f"{wheel['wheel_bytes'] / 1e6:.1f}", f"{wheel['build_s']:.0f} s"
        extension = f"{wheel['extension_bytes'] / 1e6:.1f}"
        for version, each in wheel["trials"].items():
            steps = [f"{each[step]:.1f} s" for step in ("install_s", "run_s", "serve_and_chat_s")]
            rows.append(
                [
                    "-".join(name.removesuffix(".whl").split("-")[2:]),
                    size,
                    extension,
                    build,
                    version,
                    *steps,
                    f"{each['disk_bytes'] / 1e6:.0f}",
                ]
            )
    header = ["wheel", "MB", "extension, MB", "built in", "Python", "`pip install`", "`run`"]
    header += ["`serve` and a chat", "on disk, MB"]
    where = f"{r['machine']['num_physical_cores']} cores, at a load of {r['machine']['load_average']:.0f}"
    return table(header, rows) + f"\n{where}, commit {r['commit']}: `{r['command']}`\n"


def text() -> str:
    """Processor seconds of the tokenizer, wall seconds of the chat template."""
    r = load("text")
    names = [key.removesuffix("_s_per_mib") for key in r if key.endswith("_s_per_mib")]
    rows = [["load the vocabulary", f"{r['load_s']:.2f} s", ""]]
    rows += [
        [f"encode 1 MiB: {name}", f"{r[f'{name}_s_per_mib']:.2f} s", f"{r[f'{name}_ratio']:.2f}"]
        for name in names
    ]
    rows += [
        ["render a chat for the first time", f"{r['first_render_s']:.2f} s", ""],
        ["render it again", f"{1e3 * r['render_s']:.2f} ms", ""],
    ]
    return table(["what", "time", "over that of half the text"], rows)


def templates() -> str:
    """Published chat templates beside `transformers`, and forged control tokens, by family."""
    r = load("templates")
    header = ["family", "templates", "conversations", "equal", "refused", "forged", "refused", "through"]
    keys = ("templates", "conversations", "equal", "refused", "forged", "forged_refused", "forged_through")
    keys += ("through_by_parsing",)
    counts = {family: [row[key] for key in keys] for family, row in r["families"].items()}
    counts["all"] = [sum(column) for column in zip(*counts.values(), strict=True)]
    rows = [[family, *(f"{number:,}" for number in numbers)] for family, numbers in counts.items()]
    versions = ", ".join(f"{name} {r[name]}" for name in ("transformers", "jinja2", "tokenizers"))
    return table([*header, "by parsing"], rows) + f"\n{versions}, commit {r['commit']}: `{r['command']}`\n"


def routing() -> str:
    """Hit rates of LRU caches over the full-size file's routing, beside published ones."""
    r = load("routing_locality")
    rows = [
        [f"{float(share):.0%}", f"{rate:.1%}", f"{r['published_lru_hit_rate'][share]:.1%}"]
        for share, rate in r["lru_hit_rate"].items()
    ]
    rows.append(["command", f"`{r['command']}`", ""])
    return table(["experts of a layer in the cache", "hit rate in this file", "published"], rows)


def policies() -> str:
    """Hit rates of policies of residency, and how far ours is from the best possible."""
    r = load("policies")
    rows = []
    for row in r["rows"]:
        rates, copies = row["hit_rate"], row["copies_per_token"]
        names = ("lru", "lfu", "static", "ours", "ours_4_copies", "belady")
        rows.append(
            [
                f"{row['share']:.0%}",
                *(f"{rates[name]:.1%}" for name in names),
                f"{100 * (rates['belady'] - rates['ours']):.1f}",
                f"{copies['lru']:.1f}",
                f"{copies['ours']:.1f}",
            ]
        )
    header = ["experts in fast memory", "LRU", "LFU", "static", "ours", "ours, 4 copies", "Belady"]
    header += ["points from ours to Belady", "LRU's copies a token", "ours"]
    size = (
        f"{r['model']}, {r['layers']} layers of {r['experts']} experts, {r['experts_per_token']} a token, "
        f"{r['tokens']:,} tokens: `{r['command']}`"
    )
    return table(header, rows) + f"\n{size}\n"


BLOCKS: dict[str, Callable[[], str]] = aims.BLOCKS | {
    "agents": agents,
    "aims_machines": aims_machines,
    "families_agreement": families_agreement,
    "families_cpu": families_cpu,
    "families_gpu": families_gpu,
    "first_page": first_page,
    "first_page_desktop": desktop,
    "laptop": laptop,
    "own_card": own_card,
    "cards_decode": cards_decode,
    "cards_prompts": cards_prompts,
    "speed": speed,
    "ceilings": ceilings,
    "memory": memory,
    "agreement": agreement,
    "agreement_by_architecture": agreement_by_architecture,
    "demo_drafter": demo_drafter,
    "demo_model": demo_model,
    "disk_tier": disk_tier,
    "architectures": architectures,
    "draft_trees": draft_trees,
    "install": install,
    "key_sweep": key_sweep,
    "kv_types": kv_types,
    "programs": programs,
    "mixes": mixes,
    "weight_types": weight_types,
    "wrong_rates": wrong_rates,
    "gpu_mixes": gpu_mixes,
    "gpu_types": gpu_types,
    "desktop_mix": desktop_mix,
    "desktop_bus": desktop_bus,
    "forecasts": forecasts,
    "versus_commits": versus_commits,
    "wheels": wheels,
    "commit_bits": commit_bits,
    "house": house,
    "activation_scales": activation_scales,
    "side_by_side": side_by_side,
    "startup": startup,
    "at_rest": at_rest,
    "idle_unload": idle_unload,
    "templates": templates,
    "text": text,
    "cpu_attention": cpu_attention,
    "cpu_shallow_drafts": cpu_shallow_drafts,
    "cpu_drafts": cpu_drafts,
    "cpu_drafts_by_size": cpu_drafts_by_size,
    "gpu_drafts": gpu_drafts,
    "gpu_drafts_dflash": gpu_drafts_dflash,
    "draft_equality": draft_equality,
    "serving": serving,
    "gpu_serving": gpu_serving,
    "kills": kills,
    "bad_bodies": bad_bodies,
    "cancel_storm": cancel_storm,
    "conversations": conversations,
    "cpu_pairs": cpu_pairs,
    "cpu_rows": cpu_rows,
    "gpu": gpu,
    "gpu_ahead": gpu_ahead,
    "gpu_answers": gpu_answers,
    "gpu_first_token": gpu_first_token,
    "gpu_hybrid": gpu_hybrid,
    "gpu_hybrid_ahead": lambda: gpu_hybrid("gpu/hybrid_ahead"),
    "gpu_parts": gpu_parts,
    "gpu_prefetch": gpu_prefetch,
    "gpu_layer_step": gpu_layer_step,
    "guess_recall": guess_recall,
    "gpu_spills": gpu_spills,
    "gpu_streaming": gpu_streaming,
    "gpu_streaming_depth": gpu_streaming_depth,
    "gpu_streaming_shared": gpu_streaming_shared,
    "gpu_pairs": gpu_pairs,
    "gpu_pairs_again": gpu_pairs_again,
    "gpu_interleaved": gpu_interleaved,
    "gpu_cold_rows": gpu_cold_rows,
    "gpu_streams": gpu_streams,
    "gpu_attention": gpu_attention,
    "gpu_depth": gpu_depth,
    "gpu_profile": gpu_profile,
    "gpu_dense": gpu_dense,
    "gpu_layers": gpu_layers,
    "gpu_desktop": gpu_desktop,
    "gpu_desktop_rows": gpu_desktop_rows,
    "gpu_three_tiers": gpu_three_tiers,
    "gpu_locked_memory": gpu_locked_memory,
    "gpu_dense_profile": gpu_dense_profile,
    "gpu_profile_rows": gpu_profile_rows,
    "gpu_rows": gpu_rows,
    "gpu_sanitizer": gpu_sanitizer,
    "gpu_tests": gpu_tests,
    "llama_cpp_server_tests": llama_cpp_server_tests,
    "planted_faults": planted_faults,
    "foreign_cases": foreign_cases,
    "planned_residents": planned_residents,
    "policies": policies,
    "routing": routing,
    "same_bits": same_bits,
}


def rewrite(text: str) -> str:
    """`text` with every block filled from the result files."""
    return BLOCK.sub(lambda m: f"{m[1]}{BLOCKS[m[2]]()}{m[3]}", text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    stale = 0
    written = {page: rewrite(page.read_text()) for page in PAGES}
    drawn = {ROOT / "docs" / name: text for name, text in pictures().items()}
    for page, fresh in {**written, **drawn}.items():
        text = page.read_text() if page.exists() else ""
        if fresh != text:
            stale += 1
            print(f"{page.relative_to(ROOT)}: {'out of date' if options.check else 'rewritten'}")
            if not options.check:
                page.write_text(fresh)
    return int(options.check and stale > 0)


if __name__ == "__main__":
    sys.exit(main())
