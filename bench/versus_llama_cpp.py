"""Paired CPU benchmark against llama.cpp: both models loaded, the two sides timed in turn, ratios pair by
pair.

    python bench/versus_llama_cpp.py MODEL --peer-python PEER/bin/python --out docs/results/NAME.json

PEER is a virtual environment with `llama-cpp-python` built from source for this CPU, without AMX:

    CMAKE_ARGS="-DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON -DGGML_AVX512=ON
    \\
                -DGGML_AVX512_VNNI=ON -DGGML_AVX512_VBMI=ON" pip install llama-cpp-python

llama.cpp is tuned first: flash attention on and off, with and without mmap; the best setting of each figure
is the peer.
"""

import argparse
import json
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from coldstream.gguf.reader import GGUFFile
from coldstream.models.cpu_runner import CpuRunner
from coldstream.placement.hardware import Hardware, measure_read_bandwidth
from results import write_result

BENCH = Path(__file__).parent


class Side:
    """A benchmark worker in its own process; idle while the other side is timed."""

    def __init__(self, *command: str) -> None:
        self.process = subprocess.Popen(
            [*command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=BENCH,
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
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


@dataclass(frozen=True)
class Case:
    """What is timed. A decode is preceded by a prefill of `depth` tokens, not timed."""

    name: str
    verb: str
    count: int


CASES = (Case("pp512", "prefill", 512), Case("tg128", "decode", 128))


def tune_peer(python: str, model: str, threads: int, context: int) -> dict[str, tuple[str, str]]:
    """The best (flash attention, mmap) of llama.cpp for each case, by the median of three."""
    rates: dict[str, dict[tuple[str, str], float]] = {case.name: {} for case in CASES}
    for setting in (("0", "1"), ("1", "1"), ("0", "0"), ("1", "0")):
        side = Side(python, "peer_llama_cpp.py", model, str(threads), str(context), *setting)
        for case in CASES:
            side.rate("prefill", 512)
            rates[case.name][setting] = statistics.median(side.rate(case.verb, case.count) for _ in range(3))
        side.close()
    return {name: max(by_setting, key=lambda s: by_setting[s]) for name, by_setting in rates.items()}


def compare(options: argparse.Namespace) -> dict[str, object]:
    """Runs all cases; see the module docstring."""
    model, threads = str(options.model.resolve()), options.threads
    with GGUFFile.open(options.model) as file:
        file_bytes = file.num_bytes
    runner = CpuRunner.open(options.model, threads=threads, tier=options.tier, context_length=2048)
    bytes_per_token = runner.bytes_per_token
    runner.close()
    bandwidth = measure_read_bandwidth(threads)
    ceiling = bandwidth / bytes_per_token
    print(
        f"{bytes_per_token / 1e6:.0f} MB a token / {bandwidth / 1e9:.1f} GB/s = at most {ceiling:.1f} tok/s",
        flush=True,
    )
    best = tune_peer(options.peer_python, model, threads, 2048)
    ours = Side(sys.executable, "worker.py", model, str(threads), "2048", options.tier)
    results = {}
    for case in CASES:
        peer = Side(options.peer_python, "peer_llama_cpp.py", model, str(threads), "2048", *best[case.name])
        for side in (ours, peer):
            side.rate("prefill", 512)
        pairs = [
            (ours.rate(case.verb, case.count), peer.rate(case.verb, case.count)) for _ in range(options.pairs)
        ]
        peer.close()
        ratios = sorted(a / b for a, b in pairs)
        results[case.name] = {
            "ours_tok_s": statistics.median(a for a, _ in pairs),
            "llama_cpp_tok_s": statistics.median(b for _, b in pairs),
            "ratio": statistics.median(ratios),
            "ratio_min": ratios[0],
            "ratio_max": ratios[-1],
            "llama_cpp_flash_attention": best[case.name][0] == "1",
            "llama_cpp_mmap": best[case.name][1] == "1",
        }
        print(case.name, json.dumps(results[case.name]), flush=True)
    ours.close()
    decode_rate = float(str(results["tg128"]["ours_tok_s"]))
    return {
        "model": options.model.name,
        "file_bytes": file_bytes,
        "command": f"python bench/versus_llama_cpp.py {options.model.name} --threads {threads}",
        "machine": asdict(Hardware.measure()),
        "ours": ours.about,
        "peer": peer.about,
        "pairs": options.pairs,
        "bytes_per_token": bytes_per_token,
        "read_bandwidth_bytes_s": bandwidth,
        "ceiling_tok_s": ceiling,
        "share_of_ceiling": decode_rate / ceiling,
        "cases": results,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--peer-python", required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tier", default="auto")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    write_result(compare(options), options.out)


if __name__ == "__main__":
    main()
