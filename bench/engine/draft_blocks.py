"""A DFlash drafter's blocks beside those of another commit: times of a draft, and texts with its drafts.

    python -m bench.engine.draft_blocks --against 0e9898cb --out docs/results/gpu/draft_blocks.json
    python -m bench.engine.draft_blocks --against 0e9898cb --device cpu --kinds bundled

As in `bench.engine.versus_commit`, both commits have a model open and answer in turn. Each pair gives one
ratio; above 1 this commit is faster. A `draft` observes three rows and drafts a block behind so many
committed ones. Drafters have the published shape for the 35B, random weights of a type, and a target of four
layers. The bundled drafter's `text` also says how many drafted tokens a step accepts.
"""

import argparse
import json
import shlex
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from bench.device import describe
from bench.engine.gpu import write_model
from bench.engine.versus_commit import Commit, Measured, Worker, compared, other_commit
from bench.random_drafter import PUBLISHED
from bench.random_drafter import write as write_drafter
from bench.results import ROOT, add_result_options, commit, write_result
from coldstream.assets import demo_drafter_path, demo_model_path

LAYERS, VOCAB = 4, 32_768  # of the target
SPEC: Final = replace(
    PUBLISHED, vocab_size=VOCAB, mask_id=VOCAB - 1, aux_layers=tuple(range(LAYERS)), num_target_layers=LAYERS
)
TYPES: Final = ("BF16", "Q8_0")
KINDS: Final = ("bundled", *TYPES)
ROWS_BEHIND: Final = (64, 2100)
WORKER: Final = Path(__file__).with_name("draft_worker.py")
CTX_SIZE, NEW_TOKENS = 4096, 256
PROMPTS: Final = (
    "def add(a, b):\n",
    "import os\nimport sys\n\n\ndef main() -> None:\n    ",
    "class Shape:\n    def __init__(self",
    "for name in sorted(os.listdir(path)):\n",
)


@dataclass(frozen=True)
class DraftRuns:
    """Drafts a second of one commit behind so many committed rows."""

    worker: Worker
    rows: int
    repeats: int

    def run(self, number: int) -> tuple[float, Any]:
        answer = self.worker.ask({"rows": self.rows, "repeats": self.repeats})
        return 1 / statistics.median(answer["seconds"]), None


@dataclass(frozen=True)
class TextRuns:
    """Tokens a second of texts with drafts, which must be the same ones by both commits."""

    worker: Worker
    steps: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def run(self, number: int) -> tuple[float, Any]:
        answer = self.worker.ask({"prompt": PROMPTS[number % len(PROMPTS)], "new_tokens": NEW_TOKENS})
        self.steps.append(answer["steps"])
        self.accepted.append(answer["accepted"])
        return (NEW_TOKENS - 1) / answer["seconds"], answer["tokens"]

    def accepted_a_step(self) -> float:
        return sum(self.accepted) / sum(self.steps)


def cells_of(new: Worker, old: Worker, kind: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Each with figures of both commits."""
    for rows in ROWS_BEHIND:
        both: list[Measured] = [DraftRuns(each, rows, options.repeats) for each in (new, old)]
        found = compared(*both, options.pairs)
        medians = {f"{name}_ms": 1e3 / statistics.median(found[f"{name}_tok_s"]) for name in ("new", "old")}
        kept = {name: found[name] for name in ("ratio", "interval")}
        yield {"drafter": kind, "what": "draft", "rows_behind": rows} | medians | kept
    if kind == "bundled":
        texts = TextRuns(new), TextRuns(old)
        found = compared(*texts, options.pairs)
        accepted = {
            f"{name}_accepted_a_step": each.accepted_a_step()
            for name, each in zip(("new", "old"), texts, strict=True)
        }
        yield {"drafter": kind, "what": "text"} | found | accepted


@contextmanager
def workers(commits: Sequence[Commit], kind: str, options: argparse.Namespace) -> Iterator[list[Worker]]:
    """Both commits with a model and a drafter open. Files that aren't there are written."""
    model, drafter = Path(demo_model_path()), Path(demo_drafter_path())
    if kind != "bundled":
        model, drafter = options.small.resolve(), options.small.resolve().with_name(f"drafter-{kind}.gguf")
        write_model(model, LAYERS, VOCAB)
        if not drafter.exists():
            write_drafter(drafter, SPEC, kind)
    config: dict[str, Any] = {"model": str(model), "model_draft": str(drafter), "device": options.device}
    config["ctx_size"] = CTX_SIZE
    opened: list[Worker] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for each in commits:
                opened.append(Worker(each, config, Path(folder), WORKER))
            yield opened
        finally:
            for worker in opened:
                worker.close()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--against", required=True, metavar="COMMIT")
    parser.add_argument("--old", type=Path, help="a checkout of that commit, with its extension")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="drafters")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--repeats", type=int, default=50, help="drafts of a run")
    parser.add_argument("--small", type=Path, default=Path("four-layers.gguf"))
    add_result_options(parser)
    options = parser.parse_args()
    words = ["python", "-m", "bench.engine.draft_blocks", "--against", options.against]
    words += ["--device", options.device, "--kinds", *options.kinds, "--pairs", str(options.pairs)]
    words += ["--repeats", str(options.repeats)]
    result: dict[str, Any] = {"command": shlex.join(words), "machine": describe(options.device), "cells": []}
    with tempfile.TemporaryDirectory() as folder:
        commits = (
            Commit(options.commit or commit(), Path(sys.executable)),
            other_commit(options, Path(folder)),
        )
        for kind in options.kinds:
            with workers(commits, kind, options) as (new, old):
                for cell in cells_of(new, old, kind, options):
                    result["cells"].append(cell)
                    print(json.dumps(cell), flush=True)
    if options.out:
        write_result(result, ROOT / options.out, options.commit)
    return 0


if __name__ == "__main__":
    sys.exit(main())
