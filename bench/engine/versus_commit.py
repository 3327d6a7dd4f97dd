"""Paired CPU benchmark against an earlier commit: both models loaded, the two sides timed in turn, ratios
pair by pair.

    git worktree add /tmp/old COMMIT, build its extension into /tmp/old/src/coldstream/kernels, then
    python -m bench.engine.versus_commit MODEL --old /tmp/old --old-commit COMMIT --out FILE

The earlier sources run with the packages of this environment; their `bench/engine/worker.py` takes the same
commands.
"""

import argparse
import os
import statistics
import sys
import sysconfig
import tempfile
import venv
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.peers.versus_llama_cpp import CONTEXT, Case, Side
from bench.results import write_result
from coldstream.placement.hardware import Hardware

CASES = (Case("pp512", "prefill", 512), Case("pp2048", "prefill", 2048), Case("tg128", "decode", 128))


def old_side(options: argparse.Namespace, folder: Path) -> Side:
    """A worker of the earlier sources, in an environment that has the packages but not this installation."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    packages = sysconfig.get_path("purelib")
    paths = os.pathsep.join(str(path) for path in (options.old / "src", packages))
    environment = {**os.environ, "PYTHONPATH": paths}
    command = (str(python), "-m", "bench.engine.worker", *words(options))
    return Side(*command, folder=options.old, environment=environment)


def words(options: argparse.Namespace) -> tuple[str, ...]:
    """The worker's arguments."""
    ram = () if options.ram is None else (str(options.ram),)
    return (str(options.model.resolve()), str(options.threads), str(CONTEXT), options.tier, *ram)


def compare(case: Case, new: Side, old: Side, num_pairs: int) -> dict[str, float]:
    """The medians of both sides and of the ratios of pairs."""
    for side in (new, old):
        case.prepare(side)
    pairs = [(case.run(new), case.run(old)) for _ in range(num_pairs)]
    ratios = sorted(a / b for a, b in pairs)
    return {
        "new_tok_s": statistics.median(a for a, _ in pairs),
        "old_tok_s": statistics.median(b for _, b in pairs),
        "ratio": statistics.median(ratios),
        "ratio_min": ratios[0],
        "ratio_max": ratios[-1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--old", type=Path, required=True, help="the earlier sources, with their extension")
    parser.add_argument("--old-commit", required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tier", default="auto")
    parser.add_argument(
        "--ram", type=int, help="bytes that each side may take; other experts are on the disk"
    )
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        old = old_side(options, Path(folder))
        new = Side(sys.executable, "-m", "bench.engine.worker", *words(options))
        cases: dict[str, Any] = {}
        for case in CASES:
            cases[case.name] = compare(case, new, old, options.pairs)
            print(case.name, cases[case.name], flush=True)
        new.close()
        old.close()
    result = {
        "model": options.model.name,
        "command": f"python -m bench.engine.versus_commit {options.model.name} --threads {options.threads}"
        + (f" --ram {options.ram}" if options.ram else ""),
        "machine": asdict(Hardware.measure()),
        "old_commit": options.old_commit,
        "tiers": [new.about["tier"], old.about["tier"]],
        "pairs": options.pairs,
        "cases": cases,
    }
    write_result(result, options.out)


if __name__ == "__main__":
    main()
