"""Attention on the CPU behind long prompts, beside that of another commit: keys and values come from memory.

    python -m bench.kernels.attention_depth --against b4d478e0 --out docs/results/cpu_attention_depth.json

Heads of published models, in so many layers that no processor's cache holds their keys and values. Both
commits have the same caches and are asked in turn, and their results must be the same bits. `ms` is the least
time of a layer, as a mean over the layers. With one thread it is the thread's own time, so that other
programs do not count. Cases are added to those that the file of results has of the same two commits.
"""

import argparse
import json
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from bench.engine.versus_commit import Commit, Worker, other_commit
from bench.results import ROOT, add_result_options, commit, write_result
from coldstream.placement.hardware import Hardware

WORKER: Final = Path(__file__).with_name("attention_worker.py")
MEMORY: Final = 100_000_000  # bytes of keys and values


@dataclass(frozen=True)
class Heads:
    """Of queries, of keys and values, numbers of one, and the window."""

    heads: tuple[int, int]
    head_dim: int
    window: int | None = None


SHAPES: Final = {
    "Qwen3.6-35B-A3B": Heads((16, 2), 256),
    "gpt-oss-20b": Heads((64, 8), 64),
    "gpt-oss-20b, window": Heads((64, 8), 64, 128),
    "gemma-4-26B-A4B": Heads((16, 2), 512),
    "gemma-4-26B-A4B, window": Heads((16, 8), 256, 1024),
    "Laguna-XS-2.1": Heads((48, 8), 128),
    "Laguna-XS-2.1, window": Heads((64, 8), 128, 512),
}


def cases(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What the worker opens, with the name of the shape."""
    for name in options.shapes:
        shape = SHAPES[name]
        for kv_type in options.types:
            for depth in options.depths:
                if shape.window is not None and depth != options.depths[0]:
                    continue  # it reads as much behind all
                yield {
                    "shape": name,
                    **asdict(shape),
                    "kv_type": kv_type,
                    "depth": depth,
                    "sequences": options.sequences,
                    "rows": options.rows,
                    "tree": options.tree,
                    "memory": MEMORY,
                    "own_time": options.threads == 1,
                }


def compared(workers: Sequence[Worker], case: dict[str, Any], repeats: int) -> dict[str, Any]:
    """Figures of a case by both commits. RuntimeError if their bits differ."""
    opened, _ = (worker.ask(case) for worker in workers)
    least: list[list[float]] = [[], []]
    for number in range(repeats):
        digests = set()
        for i in (0, 1) if number % 2 else (1, 0):
            answer = workers[i].ask({})
            digests.add(answer["digest"])
            least[i] = [
                min(pair) for pair in zip(least[i] or answer["seconds"], answer["seconds"], strict=True)
            ]
        if len(digests) > 1:
            raise RuntimeError(f"the commits give different bits: {case}")
    new, old = (sum(each) / len(each) for each in least)
    named = {name: case[name] for name in ("shape", "kv_type", "depth", "sequences", "rows", "tree")}
    return named | {
        "layers": opened["layers"],
        "old_ms": old * 1e3,
        "new_ms": new * 1e3,
        "time_ratio": new / old,
        "old_gb_s": opened["bytes"] / old / 1e9,
        "new_gb_s": opened["bytes"] / new / 1e9,
    }


def command_of(options: argparse.Namespace) -> str:
    """Without files."""
    words = ["python", "-m", "bench.kernels.attention_depth", "--against", options.against]
    for name in ("threads", "tier", "rows", "sequences", "repeats"):
        words += [f"--{name}", str(getattr(options, name))]
    for name in ("shapes", "types", "depths"):
        words += [f"--{name}", *map(str, getattr(options, name))]
    return shlex.join([*words, "--tree"] if options.tree else words)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--against", required=True, metavar="COMMIT")
    parser.add_argument("--old", type=Path, help="a checkout of that commit, with its extension")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tier", default="auto")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--types", nargs="+", default=["i16", "i8"])
    parser.add_argument("--depths", nargs="+", type=int, default=[4096, 32768])
    parser.add_argument("--rows", type=int, default=1, help="of a sequence")
    parser.add_argument("--sequences", type=int, default=1)
    parser.add_argument("--tree", action="store_true", help="rows are those of a draft")
    parser.add_argument("--repeats", type=int, default=12)
    add_result_options(parser)
    options = parser.parse_args()
    command = command_of(options)
    name, found = options.commit or commit(), []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as cleanup:
        commits = Commit(name, Path(sys.executable)), other_commit(options, Path(folder))
        workers = []
        for each in commits:
            workers.append(
                Worker(each, {"threads": options.threads, "tier": options.tier}, Path(folder), WORKER)
            )
            cleanup.callback(workers[-1].close)
        for case in cases(options):
            found.append(
                {"threads": options.threads, "tier": options.tier} | compared(workers, case, options.repeats)
            )
            print(json.dumps(found[-1]), flush=True)
    if options.out:
        path = ROOT / options.out
        before = json.loads(path.read_text()) if path.exists() else {}
        if (before.get("commit"), before.get("against")) != (name, options.against):
            before = {"commands": [], "cases": []}
        result = {
            "against": options.against,
            "machine": asdict(Hardware.measure()),
            "commands": [*before["commands"], command],
            "cases": [*before["cases"], *found],
        }
        write_result(result, path, name)


if __name__ == "__main__":
    main()
