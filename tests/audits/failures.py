"""A server that is made to fail, and one with long conversations: what is lost, and how soon all is well.

    python -m tests.audits.failures --out docs/results/failures.json

Three parts, each over servers of its own on the CPU with the bundled model: the engine process killed under
load (`failure_kills.py`), a storm of requests whose clients leave (`failure_storm.py`), and conversations of
8,000 tokens (`bench/serving/conversations.py`). A part with `faults`, or that missed a time, fails the run.
`--parts` measures some of them anew and keeps the others that the result has.
"""

import argparse
import json
import shlex
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from bench.results import commit, write_result
from bench.serving.conversations import turns
from coldstream.assets import demo_model_path
from coldstream.placement.hardware import Hardware
from tests.audits.failure_kills import kills
from tests.audits.failure_storm import storm

Part = Callable[[Path, argparse.Namespace], dict[str, Any]]


def _kills(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    counts = {"count": options.kills, "clients": options.clients, "num_questions": options.questions}
    return kills(demo_model_path(), folder, threads=options.threads, seed=options.seed, **counts)


def _storm(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    times = {"rate": options.rate, "seconds": options.storm_s, "calm_s": options.calm_s}
    return storm(demo_model_path(), folder, threads=options.threads, seed=options.seed, **times)


def _turns(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    return turns(folder, num_tokens=options.tokens, count=options.conversations, threads=options.threads)


PARTS: Final[dict[str, Part]] = {"kills": _kills, "storm": _storm, "turns": _turns}


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    found.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    found.add_argument("--kills", type=int, default=100)
    found.add_argument("--clients", type=int, default=3, help="that ask while engines are killed")
    found.add_argument("--questions", type=int, default=24, help="that they choose from")
    found.add_argument("--rate", type=float, default=200, help="requests a second in the storm")
    found.add_argument("--storm-s", type=float, default=60)
    found.add_argument("--calm-s", type=int, default=20, help="before and after the storm")
    found.add_argument("--tokens", type=int, default=8000, help="of a conversation's system prompt")
    found.add_argument("--conversations", type=int, default=3)
    found.add_argument("--threads", type=int, default=2)
    found.add_argument("--seed", type=int, default=1)
    found.add_argument("--out", type=Path)
    return found


def command(options: argparse.Namespace) -> str:
    """What measures all parts with these settings."""
    words = ["python", "-m", "tests.audits.failures"]
    for name, value in vars(options).items():
        if name not in ("parts", "out") and value != parser().get_default(name):
            words += ["--" + name.replace("_", "-"), f"{value:g}"]
    return shlex.join(words)


def main() -> int:
    options = parser().parse_args()
    known = json.loads(options.out.read_text()) if options.out and options.out.exists() else {}
    parts = {name: known[name] for name in PARTS if name in known}
    for name in options.parts:
        with tempfile.TemporaryDirectory() as folder:
            parts[name] = {"commit": commit(), **PARTS[name](Path(folder), options)}
        wrong = [*parts[name]["faults"], *parts[name]["missed"]]
        print(name, *wrong or ["as it should be"], sep="\n  ", file=sys.stderr, flush=True)
    result = {
        "command": command(options),
        "cpu": Hardware.measure().cpu_name,
        "threads": options.threads,
        **{name: parts[name] for name in PARTS if name in parts},
    }
    write_result(result, options.out)
    return 1 if any(parts[name]["faults"] or parts[name]["missed"] for name in options.parts) else 0


if __name__ == "__main__":
    sys.exit(main())
