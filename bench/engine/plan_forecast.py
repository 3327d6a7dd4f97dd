"""What `coldstream plan` expects of each mix of the full-size file, beside what a run reaches.

    python -m bench.engine.plan_forecast --mix Q4_K_M Q2_K --device cpu --layers 4 --vocab 32768
    python -m bench.engine.plan_forecast --mix UD-IQ3_S --device cuda --vram auto 8G --experts 3 0

The file of a mix is written to `--folder`, measured with each budget, and removed; with --keep it stays, and
one that is there is used. The plan that is measured
is the one that is asked for its forecast; the machine's rates are measured anew before the first. Decoding
follows text that walks through the vocabulary, so that experts are used as often as the plan's hit rates say.
"""

import argparse
import os
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.device import describe
from bench.engine.gpu import FIRST_ID, numbers
from bench.engine.gpu_hybrid import GIB, GREEDY, budget_with
from bench.full_size_mixes import MIXES, Mix, mix_named
from bench.full_size_model import FULL_SHAPE, FullSizeWriter
from bench.results import add_result_options, write_result
from coldstream.engine import LLM
from coldstream.engine.benchmark import BenchmarkTest, run_benchmark
from coldstream.kernels.cuda.device import find_gpu
from coldstream.placement.forecast import Known, forecast
from coldstream.placement.plan_file import save_plan
from coldstream.planning.config import EngineConfig
from coldstream.planning.gather import plan_by_name
from coldstream.planning.machine import measured_hardware
from coldstream.planning.planned import Planned

PROMPT_TOKENS = 64  # of the text that is continued
ROOM = 64  # positions more than the tokens of a text
NEAR = 0.2  # a forecast should be within this share of what is measured


@dataclass(frozen=True)
class Work:
    """What is measured with each plan."""

    prompts: Sequence[int]
    warm_tokens: int  # of a text, before it is timed
    timed_tokens: int
    texts: int

    @property
    def ctx_size(self) -> int:
        return max(PROMPT_TOKENS + self.warm_tokens + self.timed_tokens, *self.prompts) + ROOM

    @property
    def mean_context(self) -> int:
        """Positions before a timed token, on average."""
        return PROMPT_TOKENS + self.warm_tokens + self.timed_tokens // 2


def decoded_tok_s(llm: LLM, first_id: int, work: Work) -> float:
    """Tokens a second of one text from an id on, after those that warm up its experts.

    Raises RuntimeError if the text does not walk.
    """
    vocab = llm.opened.runner.spec.vocab_size
    prompt = [(first_id + i) % vocab for i in range(PROMPT_TOKENS)]
    llm.forget()
    tokens: list[int] = []
    start = time.perf_counter()
    for piece in llm.stream(prompt, replace(GREEDY, max_tokens=work.warm_tokens + work.timed_tokens)):
        tokens += piece.token_ids
        if len(tokens) <= work.warm_tokens:
            start, num_before = time.perf_counter(), len(tokens)
    seconds = time.perf_counter() - start
    expected = [(first_id + PROMPT_TOKENS + i) % vocab for i in range(len(tokens))]
    if tokens != expected:
        raise RuntimeError(f"not a figure of this model: text from {first_id} left the walk")
    return (len(tokens) - num_before) / seconds


def measure(planned: Planned, path: Path, work: Work) -> dict[str, list[float]]:
    """Tokens a second of each run of a plan: decoding as `decode`, prompts by their length."""
    with TemporaryDirectory() as folder:
        kept = Path(folder) / "plan.json"
        save_plan(planned.run, kept)
        with LLM(path, device=planned.config.device, plan=str(kept)) as llm:
            vocab = llm.opened.runner.spec.vocab_size
            found: dict[str, list[float]] = {}
            for length in work.prompts:
                ids = [(FIRST_ID + i) % vocab for i in range(length + 1)]
                done = run_benchmark(llm.opened, ids, BenchmarkTest(length, 0, 0), 3, lambda _: None)
                found[str(length)] = list(done.samples)
            step = vocab // (work.texts + 1)
            texts = [decoded_tok_s(llm, FIRST_ID + step * text, work) for text in range(work.texts)]
            return {"decode": texts, **found}


def expected(planned: Planned, known: Known, work: Work) -> dict[str, float]:
    """The same as the plan forecasts it; prompts whose length it does not forecast are left out."""
    found = forecast(planned.plan, known, work.mean_context, pool=planned.run.pool)
    prefill = {str(length): rate for length, rate in found.prefill.items() if length in work.prompts}
    return {"decode": found.decode, **prefill}


def compared(plan: dict[str, float], run: dict[str, float]) -> dict[str, dict[str, Any]]:
    """By figure: both, and the forecast over what was measured."""
    return {
        name: {
            "forecast_tok_s": plan[name],
            "measured_tok_s": run[name],
            "ratio": plan[name] / run[name],
            "is_near": abs(plan[name] / run[name] - 1) <= NEAR,
        }
        for name in run
        if name in plan
    }


def measure_mix(path: Path, options: argparse.Namespace, work: Work, *, again: bool) -> list[dict[str, Any]]:
    """A row for each budget. again: whether the machine's rates are measured anew before the first."""
    rows = []
    for number, budget in enumerate(budgets_of(path, options, work)):
        config = EngineConfig(
            str(path), device=options.device, vram=budget, ctx_size=work.ctx_size, spec_type="none"
        )
        planned = plan_by_name(config, measure=again and not number)
        runs = measure(planned, path, work)
        medians = {name: statistics.median(rates) for name, rates in runs.items()}
        rows.append(
            {
                "budget": budget if options.device == "cuda" else None,
                "experts_share": planned.plan.resident_bytes / planned.sizes.all_expert_bytes,
                "rates": asdict(planned.known.rates),
                "figures": compared(expected(planned, planned.known, work), medians),
                "runs_tok_s": runs,
            }
        )
        print(line(path.stem, rows[-1]), file=sys.stderr, flush=True)
    return rows


def budgets_of(path: Path, options: argparse.Namespace, work: Work) -> list[int | str]:
    """Budgets of GPU memory: those that are named, and those with so many GiB of experts."""
    budgets: list[int | str] = list(options.vram)
    if options.experts:
        hardware = measured_hardware(find_gpu())
        wanted = [int(gib * GIB) for gib in options.experts]
        budgets += [budget_with(path, hardware, work.ctx_size, 1, num_bytes) for num_bytes in wanted]
    return budgets


def line(name: str, row: dict[str, Any]) -> str:
    """A row for people: the forecast over what was measured."""
    figures = (
        f"{figure} {both['forecast_tok_s']:,.1f} / {both['measured_tok_s']:,.1f} = {both['ratio']:.2f}"
        for figure, both in row["figures"].items()
    )
    return f"{name} {row['budget'] or ''} ({row['experts_share']:.0%} of experts): " + ", ".join(figures)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """All mixes; see the module docstring."""
    work = Work(options.prompts, options.warm_tokens, options.timed_tokens, options.texts)
    shape = replace(FULL_SHAPE, layers=options.layers, vocab=options.vocab)
    result: dict[str, Any] = {
        "command": command(options),
        "machine": describe(options.device),
        "layers": options.layers,
        "vocab": options.vocab,
        "work": asdict(work),
        "mixes": {},
    }
    for number, mix in enumerate(options.mix):
        with ExitStack() as stack:
            folder = options.keep or stack.enter_context(TemporaryDirectory(dir=options.folder))
            path = Path(folder) / f"{mix.name}.gguf"
            if not path.exists():
                FullSizeWriter(path, shape, 0, len(os.sched_getaffinity(0)), mix=mix).write()
            result["mixes"][mix.name] = {
                "file_bytes": path.stat().st_size,
                "rows": measure_mix(path, options, work, again=not number),
            }
        write_result(result, options.out, options.commit)
    return result


def command(options: argparse.Namespace) -> str:
    words = ["python", "-m", "bench.engine.plan_forecast", "--mix", *(mix.name for mix in options.mix)]
    words += ["--device", options.device, "--layers", str(options.layers), "--vocab", str(options.vocab)]
    words += ["--prompts", ",".join(map(str, options.prompts))]
    if options.device == "cuda":
        words += ["--vram", *options.vram]
    if options.experts:
        words += ["--experts", *(f"{gib:g}" for gib in options.experts)]
    return shlex.join(words)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known: list[Mix] = [mix for mix in MIXES.values() if not mix.unknown_types]
    parser.add_argument("--mix", nargs="+", type=mix_named, default=known, help=", ".join(MIXES))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--vram", nargs="+", default=["auto"], help="budgets of GPU memory")
    parser.add_argument("--experts", nargs="+", type=float, default=[], help="budgets with GiB of experts")
    parser.add_argument("--layers", type=int, default=FULL_SHAPE.layers)
    parser.add_argument("--vocab", type=int, default=FULL_SHAPE.vocab)
    parser.add_argument("--prompts", type=numbers, default=[512, 2048], help="tokens")
    parser.add_argument("--warm-tokens", type=int, default=512)
    parser.add_argument("--timed-tokens", type=int, default=256)
    parser.add_argument("--texts", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="for the files, which are removed again")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="instead, where the files stay")
    add_result_options(parser)
    return parser


def main() -> int:
    """Exits with 1 if a forecast is not near what was measured."""
    result = run(arguments().parse_args())
    rows = [row for mix in result["mixes"].values() for row in mix["rows"]]
    return int(not all(both["is_near"] for row in rows for both in row["figures"].values()))


if __name__ == "__main__":
    sys.exit(main())
