"""This commit beside another one: named lines, in interleaved pairs, with the interval of their ratios.

    python -m bench.engine.versus_commit --against 93970e7 --out docs/results/versus_93970e7.json
    python -m bench.engine.versus_commit --against 93970e7 --lines 'gpu-*' --full full.gguf --out FILE

Each commit runs in an environment of its own, over its sources and its extension: this one, and one with the
same packages. It is asked through what all commits have: `LLM`, and the server over HTTP. Both have a model
open at the same time, and the idle one waits. The other commit is checked out and built here (packages cmake,
ninja and nanobind), or --old is a checkout of it with its extension. A pair gives one ratio, this commit's
tokens a second over the other's, and they begin alternately. The exit code is 1 if the interval of a line's
median ratio lies below LEAST. A text that differs ends the run. Lines that are not measured keep what the
result file has.

The models are the bundled one and files of the full-size shape, which are written if they aren't there:
`small` has four layers (2 GB), `full` all of them (21 GB). Lines of a GPU are left out where there is none.
"""

import argparse
import asyncio
import json
import math
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final, Protocol

from bench.engine.commit_lines import GIB, LINES, Line, ServerLine, Setting
from bench.engine.gpu import write_model
from bench.engine.gpu_hybrid import budget_with
from bench.full_size_model import FULL_SHAPE
from bench.results import ROOT, add_result_options, commit
from bench.serving.load import Client, Meter, Texts, closed_loop
from bench.serving.served import Served, served
from coldstream.assets import demo_model_path
from coldstream.kernels.cuda.device import find_gpu
from coldstream.placement.hardware import Hardware
from coldstream.planning.machine import measured_hardware
from tools.checkouts import build_extension, check_out, make_environment

LEAST: Final = 0.97
CERTAINTY: Final = 0.95
DEMO_VRAM: Final = GIB
ALL_BYTES: Final = 2**50  # of experts: more than there are
SIZES: Final = {"small": (4, 32_768), "full": (FULL_SHAPE.layers, FULL_SHAPE.vocab)}  # layers, vocabulary
WORKER: Final = Path(__file__).with_name("commit_worker.py")


@dataclass(frozen=True)
class Commit:
    """A name, and the interpreter that imports the sources."""

    name: str
    python: Path


class Measured(Protocol):
    """A commit with a model open: tokens a second of a run, and the tokens; none where a text is drawn."""

    def run(self, number: int) -> tuple[float, Any]: ...


class Worker:
    """A model that is open in a process of a commit."""

    def __init__(self, of: Commit, arguments: dict[str, Any], folder: Path, script: Path = WORKER) -> None:
        """folder: where it runs, so that no module of this checkout is found first."""
        command = [str(of.python), str(script), json.dumps(arguments)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=folder
        )
        try:
            self._answer()
        except RuntimeError:
            self.close()
            raise

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        """Raises RuntimeError if the process ends instead."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a worker ended with {self._process.wait()}: {self._process.args!r}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        self._process.communicate()


@dataclass(frozen=True)
class LineRuns:
    """Runs of a line by one commit."""

    line: Line
    worker: Worker

    def run(self, number: int) -> tuple[float, Any]:
        answer = self.worker.ask(self.line.request(number))
        return self.line.rate(answer), answer["tokens"]


@dataclass(frozen=True)
class ServerRuns:
    """Times of load for one commit's server."""

    line: ServerLine
    server: Served

    def run(self, number: int) -> tuple[float, Any]:
        return asyncio.run(self._load(number)), None

    async def _load(self, number: int) -> float:
        client = Client(self.server.url, Texts(number), self.server.api.pid)
        meter = Meter(client)
        async with client.http:
            await closed_loop(meter, self.line.clients, self.line.seconds)
        found = meter.load()
        if found.lost or found.refused:
            raise RuntimeError(f"{found.lost} requests lost, {found.refused} refused")
        return found.tok_s


def compared(new: Measured, old: Measured, pairs: int) -> dict[str, Any]:
    """Figures of both commits in pairs, after a run of each that does not count.

    Raises RuntimeError if texts differ.
    """
    commits = {"new": new, "old": old}
    for each in commits.values():
        each.run(0)
    rates: dict[str, list[float]] = {name: [] for name in commits}
    for number in range(1, pairs + 1):
        texts = []
        for name in sorted(commits, reverse=bool(number % 2)):
            rate, tokens = commits[name].run(number)
            rates[name].append(rate)
            texts.append(tokens)
        if texts[0] != texts[1]:
            raise RuntimeError(f"the texts of run {number} differ")
    ratios = [a / b for a, b in zip(rates["new"], rates["old"], strict=True)]
    low, high = median_interval(ratios)
    return {
        **{f"{name}_tok_s": values for name, values in rates.items()},
        "ratio": statistics.median(ratios),
        "interval": [low, high],
        "is_slower": high < LEAST,
    }


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Two of the values between which the median is, whatever their distribution, with CERTAINTY.

    The least and the greatest of fewer than six, which are less certain.
    """
    count, ordered = len(values), sorted(values)
    outside, place = 0.0, 0
    while place < (count - 1) // 2:
        outside += 2 * math.comb(count, place) / 2**count
        if outside + 2 * math.comb(count, place + 1) / 2**count > 1 - CERTAINTY:
            break
        place += 1
    return ordered[place], ordered[count - 1 - place]


def model_path(setting: Setting, options: argparse.Namespace) -> Path:
    """The file of a setting's model, which is written if it isn't there."""
    if setting.model == "demo":
        return Path(demo_model_path())
    path: Path = getattr(options, setting.model).resolve()
    write_model(path, *SIZES[setting.model])
    return path


def vram_of(setting: Setting, path: Path) -> int | None:
    """Bytes of the GPU, which both commits are given alike; None on a CPU."""
    if setting.device == "cpu":
        return None
    if setting.model == "demo":
        return DEMO_VRAM
    wanted = ALL_BYTES if setting.expert_gib is None else int(setting.expert_gib * GIB)
    parallel = int(dict(setting.options).get("parallel", 1))
    return budget_with(path, measured_hardware(find_gpu()), setting.ctx_size, parallel, wanted)


@contextmanager
def workers(
    commits: Sequence[Commit], setting: Setting, options: argparse.Namespace
) -> Iterator[list[Worker]]:
    """Both commits with a setting's model open."""
    path = model_path(setting, options)
    arguments = setting.arguments(str(path), options.threads, vram_of(setting, path))
    with ExitStack() as cleanup:
        folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory()))
        opened = []
        for each in commits:
            opened.append(Worker(each, arguments, folder))
            cleanup.callback(opened[-1].close)
        yield opened


def measure_server(
    commits: Sequence[Commit], line: ServerLine, options: argparse.Namespace
) -> dict[str, Any]:
    path = model_path(line.setting, options)
    words = ("--threads", str(options.threads), "--ctx-size", str(line.setting.ctx_size), "--parallel", "8")
    with ExitStack() as cleanup:
        folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory()))
        servers = [
            cleanup.enter_context(served(path, folder / f"{i}.log", *words, python=str(each.python)))
            for i, each in enumerate(commits)
        ]
        new, old = (ServerRuns(line, server) for server in servers)
        return compared(new, old, options.pairs)


def measure(commits: Sequence[Commit], options: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """The chosen lines and what came of each; those of a setting with its model opened once."""
    chosen = [line for line in LINES if any(fnmatch(line.name, pattern) for pattern in options.lines)]
    chosen = [line for line in chosen if line.setting.device == "cpu" or gpu_name() is not None]
    for setting in dict.fromkeys(line.setting for line in chosen if isinstance(line, Line)):
        with workers(commits, setting, options) as (new, old):
            for line in chosen:
                if isinstance(line, Line) and line.setting == setting:
                    yield line.name, compared(LineRuns(line, new), LineRuns(line, old), options.pairs)
    for line in chosen:
        if isinstance(line, ServerLine):
            yield line.name, measure_server(commits, line, options)


def other_commit(options: argparse.Namespace, folder: Path) -> Commit:
    """The other commit's interpreter, with its extension built unless a checkout is given."""
    root = options.old
    if root is None:
        root = folder / "sources"
        check_out(ROOT, options.against, root)
        built = build_extension(root, folder / "build")
        shutil.copy2(built, root / "src" / "coldstream" / "kernels" / built.name)
    return Commit(options.against, make_environment(folder / "venv", root.resolve() / "src"))


def merged(path: Path | None, lines: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """New lines over those that the file at `path` has, in the order of LINES."""
    known = json.loads(path.read_text())["lines"] if path and path.exists() else {}
    return {line.name: {**known, **lines}[line.name] for line in LINES if line.name in {**known, **lines}}


def command(options: argparse.Namespace) -> str:
    words = ["python", "-m", "bench.engine.versus_commit", "--against", options.against]
    words += ["--pairs", str(options.pairs), "--lines", *options.lines]
    return shlex.join(words)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--against", required=True, metavar="COMMIT")
    parser.add_argument("--old", type=Path, help="a checkout of that commit, with its extension")
    parser.add_argument("--lines", nargs="+", default=["*"], help="names or patterns")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--small", type=Path, default=Path("four-layers.gguf"))
    parser.add_argument("--full", type=Path, default=Path("full.gguf"))
    add_result_options(parser)
    options = parser.parse_args()
    stamp = {
        "commit": options.commit or commit(),
        "date": datetime.now(UTC).date().isoformat(),
        "command": command(options),
    }
    lines: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        commits = (Commit(stamp["commit"], Path(sys.executable)), other_commit(options, Path(folder)))
        machine = asdict(Hardware.measure()) | {"gpu": gpu_name()}
        for name, found in measure(commits, options):
            lines[name] = found | stamp | {"machine": machine}
            low, high = found["interval"]
            print(f"{name:<24} {found['ratio']:.3f} ({low:.3f} to {high:.3f})", flush=True)
            if options.out:
                result = {"against": options.against, "lines": merged(options.out, lines)}
                options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(lines))
    return int(not lines or any(line["is_slower"] for line in lines.values()))


def gpu_name() -> str | None:
    """The GPU of this machine; None without one."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0]


if __name__ == "__main__":
    sys.exit(main())
