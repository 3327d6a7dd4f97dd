"""Seconds from `coldstream run MODEL --vram 6G -p …` to the first token, and where they go.

    python -m bench.engine.first_token full.gguf --peer llama-completion --out FILE

The model file is read first, so that it is in the page cache, and byte code is compiled, as an installation
has it. Each start is a process of its own, timed from its launch to the first byte of its answer.

One start has nothing kept from earlier ones: compiled kernels and measured rates lie in the user's
directories, which are empty then. Several have both, and several more have all experts on the GPU. One of
each of the first two kinds runs under `sampled_start.py`, which says where the time goes.

With --peer, that program of llama.cpp answers the same prompt between the later starts, with the
experts of as many layers on the GPU as leave it within the same memory. By default it lays out anew the
weights that the CPU multiplies, and runs the model once on tokens of its own before the prompt; it is timed
without either as well.
"""

import argparse
import compileall
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Any

from bench.device import describe
from bench.engine.gpu import write_model
from bench.full_size_model import FULL_SHAPE
from bench.peers.gpu_peer_library import buffer_sizes
from bench.results import ROOT, add_result_options, write_result

STARTS = 3
# Of 40 layers: the experts of six others and the rest of the model fit beside its buffers into 6 GiB.
PEER_CPU_LAYERS = 34
PEER_BARE = ["--no-warmup", "--no-repack"]
PROMPT = "def read_lines(path):"


def arguments(model: Path, vram: str) -> list[str]:
    """The command line that is timed, of one token."""
    sampled = ["-n", "1", "--temp", "0", "--raw", "--no-echo", "--quiet"]
    return ["run", str(model), "--vram", vram, "-p", PROMPT, *sampled]


def peer_command(program: str, model: Path, num_cpu_layers: int) -> list[str]:
    """llama.cpp's command line of one token, with the experts of so many layers on the CPU."""
    placed = ["-ngl", "99", "--n-cpu-moe", str(num_cpu_layers), "--fit", "off"]
    sampled = ["-n", "1", "--temp", "0", "--ignore-eos", "--special"]
    bare = ["-no-cnv", "--no-display-prompt", "--simple-io", "-lv", "4"]
    return [program, "-m", str(model), "-c", "4096", *placed, "-p", PROMPT, *sampled, *bare]


def timed(command: list[str], home: Path, log: IO[bytes] | None = None) -> tuple[float, float]:
    """Seconds from the launch of a process to the first byte on its standard output, and to its end.

    log: where its standard error goes, if not where ours does. Raises RuntimeError if it fails.
    """
    environment = os.environ | {"HOME": str(home)}
    environment = {name: value for name, value in environment.items() if not name.startswith("XDG_")}
    start = time.perf_counter()
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": log}
    with subprocess.Popen(command, cwd=ROOT, env=environment, **pipes) as process:
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


class Peer:
    """Starts of llama.cpp, as it is by default, and with nothing but the prompt."""

    def __init__(self, program: str, model: Path, num_cpu_layers: int) -> None:
        self._commands = {
            "starts_s": peer_command(program, model, num_cpu_layers),
            "bare_starts_s": [*peer_command(program, model, num_cpu_layers), *PEER_BARE],
        }
        self._seconds: dict[str, list[float]] = {name: [] for name in self._commands}
        self._weights_mib: dict[str, float] = {}

    def start(self, home: Path) -> None:
        """Once in each way."""
        for name, command in self._commands.items():
            with tempfile.TemporaryFile() as log:
                self._seconds[name].append(timed(command, home, log)[0])
                log.seek(0)
                self._weights_mib = buffer_sizes(log.read().decode(errors="replace").splitlines())

    def result(self) -> dict[str, Any]:
        """For the file, with where the weights were."""
        (_, _, model, *options) = self._commands["starts_s"]
        shown = shlex.join(["llama-completion", "-m", Path(model).name, *options])
        return {"command": shown, "weights_mib": self._weights_mib, **self._seconds}


def measure(model: Path, vram: str, peer: Peer | None) -> dict[str, Any]:
    """All starts; see the module docstring."""
    argv = arguments(model, vram)
    command = [sys.executable, "-m", "coldstream", *argv]
    resident = [sys.executable, "-m", "coldstream", *arguments(model, "auto")]
    later_s = []
    with tempfile.TemporaryDirectory() as home, tempfile.TemporaryDirectory() as empty:
        first_s, _ = timed(command, Path(home))
        for _ in range(STARTS):
            later_s.append(timed(command, Path(home))[0])
            if peer is not None:
                peer.start(Path(home))
        resident_s = [timed(resident, Path(home))[0] for _ in range(STARTS)]
        later, first = sampled(argv, Path(home)), sampled(argv, Path(empty))
    return {
        "vram": vram,
        "first_start_s": first_s,
        "later_starts_s": later_s,
        "resident_starts_s": resident_s,
        "profiled_run_s": later["total_s"],
        "phases_s": later["phases_s"],
        "functions_s": later["functions_s"],
        "profiled_first_run": first,
        **({} if peer is None else {"llama_cpp": peer.result()}),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--vram", default="6G")
    parser.add_argument("--peer", help="llama.cpp's llama-completion, with the backends beside it")
    parser.add_argument("--peer-cpu-moe", type=int, default=PEER_CPU_LAYERS, help="its --n-cpu-moe")
    add_result_options(parser)
    options = parser.parse_args()
    write_model(options.model, FULL_SHAPE.layers, FULL_SHAPE.vocab)
    compileall.compile_dir(ROOT / "src", quiet=1)
    with options.model.open("rb", buffering=0) as file:
        while file.read(64 * 2**20):
            pass
    peer = Peer(options.peer, options.model, options.peer_cpu_moe) if options.peer else None
    words = ["python", "-m", "bench.engine.first_token", options.model.name, "--vram", options.vram]
    words += ["--peer", "llama-completion", "--peer-cpu-moe", str(options.peer_cpu_moe)] if peer else []
    result = {
        "command": shlex.join(words),
        "machine": describe("cuda"),
        "file_bytes": options.model.stat().st_size,
        **measure(options.model, options.vram, peer),
    }
    write_result(result, options.out, options.commit)
    return 0


if __name__ == "__main__":
    sys.exit(main())
