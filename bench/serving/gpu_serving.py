"""A server on a GPU with the full-size model, over HTTP: load, long conversations, and answers side by side.

    python -m bench.serving.gpu_serving full.gguf      writes the model file first if it isn't there (21 GB)

*load*: numbers of clients, each with streams of its own, with all experts on the GPU and with a part of them.
*turns*: conversations of 80,000 tokens, whose next turn has to begin within a second. *equality*: requests of
all kinds side by side, with a part of the experts and with drafts, each of which has to get what a server
gives it that has it alone, all experts on the GPU and no drafts. A wrong answer fails the run. Each part is
written as soon as it is measured, `--parts` beside those that the result has.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import httpx2

from bench.device import describe
from bench.engine.gpu import numbers, write_model
from bench.full_size_model import FULL_SHAPE
from bench.results import ROOT, add_result_options, commit, write_result
from bench.serving.conversations import Turn, figures
from bench.serving.served import TEMPLATE, Served, served
from bench.serving.serving_equality import alone, together, wishes
from bench.serving.walking_clients import conversation, first_ids, load, run_client

LOAD_PROMPT, LOAD_TOKENS, LOAD_CONTEXT = 512, 128, 1024
EQUALITY_CONTEXT, LONGEST_PROMPT, REQUESTS = 2048, 1000, 32
PROMPT_CACHE: Final = "16G"  # of RAM: a recurrent state every 2,048 tokens takes 2.5 GB of a conversation
ROOM: Final = 1024  # tokens of a conversation beyond its first prompt
MAX_NEXT_S: Final = 1.0
REQUESTS_SEED: Final = 5


def props(server: Served) -> dict[str, Any]:
    found: dict[str, Any] = httpx2.get(server.url + "/props", timeout=60).raise_for_status().json()
    return found


def share(server: Served) -> float:
    """Of the experts that are on the GPU."""
    placement = props(server)["placement"]
    return float(placement["resident_experts"] / placement["experts"])


def loads(options: argparse.Namespace, folder: Path, vocab_size: int) -> dict[str, Any]:
    """Figures for each budget and number of clients."""
    found = []
    for vram in options.vram:
        settings = ("--parallel", str(max(options.clients)), "--ctx-size", str(LOAD_CONTEXT), "--vram", vram)
        with served(options.model, folder / "load.log", *settings, device=options.device) as server:
            firsts = first_ids(vocab_size, LOAD_PROMPT + LOAD_TOKENS)
            rows = []
            for count in options.clients:
                clients = partial(
                    load,
                    firsts=firsts,
                    num_clients=count,
                    num_prompt=LOAD_PROMPT,
                    count=LOAD_TOKENS,
                    seconds=options.seconds,
                )
                rows.append(run_client(server.url, clients))
                print(vram, rows[-1], file=sys.stderr, flush=True)
            found.append({"vram": vram, "experts_share": share(server), "rows": rows})
    return {"prompt_tokens": LOAD_PROMPT, "new_tokens": LOAD_TOKENS, "budgets": found}


def turns(options: argparse.Namespace, folder: Path, vocab_size: int) -> dict[str, Any]:
    """Figures of long conversations, each with another text."""
    settings = ("--parallel", "2", "--ctx-size", str(options.tokens + ROOM), "--prompt-cache", PROMPT_CACHE)
    found: list[Turn] = []
    with served(options.model, folder / "turns.log", *settings, device=options.device) as server:
        for number in range(options.conversations):
            first = 2000 + number * (vocab_size // (2 * options.conversations))
            talk = partial(conversation, first=first, num_tokens=options.tokens, vocab_size=vocab_size)
            found += run_client(server.url, talk)
            print(*found[-8:], sep="\n", file=sys.stderr, flush=True)
    result = figures(found)
    next_s = result["kinds"]["next turn"]["first_s"]
    late = [f"the next turn begins after {next_s:.2f} s"] if next_s > MAX_NEXT_S else []
    return {
        "conversations": options.conversations,
        "tokens": options.tokens,
        **result,
        "missed": result["missed"] + late,
    }


def equality(options: argparse.Namespace, folder: Path, vocab_size: int) -> dict[str, Any]:
    """Answers side by side beside those of a server that has each alone."""
    asked = wishes(REQUESTS, vocab_size, LONGEST_PROMPT, REQUESTS_SEED)
    context = ("--ctx-size", str(EQUALITY_CONTEXT))
    settings = ("--parallel", "1", *context)
    with served(options.model, folder / "alone.log", *settings, device=options.device) as server:
        expected = run_client(server.url, lambda http: alone(http, asked))
        shares = {"alone_experts_share": share(server)}
    settings = ("--parallel", str(REQUESTS), *context, "--vram", options.vram[-1])
    settings += ("--spec-type", options.spec_type, "--tree-budget", str(options.tree_budget))
    with served(options.model, folder / "shared.log", *settings, device=options.device) as server:
        differs = run_client(
            server.url, lambda http: together(http, asked, expected, options.repeats, REQUESTS_SEED)
        )
        counts = props(server)["statistics"]
        shares["experts_share"] = share(server)
    names = ("finished_requests", "cancelled_requests", "reused_tokens", "generated_tokens", "drafts")
    names += ("drafted_tokens", "accepted_tokens", "preemptions", "expert_misses")
    print(len(differs), "differ", {name: counts[name] for name in names}, file=sys.stderr, flush=True)
    return {
        "requests": REQUESTS,
        "repeats": options.repeats,
        "spec_type": options.spec_type,
        "tree_budget": options.tree_budget,
        "vram": options.vram[-1],
        **shares,
        "different": [asdict(each) for each in differs],
        "tokens": sum(each["completion_tokens"] for each in expected),
        "statistics": {name: counts[name] for name in names},
        "faults": [f"{len(differs)} answers differ"] if differs else [],
        "missed": [],
    }


Part = Callable[[argparse.Namespace, Path, int], dict[str, Any]]
PARTS: Final[dict[str, Part]] = {"load": loads, "turns": turns, "equality": equality}


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    found.add_argument("model", type=Path)
    found.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    found.add_argument(
        "--vram", nargs="+", default=["auto", "11G"], help="the last one has a part of the experts"
    )
    found.add_argument("--clients", type=numbers, default=[1, 4, 16, 32])
    found.add_argument("--seconds", type=float, default=12, help="of each number of clients")
    found.add_argument("--tokens", type=int, default=80_000, help="of a conversation's first prompt")
    found.add_argument("--conversations", type=int, default=2)
    found.add_argument("--repeats", type=int, default=20)
    found.add_argument("--spec-type", default="ngram")
    found.add_argument("--tree-budget", type=int, default=4, help="tokens of each draft, whatever they cost")
    found.add_argument("--layers", type=int, default=FULL_SHAPE.layers, help="of a smaller file, for a trial")
    found.add_argument("--vocab", type=int, default=FULL_SHAPE.vocab)
    found.add_argument("--device", default="cuda")
    add_result_options(found, ROOT / "docs" / "results" / "gpu" / "serving.json")
    return found


def command(options: argparse.Namespace) -> str:
    """What measures all parts with these settings."""
    words = ["python", "-m", "bench.serving.gpu_serving", options.model.name]
    for name, value in vars(options).items():
        if name not in ("model", "parts", "out", "commit", "device") and value != parser().get_default(name):
            words += ["--" + name.replace("_", "-")]
            words += (
                value if name == "vram" else [",".join(map(str, value)) if name == "clients" else str(value)]
            )
    return shlex.join(words)


def main() -> int:
    options = parser().parse_args()
    write_model(options.model, options.layers, options.vocab, TEMPLATE.read_text())
    known = json.loads(options.out.read_text()) if options.out.exists() else {}
    parts = {name: known[name] for name in PARTS if name in known}
    about = {"commit": options.commit or commit(), "machine": describe(options.device)}
    for name in options.parts:
        with TemporaryDirectory() as folder:
            parts[name] = {**about, **PARTS[name](options, Path(folder), options.vocab)}
        ordered = {name: parts[name] for name in PARTS if name in parts}
        write_result({"command": command(options), **ordered}, options.out, options.commit)
    return 1 if any(parts[name].get("faults") or parts[name].get("missed") for name in options.parts) else 0


if __name__ == "__main__":
    sys.exit(main())
