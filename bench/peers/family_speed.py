"""Speed of other families on the CPU, beside llama.cpp and ik_llama.cpp, interleaved with ours.

    python -m bench.peers.family_speed --llama-cpp LLAMA_BENCH --ik-llama-cpp LLAMA_BENCH --out RESULT.json

Files have the matrices of the published models, a few layers of them, fewer experts and a short vocabulary.
All else is as weight_types.py does it: its cases, its settings of peers, and how programs alternate. Routing
has no locality here: each program feeds random tokens of its own, and all tokens take other experts.
"""

import argparse
import os
import shlex
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bench.family_models import FAMILIES, Qwen4ExpWriter
from bench.full_size_model import CodeShares
from bench.peers.weight_types import IK_LLAMA_CPP, LLAMA_CPP, Peer, about, line, measure_file
from bench.results import add_result_options, commit, write_result
from coldstream.placement.hardware import Hardware

NO_LOCALITY = CodeShares(slow=0.0, fast=0.0, own=1.0)
VOCAB = 4096
NGRAM_ROWS = 100_000


@dataclass(frozen=True)
class Part:
    """What of a model is kept."""

    layers: int
    experts: int


# Each kind of layer is among them, in about the proportion that the model has.
PARTS = MappingProxyType(
    {
        "gpt-oss-20b": Part(layers=4, experts=16),
        "Laguna-XS-2.1": Part(layers=5, experts=64),
        "Qwen3.8-Flash-Next": Part(layers=4, experts=64),
        "gemma-4-26B-A4B": Part(layers=6, experts=32),
    }
)


def write_part(path: Path, name: str, *, is_for_plans: bool = False) -> None:
    """The file of a family. is_for_plans: as of `FullSizeWriter.write`."""
    family, part = FAMILIES[name], PARTS[name]
    shape = replace(family.shape, layers=part.layers, experts=part.experts, vocab=VOCAB)
    threads = len(os.sched_getaffinity(0))
    writer = family.writer(path, shape, 0, threads, mix=family.mix, shares=NO_LOCALITY)
    if isinstance(writer, Qwen4ExpWriter):
        writer.ngram = replace(writer.ngram, rows=NGRAM_ROWS)
    writer.write(is_for_plans=is_for_plans)


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """All families, one after the other; the result is written after each."""
    programs = (
        ("llama.cpp", options.llama_cpp, LLAMA_CPP),
        ("ik_llama.cpp", options.ik_llama_cpp, IK_LLAMA_CPP),
    )
    peers = [Peer(name, program.resolve(), tried) for name, program, tried in programs if program]
    result: dict[str, Any] = {
        "command": command(options),
        "machine": asdict(Hardware.measure()),
        "threads": options.threads,
        "tier": options.tier,
        "samples": options.samples,
        "peers": {},
        "models": {},
    }
    for name in options.families:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            path = Path(folder) / f"{name}.gguf"
            write_part(path, name)
            for peer in peers:
                result["peers"][peer.name] = result["peers"].get(peer.name) or about(
                    peer, path, options.threads
                )
            found = measure_file(path, peers, options, {})
        result["models"][name] = asdict(PARTS[name]) | {"mix": FAMILIES[name].mix.name} | found
        print(line(name, "", found), file=sys.stderr, flush=True)
        write_result(result, options.out, options.commit or commit())
    return result


def command(options: argparse.Namespace) -> str:
    words = ["python", "-m", "bench.peers.family_speed", "--threads", str(options.threads)]
    words += ["--tier", options.tier, "--samples", str(options.samples), "--families", *options.families]
    return shlex.join(words)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--llama-cpp", type=Path, help="its llama-bench")
    parser.add_argument("--ik-llama-cpp", type=Path, help="its llama-bench")
    parser.add_argument("--families", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tier", default="auto", help="of our kernels: avx2, avx512, …")
    parser.add_argument("--samples", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="for the files, which are removed again")
    add_result_options(parser)
    return parser


def main() -> int:
    compare(arguments().parse_args())
    return 0


if __name__ == "__main__":
    sys.exit(main())
