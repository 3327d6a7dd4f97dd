"""A desktop's share of this machine: some cores, a slower bus and less RAM, for us and for llama.cpp.

    python -m bench.full_size_model full.gguf                                     20 GB
    python -m bench.engine.desktop full.gguf --llama FOLDER --out FILE --ram 32G

Other programs copy to the device from the other CPUs, so that who is measured has about one part in programs
plus one of the bus, and less of RAM's bandwidth. What copies get of it is measured before and after each
line. With --ram all other memory is taken. A line is one side with some cores, some programs and some experts
on the GPU: decoding, and prompts. Our memory is the least one with so many experts and with steps of 2,048
rows. llama.cpp has the experts of as many layers on the GPU as fit into the same memory, the better of two
numbers of threads, and for prompts the better of copied weights and products on the CPU. The result is
written after each line, and lines that it has are not measured again, so that a run that --seconds ended goes
on in the next one.
"""

import argparse
import json
import multiprocessing
import os
import shlex
import sys
import time
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from bench.device import describe
from bench.engine.desktop_workers import Asked, PeerAsked, Row, ours, theirs
from bench.engine.gpu import numbers
from bench.engine.gpu_hybrid import sizes
from bench.engine.plan_forecast import Work
from bench.kernels.busy_bus import Programs, bytes_left
from bench.memory_limit import available_bytes, filled_memory
from bench.results import commit, write_result
from coldstream.planning.config import parse_size

OURS, THEIRS = "coldstream", "llama.cpp"
SETTINGS = [(6, 3), (6, 7), (8, 3), (8, 7)]  # cores, and other programs
LINE_S = 120.0  # that a line takes at most
PAIR_BYTES, NUM_PAIRS = 2**20, 5
MOST_FILLED = 2**38  # more than such a machine has: memory that a container only sees


@dataclass
class Lines:
    """What was measured, in a file that is written after each line."""

    about: Row
    out: Path
    commit: str | None
    until: float
    rows: list[Row] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def has(self, **line: Any) -> bool:
        """Whether there is a row of this line."""
        return any(line.items() <= row.items() for row in self.rows)

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self.until

    def add(self, row: Row) -> None:
        """Keeps a row with the commit that measured it, and prints it for people."""
        self.rows.append(row | {"commit": self.commit or commit()})
        write_result(self.about | {"rows": self.rows}, self.out, self.commit)
        figures = ", ".join(f"{name} {each['tok_s']:,.1f}" for name, each in row["figures"].items())
        left = " and ".join(f"{rate / 1e9:.1f}" for rate in row["bus_bytes_per_s"])
        where = f"{row['cores']} cores, {left} GB/s, {row['experts_gib']:g} GiB"
        print(f"{row['side']}, {where} ({row['experts_share']:.0%}): {figures}", file=sys.stderr, flush=True)

    @contextmanager
    def of_others(self, name: str) -> Iterator[None]:
        """A process that ends early, or says nothing, leaves the other processes their lines."""
        try:
            yield
        except (EOFError, TimeoutError, BrokenPipeError) as error:
            self.failed.append(name)
            print(f"{name}: {error or 'ended'}", file=sys.stderr, flush=True)


def kept_rows(out: Path) -> list[Row]:
    """Of an earlier run."""
    return list(json.loads(out.read_text())["rows"]) if out.exists() else []


@contextmanager
def side(target: Any, asked: object, cpus: Collection[int], environment: Mapping[str, str]) -> Iterator[Any]:
    """A process that runs one side on these CPUs; the connection to it."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    before, variables = os.sched_getaffinity(0), dict(os.environ)
    process = context.Process(target=target, args=(there, asked))
    os.sched_setaffinity(0, cpus)
    os.environ.update(environment)
    try:
        process.start()
    finally:
        os.sched_setaffinity(0, before)
        os.environ.clear()
        os.environ.update(variables)
    there.close()
    try:
        yield here
    finally:
        here.close()
        process.join(5.0)
        if process.is_alive():
            process.kill()
            process.join()


def received(connection: Connection) -> Any:
    """What a side sends. Raises TimeoutError, and EOFError where it has ended."""
    if not connection.poll(LINE_S):
        raise TimeoutError(f"no line within {LINE_S:.0f} s")
    return connection.recv()


def timed_line(connection: Connection) -> Row:
    """A row from a side, with its seconds and with what copies get of the bus before and after it."""
    before, start = bytes_left(), time.monotonic()
    row: Row = received(connection)
    return row | {"seconds": time.monotonic() - start, "bus_bytes_per_s": [before, bytes_left()]}


def our_lines(options: argparse.Namespace, lines: Lines, programs: Programs) -> None:
    """A process for each number of programs and of cores: it measures the rates of that machine first."""
    for cores, number in options.settings:
        where = {"side": OURS, "cores": cores, "programs": number}
        wanted = tuple(gib for gib in options.experts if not lines.has(**where, experts_gib=gib))
        if not wanted or lines.is_over:
            continue
        budgets = {row["experts_gib"]: row["vram_bytes"] for row in lines.rows if row["side"] == OURS}
        programs.activate(number)
        asked = Asked(options.model, wanted, budgets, options.work, options.runs, options.device)
        with lines.of_others(str(where)), side(ours, asked, options.cpus[:cores], {}) as connection:
            for _ in wanted:
                lines.add(timed_line(connection) | where)
                if lines.is_over:
                    return


def their_lines(options: argparse.Namespace, lines: Lines, programs: Programs) -> None:
    """A process for each placement, as loading it takes a while."""
    for gib, cpu_layers in zip(options.experts, options.cpu_layers, strict=True):
        keys = [
            {"side": THEIRS, "cores": cores, "programs": number, "experts_gib": gib}
            for cores, number in options.settings
        ]
        wanted = [key for key in keys if not lines.has(**key)]
        if not wanted or lines.is_over:
            continue
        programs.activate(0)  # while it loads
        asked = PeerAsked(
            options.model,
            options.llama,
            cpu_layers,
            options.work.prompts,
            options.generate,
            options.runs,
            options.device,
        )
        cpus = options.cpus[: most_cores(options)]
        with (
            lines.of_others(f"{THEIRS}, {gib:g} GiB"),
            side(theirs, asked, cpus, options.peer_environment) as connection,
        ):
            lines.about["llama_cpp"] = received(connection)
            for key in wanted:
                if lines.is_over:
                    break
                programs.activate(key["programs"])
                connection.send(options.cpus[: key["cores"]])
                lines.add(timed_line(connection) | key)
            connection.send(None)


def most_cores(options: argparse.Namespace) -> int:
    return max(cores for cores, _ in options.settings)


def setting(text: str) -> tuple[int, int]:
    """Cores, and other programs on the bus."""
    cores, _, programs = text.partition(":")
    return int(cores), int(programs)


def pair_speed(cpus: Sequence[int]) -> float | None:
    """What the first two CPUs compress together, over the first and the third: well below 1 where two
    neighbours are one core. None where there are too few.
    """
    if len(cpus) < 3:
        return None
    data = np.random.default_rng(1).integers(0, 16, PAIR_BYTES, np.uint8).tobytes()
    before = os.sched_getaffinity(0)

    def work(cpu: int) -> None:
        os.sched_setaffinity(0, {cpu})  # of this thread
        zlib.compress(data)

    def seconds(pair: tuple[int, int]) -> float:
        start = time.perf_counter()
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(work, pair))
        return time.perf_counter() - start

    try:
        near, far = (min(seconds((cpus[0], cpus[other])) for _ in range(NUM_PAIRS)) for other in (1, 2))
    finally:
        os.sched_setaffinity(0, before)
    return far / near


def other_memory(options: argparse.Namespace) -> Any:
    """Takes all memory but --ram. Raises ValueError where there is more than a machine of this kind has."""
    if options.ram is None:
        return nullcontext()
    if available_bytes() > MOST_FILLED:
        raise ValueError(f"{available_bytes()} bytes are available: a limit is needed, not --ram")
    return filled_memory(options.ram)


def run(options: argparse.Namespace) -> bool:
    """All lines; see the module docstring. Whether each that was begun is there."""
    until = time.monotonic() + options.seconds
    others = options.cpus[most_cores(options) :] or options.cpus
    numbers_of_programs = sorted({number for _, number in options.settings})
    about = {
        "command": command(options),
        "machine": describe(options.device),
        "ram_bytes": options.ram,
        "pair_speed": pair_speed(options.cpus),
        "work": vars(options.work),
    }
    with Programs.started(numbers_of_programs[-1], others) as programs, other_memory(options):
        about["bus_left_bytes_per_s"] = left = dict[str, float]()
        for number in (0, *numbers_of_programs):
            programs.activate(number)
            left[str(number)] = bytes_left()
            print(
                f"beside {number} programs: {left[str(number)] / 1e9:.1f} GB/s", file=sys.stderr, flush=True
            )
        lines = Lines(about, options.out, options.commit, until, kept_rows(options.out))
        if OURS in options.measure:
            our_lines(options, lines, programs)
        if options.llama and THEIRS in options.measure:
            their_lines(options, lines, programs)
    return not lines.failed


def command(options: argparse.Namespace) -> str:
    """The command that repeats the measurement."""
    words = ["python", "-m", "bench.engine.desktop", options.model.name]
    words += ["--settings", *(f"{cores}:{programs}" for cores, programs in options.settings)]
    for name in ("experts", "cpu_layers", "prompts"):
        values = ",".join(f"{value:g}" for value in getattr(options, name))
        words += [f"--{name.replace('_', '-')}", values]
    words += ["--runs", str(options.runs)]
    if options.llama:
        words += ["--llama", options.llama.name]
    if options.ram is not None:
        words += ["--ram", str(options.ram)]
    return shlex.join(words)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--llama", type=Path, help="a folder of shared libraries, or one")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: without a bus")
    parser.add_argument(
        "--settings",
        nargs="+",
        type=setting,
        default=SETTINGS,
        metavar="CORES:PROGRAMS",
        help="the first CPUs, so many, and programs that copy beside them",
    )
    parser.add_argument("--experts", type=sizes, default=[0, 3, 10.67], help="GiB on the GPU")
    parser.add_argument("--cpu-layers", type=numbers, default=[40, 34, 16], help="of llama.cpp, for each")
    parser.add_argument("--prompts", type=numbers, default=[512, 2048], help="tokens")
    parser.add_argument("--runs", type=int, default=3, help="of a prompt, of which the first does not count")
    parser.add_argument("--warm-tokens", type=int, default=320, help="of a text, before it is timed")
    parser.add_argument("--timed-tokens", type=int, default=64)
    parser.add_argument("--texts", type=int, default=2)
    parser.add_argument("--generate", type=int, default=48, help="by llama.cpp")
    parser.add_argument("--measure", nargs="+", choices=(OURS, THEIRS), default=(OURS, THEIRS))
    parser.add_argument("--ram", type=parse_size, help="that is left to all programs")
    parser.add_argument("--seconds", type=float, default=280.0, help="after which no line begins")
    parser.add_argument(
        "--peer-environment", nargs="*", default=[], metavar="NAME=VALUE", help="of llama.cpp's process"
    )
    parser.add_argument("--commit", help="of these sources, where they are without their repository")
    return parser


def main() -> int:
    options = arguments().parse_args()
    options.work = Work(tuple(options.prompts), options.warm_tokens, options.timed_tokens, options.texts)
    options.peer_environment = dict(each.split("=", 1) for each in options.peer_environment)
    options.cpus = sorted(os.sched_getaffinity(0))
    return int(not run(options))


if __name__ == "__main__":
    sys.exit(main())
