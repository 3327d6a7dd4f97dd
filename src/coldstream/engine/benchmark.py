"""Timing prefill and decode on real text, as llama-bench does: neither tokenising nor sampling is timed.

The text is Python's standard library, from a place that a seed picks, so that routing is that of language and
not of noise. Decoding appends the text's tokens, not the model's choices, so that every run computes the
same.
"""

import importlib.util
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from coldstream.errors import InvalidRequestError
from coldstream.gguf.tokenizer import Tokenizer
from coldstream.models.runner import ModelRunner
from coldstream.placement.forecast import forecast
from coldstream.placement.hardware import Hardware
from coldstream.planning.planned import Planned

_TEXT_MODULES = (
    "argparse",
    "ast",
    "dataclasses",
    "difflib",
    "inspect",
    "logging",
    "tarfile",
    "typing",
    "zipfile",
)
_CHARS_PER_TOKEN = 16  # more than code ever has on average
_SEED_STRIDE = 7919  # characters between the starting points of neighbouring seeds


@dataclass(frozen=True)
class BenchmarkTest:
    """Prefill `num_prompt` or decode `num_generated` tokens (the other is 0) after `depth` others."""

    num_prompt: int
    num_generated: int
    depth: int

    @property
    def name(self) -> str:
        """llama-bench's name, for example `pp512` or `tg128 @ d4096`."""
        what = f"pp{self.num_prompt}" if self.num_prompt else f"tg{self.num_generated}"
        return f"{what} @ d{self.depth}" if self.depth else what

    @property
    def mean_context(self) -> int:
        """Positions that a decoded token attends to, the mean over tokens."""
        return self.depth + 1 + self.num_generated // 2

    @property
    def num_tokens(self) -> int:
        """Tokens of context that the test needs."""
        # A decode test has one token more, as decoding needs a sequence to continue.
        return self.depth + (self.num_prompt or self.num_generated + 1)


@dataclass(frozen=True)
class BenchmarkResult:
    """Tokens per second of each repetition, after one run that isn't counted."""

    test: BenchmarkTest
    samples: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.samples)

    @property
    def deviation(self) -> float:
        """Sample standard deviation; 0 for a single repetition."""
        return statistics.stdev(self.samples) if len(self.samples) > 1 else 0.0


def run_benchmark(
    runner: ModelRunner,
    token_ids: Sequence[int],
    test: BenchmarkTest,
    repetitions: int,
    report: Callable[[int], None],
) -> BenchmarkResult:
    """Run `test` over `token_ids` once to warm up and `repetitions` times for the record, calling
    `report(run)` before each run, in a sequence of its own each. Raises InvalidRequestError for too few
    tokens.
    """
    if len(token_ids) < test.num_tokens:
        raise InvalidRequestError(
            f"{test.name} needs {test.num_tokens} tokens of text, there are {len(token_ids)}"
        )
    samples = []
    for run in range(repetitions + 1):
        report(run)
        samples.append(_run_once(runner, token_ids, test))
    return BenchmarkResult(test, tuple(samples[1:]))


def times_as_forecast(planned: Planned, hardware: Hardware, results: Sequence[BenchmarkResult]) -> float:
    """The fastest decoding of `results`, as a multiple of what the rates of `hardware` let expect; or 0."""
    known = replace(planned, hardware=hardware).known
    decoded = [result for result in results if result.test.num_generated]
    return max(
        (each.mean / forecast(planned.plan, known, each.test.mean_context).decode for each in decoded),
        default=0.0,
    )


def benchmark_tokens(tokenizer: Tokenizer, num_tokens: int, seed: int) -> list[int]:
    """At least `num_tokens` token ids of the text, starting at a place that `seed` picks."""
    text = "\n".join(_source(name) for name in _TEXT_MODULES)
    start = seed * _SEED_STRIDE % len(text)
    part = (text[start:] + text[:start])[: num_tokens * _CHARS_PER_TOKEN]
    token_ids: list[int] = []
    while len(token_ids) < num_tokens:
        token_ids += tokenizer.encode(part)
    return token_ids


def _run_once(runner: ModelRunner, token_ids: Sequence[int], test: BenchmarkTest) -> float:
    sequence = runner.new_sequence()
    try:
        num_before = test.depth if test.num_prompt else test.depth + 1
        if num_before:
            np.asarray(runner.extend(sequence, token_ids[:num_before]))
        timed_ids = token_ids[num_before : test.num_tokens]
        start = time.perf_counter()
        if test.num_prompt:
            np.asarray(runner.extend(sequence, timed_ids))
        else:
            for token_id in timed_ids:
                np.asarray(runner.extend(sequence, (token_id,)))
        return len(timed_ids) / (time.perf_counter() - start)
    finally:
        runner.release(sequence)


def _source(module_name: str) -> str:
    spec = importlib.util.find_spec(module_name)
    if spec is None or spec.origin is None:
        raise InvalidRequestError(f"this Python has no source of {module_name} to measure with")
    return Path(spec.origin).read_text(encoding="utf-8")
