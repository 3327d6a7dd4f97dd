"""What `coldstream plan` expects of a CPU, beside what runs reach: the demo, and parts of full-size models.

    taskset -c 0,1 python -m bench.engine.cpu_forecast --out FILE
    taskset -c 0 python -m bench.engine.cpu_forecast --models demo Q4_K_M --cpu-time

A part has a few layers of the full shape, and all of what is in a layer. The machine's rates are measured
first, and each plan is made by them as always. Repetitions go over all figures in turn, and the best of each
counts, as other programs only make a run slower. With --cpu-time one thread is timed by the processor's
seconds and not by a clock, on a machine that others use too.
"""

import argparse
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench.engine.gpu import FIRST_ID, numbers
from bench.engine.plan_forecast import compared, line
from bench.full_size_mixes import PLAIN
from bench.full_size_model import FULL_SHAPE, FullSizeWriter
from bench.peers.family_speed import PARTS, write_part
from bench.results import add_result_options, write_result
from coldstream.engine import LLM
from coldstream.engine.benchmark import BenchmarkTest, run_benchmark
from coldstream.placement.cost import decode_seconds_on_cpu
from coldstream.placement.hardware import Hardware
from coldstream.placement.prompt_cost import prefill_seconds_on_cpu
from coldstream.placement.rates import Rates
from coldstream.placement.sizes import ModelSizes
from coldstream.planning.config import EngineConfig
from coldstream.planning.gather import plan_by_name
from coldstream.planning.machine import measured_hardware

DEMO: Final = "demo"
MODELS: Final = (DEMO, PLAIN.name, *PARTS)
LAYERS, VOCAB = 4, 32768  # of the part of the full shape
DECODED: Final = 24  # tokens
Row = dict[str, Any]


@dataclass(frozen=True)
class Files:
    """The files of models, written when they are first asked for. is_for_plans: without quantised weights."""

    folder: Path
    is_for_plans: bool = False

    def of(self, name: str) -> Path:
        """The file of a model, which is one of `MODELS`."""
        path = self.folder / f"{name}-part.gguf"
        if name == DEMO:
            with as_file(files("coldstream.assets") / "demo.gguf") as found:
                return found
        if not path.exists():
            if name == PLAIN.name:
                shape = replace(FULL_SHAPE, layers=LAYERS, vocab=VOCAB)
                writer = FullSizeWriter(path, shape, 0, len(os.sched_getaffinity(0)), mix=PLAIN)
                writer.write(is_for_plans=self.is_for_plans)
            else:
                write_part(path, name, is_for_plans=self.is_for_plans)
        return path


def config_of(path: Path, work: Row, threads: int) -> EngineConfig:
    """The settings of a plan and of its run."""
    ctx_size = max(*work["prompts"], *work["depths"]) + 2 * DECODED
    return EngineConfig(str(path), device="cpu", ctx_size=ctx_size, spec_type="none", threads=threads)


def expected(model: ModelSizes, rates: Rates, work: Row, chunk_size: int) -> dict[str, float]:
    """Tokens a second, by the names of `figures`. All weights are in RAM."""
    resident = np.ones((model.num_layers, model.num_experts), np.bool_)
    found = {}
    for name, test in figures(work).items():
        if test.num_generated:
            whole = (1.0,) * model.num_layers
            found[name] = 1 / decode_seconds_on_cpu(model, rates, whole, test.mean_context)
        else:
            tokens = test.num_prompt
            found[name] = tokens / prefill_seconds_on_cpu(model, rates, resident, None, tokens, chunk_size)
    return found


def figures(work: Row) -> dict[str, BenchmarkTest]:
    """What is measured, by name."""
    decoded = {f"decode at {depth}": BenchmarkTest(0, DECODED, depth) for depth in work["depths"]}
    return decoded | {str(tokens): BenchmarkTest(tokens, 0, 0) for tokens in work["prompts"]}


def measured(path: Path, work: Row, threads: int) -> dict[str, list[float]]:
    """Tokens a second of each repetition, by figure."""
    found: dict[str, list[float]] = {name: [] for name in figures(work)}
    config = config_of(path, work, threads)
    given = {"ctx_size": config.ctx_size, "spec_type": "none", "threads": threads}
    with LLM(path, device="cpu", **given) as llm:
        vocab = llm.opened.runner.spec.vocab_size
        for number in range(work["repetitions"]):
            for name, test in figures(work).items():
                length = test.num_prompt + test.num_generated + test.depth + 2
                ids = [(FIRST_ID * (number + 1) + place) % vocab for place in range(length)]
                found[name] += run_benchmark(llm.opened, ids, test, 1, lambda _: None).samples
    return found


def rows(options: argparse.Namespace, work: Row) -> Iterator[Row]:
    """A row for each model."""
    threads = 1 if options.cpu_time else measured_hardware(None, again=True).num_physical_cores
    with ExitStack() as stack:
        folder = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.folder)))
        for name in options.models:
            path = Files(folder).of(name)
            planned = plan_by_name(config_of(path, work, threads))
            model, rates = planned.known.model, planned.known.rates
            runs = measured(path, work, threads)
            best = {figure: max(samples) for figure, samples in runs.items()}
            plan = expected(model, rates, work, planned.plan.fixed.chunk_size)
            yield {
                "model": name,
                "budget": None,
                "experts_share": 1.0,
                "threads": threads,
                "rates": asdict(rates),
                "figures": compared(plan, best),
                "runs_tok_s": runs,
            }


def run(options: argparse.Namespace) -> Row:
    """All models; see the module docstring."""
    if options.cpu_time:
        time.perf_counter = time.process_time
        measured_hardware(None, again=True)
    work = {"prompts": options.prompts, "depths": options.depths, "repetitions": options.repetitions}
    machine = Hardware.measure()
    result: Row = {
        "command": command(options),
        "machine": {"cpu": machine.cpu_name, "cores": machine.num_physical_cores},
        "clock": "CPU time" if options.cpu_time else "wall",
        "cpu_work": work,
        "rows": [],
    }
    for row in rows(options, work):
        result["rows"].append(row)
        print(line(row["model"], row), file=sys.stderr, flush=True)
        write_result(result, options.out, options.commit)
    return result


def command(options: argparse.Namespace) -> str:
    words = ["taskset", "-c", ",".join(map(str, sorted(os.sched_getaffinity(0))))]
    words += ["python", "-m", "bench.engine.cpu_forecast", "--models", *options.models]
    for name in ("prompts", "depths"):
        words += [f"--{name}", ",".join(map(str, getattr(options, name)))]
    words += ["--repetitions", str(options.repetitions), *(["--cpu-time"] if options.cpu_time else [])]
    return shlex.join(words)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--prompts", type=numbers, default=[128, 512, 2048], help="tokens")
    parser.add_argument("--depths", type=numbers, default=[0, 1024], help="positions before decoded tokens")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--cpu-time", action="store_true", help="of one thread")
    parser.add_argument("--folder", type=Path, help="for the files, which are removed again")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="instead, where the files stay")
    add_result_options(parser)
    return parser


def main(words: Sequence[str] | None = None) -> int:
    """Exits with 1 if a forecast is not near what was measured."""
    result = run(arguments().parse_args(words))
    return int(not all(both["is_near"] for row in result["rows"] for both in row["figures"].values()))


if __name__ == "__main__":
    sys.exit(main())
