"""Prefill and decode speed of the full-size model with all its weights on the GPU, and what bandwidth allows.

    python -m bench.engine.gpu full.gguf                 writes the model file first if it isn't there (21 GB)

Prints the ceiling, then a table, and writes one JSON file per case. Before anything is timed, greedy text
must walk through the vocabulary, as these files make it do (full_size_model.py). Prompts are consecutive ids
of tokens: their routing is as local as that of real text.
"""

import argparse
import os
import shlex
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.device import describe, measure_bandwidth
from bench.full_size_mixes import PLAIN, Mix
from bench.full_size_model import FULL_SHAPE, FullSizeWriter
from bench.results import ROOT, add_result_options, write_result
from coldstream.engine import LLM, SamplingParams
from coldstream.engine.benchmark import BenchmarkTest, run_benchmark
from coldstream.kvcache.cache import kv_token_bytes
from coldstream.models.footprint import bytes_per_token

FIRST_ID = 1000  # of the token ids of a prompt
WALK_TOKENS = 16


@dataclass(frozen=True)
class Setting:
    """The settings common to all cases."""

    llm: LLM
    machine: dict[str, Any]
    bandwidth: float
    command: str
    repetitions: int

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that decoding one token reads."""
        runner = self.llm.opened.runner
        return bytes_per_token(runner.spec, runner.file.tensors)

    def bytes_per_token(self, test: BenchmarkTest) -> float:
        """Bytes that a token of a decode test reads, its keys and values included."""
        mean_context = test.depth + 1 + test.num_generated / 2
        spec = self.llm.opened.runner.spec
        return self.weight_bytes + mean_context * kv_token_bytes(spec, self.llm.opened.config.cache_type_k)


def check_walk(llm: LLM) -> None:
    """Greedy text goes from each token id to the next. Raises RuntimeError with the ids if it doesn't."""
    prompt = list(range(FIRST_ID, FIRST_ID + WALK_TOKENS))
    (output,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=WALK_TOKENS))
    if list(output.token_ids) != list(range(prompt[-1] + 1, prompt[-1] + 1 + WALK_TOKENS)):
        raise RuntimeError(f"not a figure of this model: after {prompt[-1]} came {output.token_ids}")
    llm.forget()


def measure(setting: Setting, test: BenchmarkTest) -> dict[str, Any]:
    """One case."""
    opened = setting.llm.opened
    spec = opened.runner.spec
    token_ids = [(FIRST_ID + i) % spec.vocab_size for i in range(test.num_tokens)]
    result = run_benchmark(opened, token_ids, test, setting.repetitions, lambda run: None)
    rate = statistics.median(result.samples)
    figures: dict[str, Any] = {
        "case": test.name,
        "command": setting.command,
        "machine": setting.machine,
        "model": str(opened.runner.file.metadata["general.name"]),
        "file_bytes": opened.runner.file.num_bytes,
        "layers": spec.num_layers,
        "num_prompt": test.num_prompt,
        "num_generated": test.num_generated,
        "depth": test.depth,
        "ran": {
            "device": opened.config.device,
            "tier": opened.runner.tier,
            "chunk_size": opened.runner.chunk_size,
            "cache_type": opened.config.cache_type_k,
        },
        "warm_up_runs": 1,
        "samples_tok_s": list(result.samples),
        "median_tok_s": rate,
        "spread": (max(result.samples) - min(result.samples)) / rate,
    }
    if test.num_generated:
        num_bytes = setting.bytes_per_token(test)
        figures |= {
            "weight_bytes_per_token": setting.weight_bytes,
            "bytes_per_token": num_bytes,
            "bandwidth_bytes_s": setting.bandwidth,
            "floor_s_per_token": num_bytes / setting.bandwidth,
            "share_of_floor": rate * num_bytes / setting.bandwidth,
        }
    return figures


def table(results: Sequence[dict[str, Any]]) -> str:
    """All cases, for people."""
    lines = [f"{'test':>14} {'tok/s':>10} {'spread':>7} {'of floor':>9}"]
    for result in results:
        share = f"{result['share_of_floor']:.0%}" if "share_of_floor" in result else ""
        lines.append(
            f"{result['case']:>14} {result['median_tok_s']:10.1f} {result['spread']:7.1%} {share:>9}"
        )
    return "\n".join(lines)


def write_model(
    path: Path,
    layers: int,
    vocab: int,
    chat_template: str | None = None,
    mix: Mix = PLAIN,
    popular_share: float = 0.0,
) -> None:
    """The model file, if it isn't there. See `FullSizeWriter`."""
    if not path.exists():
        shape, threads = replace(FULL_SHAPE, layers=layers, vocab=vocab), len(os.sched_getaffinity(0))
        seconds = FullSizeWriter(path, shape, 0, threads, chat_template, mix, popular_share).write()
        print(f"wrote {path.stat().st_size / 1e9:.1f} GB in {seconds:.1f} s", flush=True)


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Everything; see the module docstring."""
    write_model(options.model, options.layers, options.vocab)
    tests = [BenchmarkTest(count, 0, 0) for count in options.prompts]
    tests += [BenchmarkTest(0, options.generate, depth) for depth in options.depths]
    ctx_size = max(2 * WALK_TOKENS, *(test.num_tokens for test in tests))
    bandwidth = measure_bandwidth(options.device, options.threads)
    with LLM(options.model, device=options.device, ctx_size=ctx_size) as llm:
        setting = Setting(llm, describe(options.device), bandwidth, command(options), options.repetitions)
        print(
            f"{setting.weight_bytes / 1e9:.2f} GB of weights a token / {bandwidth / 1e12:.2f} TB/s = "
            f"at most {bandwidth / setting.weight_bytes:.0f} tok/s",
            flush=True,
        )
        check_walk(llm)
        results = []
        for test in tests:
            results.append(measure(setting, test))
            name = test.name.replace(" @ ", "_")
            write_result(results[-1], options.out / f"{name}.json", options.commit)
    return results


def command(options: argparse.Namespace) -> str:
    """The command that repeats the measurement."""
    words = ["python", "-m", "bench.engine.gpu", options.model.name, "--device", options.device]
    words += ["--repetitions", str(options.repetitions), "--generate", str(options.generate)]
    for name in ("prompts", "depths"):
        words += [f"--{name}", ",".join(str(number) for number in getattr(options, name))]
    return shlex.join(words)


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    add_result_options(parser, ROOT / "docs" / "results" / "gpu")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--threads", type=int, default=2, help="for the bandwidth of --device cpu")
    parser.add_argument("--prompts", type=numbers, default=[168, 512, 2048, 8192])
    parser.add_argument("--generate", type=int, default=128)
    parser.add_argument("--depths", type=numbers, default=[0, 8192, 16384])
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--layers", type=int, default=FULL_SHAPE.layers, help="of a file that is written")
    parser.add_argument("--vocab", type=int, default=FULL_SHAPE.vocab, help="of a file that is written")
    options = parser.parse_args()
    print(table(run(options)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
