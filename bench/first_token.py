"""Seconds from `coldstream run MODEL --vram 6G -p …` to the first token, and where they go.

    python bench/first_token.py full.gguf --out docs/results/gpu/first_token.json

The model file is read first, so that it is in the page cache. Each start is a process of its own, timed from
its launch to the first byte of its answer: once with nothing kept from earlier starts (compiled kernels and
measured rates lie in the user's directories, which are empty then), several times with both, and once more
of each kind under `sampled_start.py`, which says where the time goes.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from device import describe
from full_size_model import FULL_SHAPE
from gpu import write_model
from results import ROOT, write_result

STARTS = 3
PROMPT = "def read_lines(path):"


def arguments(model: Path, vram: str) -> list[str]:
    """The command line that is timed, of one token."""
    sampled = ["-n", "1", "--temp", "0", "--raw", "--no-echo", "--quiet"]
    return ["run", str(model), "--vram", vram, "-p", PROMPT, *sampled]


def timed(command: list[str], home: Path) -> tuple[float, float]:
    """Seconds from the launch of a process to the first byte on its standard output, and to its end.

    Raises RuntimeError if it fails.
    """
    environment = os.environ | {"HOME": str(home)}
    environment = {name: value for name, value in environment.items() if not name.startswith("XDG_")}
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, env=environment) as process:
        assert process.stdout is not None
        first = process.stdout.read(1)
        first_s = time.perf_counter() - start
        process.stdout.read()
    end_s = time.perf_counter() - start
    if process.returncode or not first:
        raise RuntimeError(f"{command} ended with {process.returncode}")
    return first_s, end_s


def sampled(argv: list[str], home: Path) -> dict[str, Any]:
    """Seconds of a start under `sampled_start.py`, by phase and by function."""
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder, "profile.json")
        script = Path(__file__).with_name("sampled_start.py")
        _, total_s = timed([sys.executable, str(script), str(kept), *argv], home)
        found: dict[str, Any] = json.loads(kept.read_text())
    phases: dict[str, float] = found["phases_s"]
    phases["start and end of Python"] = total_s - sum(phases.values())
    return {
        "total_s": total_s,
        "phases_s": dict(sorted(phases.items(), key=lambda item: -item[1])),
        "functions_s": found["functions_s"],
    }


def measure(model: Path, vram: str) -> dict[str, Any]:
    """All starts; see the module docstring."""
    argv = arguments(model, vram)
    command = [sys.executable, "-m", "coldstream", *argv]
    with tempfile.TemporaryDirectory() as home, tempfile.TemporaryDirectory() as empty:
        first_s, _ = timed(command, Path(home))
        later_s = [timed(command, Path(home))[0] for _ in range(STARTS)]
        later, first = sampled(argv, Path(home)), sampled(argv, Path(empty))
    return {
        "vram": vram,
        "first_start_s": first_s,
        "later_starts_s": later_s,
        "profiled_run_s": later["total_s"],
        "phases_s": later["phases_s"],
        "functions_s": later["functions_s"],
        "profiled_first_run": first,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--vram", default="6G")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", help="of these sources, where there is no repository")
    options = parser.parse_args()
    write_model(options.model, FULL_SHAPE.layers, FULL_SHAPE.vocab)
    with options.model.open("rb", buffering=0) as file:
        while file.read(64 * 2**20):
            pass
    result = {
        "command": f"python bench/first_token.py {options.model.name} --vram {options.vram}",
        "machine": describe("cuda"),
        "file_bytes": options.model.stat().st_size,
        **measure(options.model, options.vram),
    }
    write_result(result, options.out, options.commit)
    return 0


if __name__ == "__main__":
    sys.exit(main())
