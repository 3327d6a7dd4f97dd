"""Speed on the CPU by weight type, beside llama.cpp and ik_llama.cpp, interleaved with ours.

    python -m bench.peers.weight_types --llama-cpp LLAMA_BENCH --ik-llama-cpp LLAMA_BENCH --out RESULT.json

Each peer is given by its `llama-bench`, built for the instructions of `--tier`. All three read one file:

- `cut`: 4 layers of the 35B shape with 16 experts of which 4 are used, only the experts in the type;
- `small`: hidden size 512, 8 layers, 32 experts of which 4 are used, every matrix in the type.

A sample is one run of a case by each program; which of them begins changes with the sample. The settings of
a peer are tuned before, per file and case. The ratio of a sample is ours over the peer's. Its interval holds
the median with 95 % from six samples on. Blocks are random, so the files say nothing about quality. A peer
that refuses a type has no figure for it, and its words are in the result.

On a machine with many cores `--beside 16` measures sixteen files at a time, each on cores of its own. They
share the memory's bandwidth.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from bench.engine.versus_commit import median_interval
from bench.peers.versus_llama_cpp import Side
from bench.random_blocks import SCALES
from bench.random_model import SMALL_SHAPE, RandomModelWriter, Shape
from bench.results import ROOT, add_result_options, commit, write_result
from bench.runners import open_cpu_runner
from coldstream.gguf.quant_types import QuantType
from coldstream.placement.hardware import Hardware, affinity, measure_read_bandwidth

CONTEXT = 1024
TYPES = tuple(kind for kind in QuantType if kind.name in {*SCALES, "IQ1_M", "MXFP4"})
MODELS = ("cut", "small")
WAIT_S = 600  # for one run of a peer
Setting = tuple[str, ...]  # words of a command line


@dataclass(frozen=True)
class Case:
    """What is timed: tokens that are generated one by one, or a prompt of `tokens` into an empty context."""

    name: str
    tokens: int
    is_decode: bool
    repetitions: int  # within a sample, of which the median counts

    def words(self) -> list[str]:
        """For `llama-bench`."""
        prompt, generated = (0, self.tokens) if self.is_decode else (self.tokens, 0)
        return ["-p", str(prompt), "-n", str(generated)]


CASES = (Case("decode", 64, True, 2), Case("prompt of 512", 512, False, 1), Case("8 rows", 8, False, 8))


class RefusedError(Exception):
    """A peer ended without figures; the text is what it said last."""


@dataclass(frozen=True)
class Peer:
    """Another program: its `llama-bench`, and the settings that are tried."""

    name: str
    program: Path
    candidates: tuple[Setting, ...]

    def run(self, model: Path, threads: int, case: Case, setting: Setting) -> dict[str, Any]:
        """The record of one run, after one that it makes to warm up itself. Raises RefusedError."""
        command = [str(self.program), "-m", str(model), "-t", str(threads), "-ngl", "0", "-o", "json"]
        command += [*case.words(), "-r", str(case.repetitions), *setting]
        done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S)
        if done.returncode or not done.stdout.strip():
            lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
            raise RefusedError(lines[-1] if lines else f"it ended with {done.returncode}")
        (record,) = json.loads(done.stdout)
        return dict(record)

    def rate(self, model: Path, threads: int, case: Case, setting: Setting) -> float:
        """Median tokens a second of the repetitions. Raises RefusedError."""
        return float(statistics.median(self.run(model, threads, case, setting)["samples_ts"]))

    def tuned(self, model: Path, threads: int, before: Mapping[str, Mapping[str, str]]) -> dict[str, Setting]:
        """The fastest setting for each case. Raises RefusedError if the peer does not take the file.

        before: settings by peer and case that an earlier result has for the file, which are not tried again.
        """
        if self.name in before:
            return {case.name: tuple(shlex.split(before[self.name][case.name])) for case in CASES}
        return {
            case.name: max(self.candidates, key=lambda setting: self.rate(model, threads, case, setting))
            for case in CASES
        }


# The first is what their documentation names first; the others change one thing.
LLAMA_CPP = (("-fa", "on"), ("-fa", "on", "--repack", "0"), ("-fa", "off"))
IK_LLAMA_CPP = (
    ("-fa", "1", "-fmoe", "1", "-rtr", "0"),
    ("-fa", "1", "-fmoe", "1", "-rtr", "1"),
    ("-fa", "0", "-fmoe", "1", "-rtr", "0"),
    ("-fa", "1", "-fmoe", "1", "-rtr", "0", "-muge", "1", "-mqkv", "1"),
)


class Ours:
    """This engine, with a model open in a process of its own."""

    def __init__(self, model: Path, threads: int, tier: str) -> None:
        words = (str(model), str(threads), str(CONTEXT), tier)
        self.side = Side(sys.executable, "-m", "bench.engine.worker", *words)
        self.side.rate("prefill", 512)

    def rate(self, case: Case) -> float:
        """Median tokens a second of the repetitions, each in an empty context."""
        return statistics.median(self._once(case) for _ in range(case.repetitions))

    def _once(self, case: Case) -> float:
        if not case.is_decode:
            return self.side.rate("prefill", case.tokens)
        self.side.ask("prefill", 1)
        return self.side.rate("decode", case.tokens)

    def close(self) -> None:
        self.side.close()


@dataclass
class Rates:
    """Tokens a second of a case, by program, one of each sample."""

    ours: list[float] = field(default_factory=list)
    peers: dict[str, list[float]] = field(default_factory=dict)

    def summary(self) -> dict[str, Any]:
        """Medians, and ours over each peer's and over that of the peer with the higher median."""
        ratios = {name: ratio(self.ours, rates) for name, rates in self.peers.items()}
        better = max(self.peers, key=lambda name: statistics.median(self.peers[name]), default=None)
        tok_s = {"ours": self.ours, **self.peers}
        return {
            "tok_s": {name: statistics.median(rates) for name, rates in tok_s.items()},
            "runs": tok_s,
            "ratios": ratios,
            "better_peer": better,
        }


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, Any]:
    """The median of the samples' ratios, and its interval."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return {"median": statistics.median(ratios), "interval": list(median_interval(ratios))}


def write_model(path: Path, model: str, kind: QuantType) -> None:
    """The file of a model in a type."""
    if model == "cut":
        RandomModelWriter(path, Shape(), seed=0, experts=kind).write()
    else:
        RandomModelWriter(path, SMALL_SHAPE, seed=0, experts=kind, weights=kind).write()


def measure_cases(
    ours: Ours, peers: dict[Peer, dict[str, Setting]], model: Path, threads: int, samples: int
) -> dict[str, Rates]:
    """Rates by case. Programs alternate within a case, and which begins changes with the sample."""
    found = {case.name: Rates(peers={peer.name: [] for peer in peers}) for case in CASES}
    programs: list[Peer | None] = [None, *peers]
    for number in range(samples):
        begin = number % len(programs)
        for case in CASES:
            rates = found[case.name]
            for peer in programs[begin:] + programs[:begin]:
                if peer is None:
                    rates.ours.append(ours.rate(case))
                else:
                    setting = peers[peer][case.name]
                    rates.peers[peer.name].append(peer.rate(model, threads, case, setting))
    return found


def measure_file(
    path: Path,
    peers: Sequence[Peer],
    options: argparse.Namespace,
    before: Mapping[str, Mapping[str, str]],
) -> dict[str, Any]:
    """Everything about one file. before: see `Peer.tuned`."""
    settings: dict[Peer, dict[str, Setting]] = {}
    refused: dict[str, str] = {}
    for peer in peers:
        try:
            settings[peer] = peer.tuned(path, options.threads, before)
        except RefusedError as error:
            refused[peer.name] = str(error)
    runner = open_cpu_runner(path, threads=options.threads, tier=options.tier, context_length=CONTEXT)
    bytes_per_token = runner.bytes_per_token
    runner.close()
    bandwidth = measure_read_bandwidth(options.threads)
    ours = Ours(path, options.threads, options.tier)
    try:
        found = measure_cases(ours, settings, path, options.threads, options.samples)
    finally:
        ours.close()
    cases = {name: rates.summary() for name, rates in found.items()}
    return {
        "file_bytes": path.stat().st_size,
        "bytes_per_token": bytes_per_token,
        "read_bandwidth_bytes_s": bandwidth,
        "share_of_bandwidth": {
            name: tok_s * bytes_per_token / bandwidth for name, tok_s in cases["decode"]["tok_s"].items()
        },
        "settings": {
            peer.name: {case: shlex.join(setting) for case, setting in chosen.items()}
            for peer, chosen in settings.items()
        },
        "refused": refused,
        "cases": cases,
    }


def line(model: str, kind: str, found: dict[str, Any]) -> str:
    """What a person reads: speeds and ratios of each case, and shares of the bandwidth."""
    words = [f"{model:<6}{kind:<8}"]
    for name, case in found["cases"].items():
        speeds = " / ".join(f"{tok_s:,.0f}" for tok_s in case["tok_s"].values())
        ratios = ", ".join(f"{each['median']:.2f}" for each in case["ratios"].values())
        words.append(f"{name}: {speeds} ({ratios})")
    words.append(
        "of bandwidth " + " / ".join(f"{share:.0%}" for share in found["share_of_bandwidth"].values())
    )
    return " | ".join(words)


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """All files, one after the other; the result is written after each."""
    peers = [
        Peer("llama.cpp", options.llama_cpp.resolve(), LLAMA_CPP),
        Peer("ik_llama.cpp", options.ik_llama_cpp.resolve(), IK_LLAMA_CPP),
    ]
    result, name = empty_result(options), options.commit or commit()
    tuned = json.loads(options.tuned.read_text())["models"] if options.tuned else {}
    for model in options.models:
        for kind in options.types:
            before = tuned.get(model, {}).get(kind.name, {}).get("settings", {})
            with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                path = Path(folder) / f"{model}-{kind.name}.gguf"
                write_model(path, model, kind)
                if not result["peers"]:
                    result["peers"] = {
                        peer.name: about(peer, path, options.threads) | {"version": version}
                        for peer, version in zip(peers, options.versions, strict=True)
                    }
                result["models"][model][kind.name] = found = measure_file(path, peers, options, before)
            print(line(model, kind.name, found), file=sys.stderr, flush=True)
            write_result(result, options.out, name)
    return result


def empty_result(options: argparse.Namespace) -> dict[str, Any]:
    """What does not depend on a file."""
    return {
        "command": command(options),
        "machine": asdict(Hardware.measure()),
        "threads": options.threads,
        "tier": options.tier,
        "samples": options.samples,
        "beside": options.beside,
        "peers": {},
        "models": {model: {} for model in options.models},
    }


def compare_beside(options: argparse.Namespace) -> dict[str, Any]:
    """`compare` of `options.beside` files at a time, each in a process of its own and on cores of its own.

    ValueError if the machine has too few cores.
    """
    result, name = empty_result(options), options.commit or commit()
    free: SimpleQueue[list[int]] = SimpleQueue()
    for cores in core_sets(options.threads, options.beside):
        free.put(cores)

    def measure(file: tuple[str, QuantType]) -> dict[str, Any]:
        cores = free.get()
        os.sched_setaffinity(0, cores)  # of this thread, and so of the process that it starts
        try:
            return part(options, *file)
        finally:
            free.put(cores)

    files = [(model, kind) for model in options.models for kind in options.types]
    with ThreadPoolExecutor(options.beside) as pool:
        begun = {pool.submit(measure, file): file for file in files}
        for done in as_completed(begun):
            (model, kind), found = begun[done], done.result()
            result["peers"] = result["peers"] or found["peers"]
            result["models"][model][kind.name] = found["models"][model][kind.name]
            write_result(result, options.out, name)
    return result


def core_sets(threads: int, count: int) -> list[list[int]]:
    """`count` sets of so many CPUs, each CPU a core of its own. ValueError if there are too few cores."""
    cpus: list[int] = []
    for cpu in affinity():
        if Hardware.measure(cpu_ids=[*cpus, cpu]).num_physical_cores > len(cpus):
            cpus.append(cpu)
    if len(cpus) < threads * count:
        raise ValueError(f"{count} times {threads} cores are needed, and there are {len(cpus)}")
    return [cpus[threads * i : threads * (i + 1)] for i in range(count)]


def part(options: argparse.Namespace, model: str, kind: QuantType) -> dict[str, Any]:
    """The result of one file, by a process on the CPUs of this thread."""
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        out = Path(folder) / "part.json"
        words = ["--llama-cpp", options.llama_cpp, "--ik-llama-cpp", options.ik_llama_cpp]
        words += ["--versions", *options.versions, "--models", model, "--types", kind.name]
        words += ["--threads", options.threads, "--tier", options.tier, "--samples", options.samples]
        words += ["--folder", folder, "--out", out, "--commit", options.commit or commit()]
        words += ["--tuned", options.tuned.resolve()] if options.tuned else []
        command = [sys.executable, "-m", "bench.peers.weight_types", *map(str, words)]
        subprocess.run(command, cwd=ROOT, check=True)
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def about(peer: Peer, path: Path, threads: int) -> dict[str, Any]:
    """The build of a peer; empty where it refuses the file."""
    try:
        record = peer.run(path, threads, CASES[-1], peer.candidates[0])
    except RefusedError:
        return {}
    return {key: record[key] for key in ("build_commit", "build_number") if key in record}


def command(options: argparse.Namespace) -> str:
    words = ["python", "-m", "bench.peers.weight_types", "--threads", str(options.threads)]
    words += ["--tier", options.tier, "--samples", str(options.samples)]
    words += ["--beside", str(options.beside)] if options.beside > 1 else []
    words += ["--tuned", options.tuned.name] if options.tuned else []
    words += ["--models", *options.models]
    return shlex.join([*words, "--types", *(kind.name for kind in options.types)])


def known_type(name: str) -> QuantType:
    """A type of `TYPES`. Raises argparse.ArgumentTypeError for another."""
    for kind in TYPES:
        if kind.name == name:
            return kind
    known = ", ".join(kind.name for kind in TYPES)
    raise argparse.ArgumentTypeError(f"no weight type {name!r}: there are {known}")


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--llama-cpp", type=Path, required=True, help="its llama-bench")
    parser.add_argument("--ik-llama-cpp", type=Path, required=True, help="its llama-bench")
    parser.add_argument(
        "--versions", nargs=2, default=["", ""], metavar="TEXT", help="of llama.cpp and of ik_llama.cpp"
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--types", nargs="+", type=known_type, default=list(TYPES), metavar="TYPE")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tier", default="auto", help="of our kernels: avx2, avx512, …")
    parser.add_argument("--samples", type=int, default=7)
    parser.add_argument("--beside", type=int, default=1, help="files that are measured at a time")
    parser.add_argument(
        "--tuned", type=Path, help="an earlier result, whose settings of peers are taken for its files"
    )
    parser.add_argument("--folder", type=Path, help="for the files, which are removed again")
    add_result_options(parser)
    return parser


def main() -> int:
    options = arguments().parse_args()
    (compare_beside if options.beside > 1 else compare)(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
