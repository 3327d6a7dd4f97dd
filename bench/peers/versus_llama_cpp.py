"""Paired CPU benchmark against llama.cpp: both models loaded, the two engines timed alternately, ratios pair
by pair.

    python -m bench.peers.versus_llama_cpp MODEL --peer-python PEER/bin/python --out docs/results/NAME.json

PEER is a virtual environment with `llama-cpp-python` built from source for this CPU, without AMX:

    CMAKE_ARGS="-DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON -DGGML_AVX512=ON
    \\
                -DGGML_AVX512_VNNI=ON -DGGML_AVX512_VBMI=ON" pip install llama-cpp-python

without the three of AVX-512 if it has AVX2 only.

llama.cpp is tuned first: flash attention on and off, with and without mmap; the best setting of each figure
is the peer. Before each run at a depth both sides go back to the state that they had there, and before each
run of several sequences (`--sequences`) they begin these anew.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.results import ROOT, write_result
from bench.runners import open_cpu_runner
from coldstream.gguf.reader import GGUFFile
from coldstream.placement.hardware import Hardware, measure_read_bandwidth


class Side:
    """A benchmark worker in its own process; idle while the other side is timed."""

    def __init__(
        self, *command: str, folder: Path = ROOT, environment: Mapping[str, str] | None = None
    ) -> None:
        """folder: the checkout of the worker. environment: its variables; None: those of this process."""
        self.process = subprocess.Popen(
            [*command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=folder,
            env=environment,
        )
        self.about = self.answer()

    def answer(self) -> dict[str, object]:
        assert self.process.stdout is not None
        while line := self.process.stdout.readline():
            if line.startswith("{"):
                answer: dict[str, object] = json.loads(line)
                return answer
        raise RuntimeError(f"worker ended with {self.process.wait()}: {self.process.args!r}")

    def ask(self, verb: str, count: int) -> dict[str, Any]:
        """The answer to one command."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{verb} {count}\n")
        self.process.stdin.flush()
        return self.answer()

    def rate(self, verb: str, count: int) -> float:
        """Tokens per second of one command."""
        return count / float(self.ask(verb, count)["seconds"])

    def close(self) -> None:
        self.process.communicate()


@dataclass(frozen=True)
class Case:
    """The timed call, after `depth` tokens, or of `sequences` side by side: `verb` with `count`."""

    name: str
    verb: str
    count: int
    depth: int = 0
    sequences: int = 0

    def prepare(self, side: Side) -> None:
        """Brings a side to where its runs begin, with everything touched once."""
        if self.sequences:
            self.run(side)
            return
        side.rate("prefill", self.depth or 512)
        if self.depth:
            side.ask("keep", 0)
        self.run(side)

    def run(self, side: Side) -> float:
        """Tokens per second of one run."""
        if self.sequences:
            side.ask("start", self.sequences)
            return self.sequences * side.rate(self.verb, self.count)
        if self.depth:
            side.ask("back", 0)
        return side.rate(self.verb, self.count)


CONTEXT = 9216
CASES = (
    Case("pp512", "prefill", 512),
    Case("tg128", "decode", 128),
    Case("pp512 behind 2048", "append", 512, 2048),
    Case("tg32 behind 2048", "decode", 32, 2048),
    Case("pp512 behind 8192", "append", 512, 8192),
    Case("tg32 behind 8192", "decode", 32, 8192),
)
SEQUENCE_CASES = tuple(Case(str(count), "steps", 32, sequences=count) for count in (1, 2, 4, 8, 16))
SETTINGS = (("0", "1"), ("1", "1"), ("0", "0"), ("1", "0"))


def peer_side(python: str, model: str, threads: int, setting: tuple[str, str], case: Case) -> Side:
    """llama.cpp with (flash attention, mmap), for as many sequences as the case has."""
    words = (model, str(threads), str(CONTEXT), *setting, "1", "0", str(max(1, case.sequences)))
    return Side(python, "-m", "bench.peers.peer_llama_cpp", *words)


def tune_peer(python: str, model: str, threads: int, cases: Sequence[Case]) -> dict[str, tuple[str, str]]:
    """The best (flash attention, mmap) of llama.cpp for each case, by the median of three."""
    rates: dict[str, dict[tuple[str, str], float]] = {case.name: {} for case in cases}
    for setting in SETTINGS:
        for case in cases:
            side = peer_side(python, model, threads, setting, case)
            case.prepare(side)
            rates[case.name][setting] = statistics.median(case.run(side) for _ in range(3))
            side.close()
    return {name: max(by_setting, key=lambda s: by_setting[s]) for name, by_setting in rates.items()}


def compare_case(case: Case, ours: Side, peer: Side, num_pairs: int) -> dict[str, float]:
    """The medians of both sides and of the ratios of pairs, whose two runs alternate."""
    for side in (ours, peer):
        case.prepare(side)
    pairs = [(case.run(ours), case.run(peer)) for _ in range(num_pairs)]
    ratios = sorted(a / b for a, b in pairs)
    return {
        "ours_tok_s": statistics.median(a for a, _ in pairs),
        "llama_cpp_tok_s": statistics.median(b for _, b in pairs),
        "ratio": statistics.median(ratios),
        "ratio_min": ratios[0],
        "ratio_max": ratios[-1],
    }


def compare(options: argparse.Namespace) -> dict[str, object]:
    """Runs all cases; see the module docstring."""
    model, threads = str(options.model.resolve()), options.threads
    with GGUFFile.open(options.model) as file:
        file_bytes = file.num_bytes
    runner = open_cpu_runner(options.model, threads=threads, tier=options.tier, context_length=CONTEXT)
    bytes_per_token = runner.bytes_per_token
    runner.close()
    bandwidth = measure_read_bandwidth(threads)
    ceiling = bandwidth / bytes_per_token
    print(
        f"{bytes_per_token / 1e6:.0f} MB a token / {bandwidth / 1e9:.1f} GB/s = at most {ceiling:.1f} tok/s",
        flush=True,
    )
    cases = SEQUENCE_CASES if options.sequences else CASES
    best = tune_peer(options.peer_python, model, threads, cases)
    ours = Side(sys.executable, "-m", "bench.engine.worker", model, str(threads), str(CONTEXT), options.tier)
    results: dict[str, dict[str, float]] = {}
    for case in cases:
        flash_attention, use_mmap = best[case.name]
        peer = peer_side(options.peer_python, model, threads, best[case.name], case)
        results[case.name] = compare_case(case, ours, peer, options.pairs) | {
            "llama_cpp_flash_attention": flash_attention == "1",
            "llama_cpp_mmap": use_mmap == "1",
        }
        peer.close()
        print(case.name, json.dumps(results[case.name]), flush=True)
    ours.close()
    return {
        "model": options.model.name,
        "file_bytes": file_bytes,
        "command": f"python -m bench.peers.versus_llama_cpp {options.model.name} --threads {threads}"
        + (" --sequences" if options.sequences else ""),
        "machine": asdict(Hardware.measure()),
        "ours": ours.about,
        "peer": peer.about,
        "pairs": options.pairs,
        "bytes_per_token": bytes_per_token,
        "read_bandwidth_bytes_s": bandwidth,
        "ceiling_tok_s": ceiling,
        "share_of_ceiling": results["tg128"]["ours_tok_s"] / ceiling if "tg128" in results else None,
        "cases": results,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--peer-python", required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tier", default="auto")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--sequences", action="store_true", help="steps of 1 to 16 sequences side by side")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    write_result(compare(options), options.out)


if __name__ == "__main__":
    main()
