"""Timing prefill and decode on real text, through the engine like any request; tokenising is not timed.

The text is Python's standard library, from a place that a seed picks, so that routing is that of language and
not of noise. Decoding samples with the usual settings and a fixed seed, so that every run computes the same.
"""

import importlib.util
import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from coldstream.decoding import SamplingParams
from coldstream.engine.engine import Engine
from coldstream.engine.events import Delta, Failed
from coldstream.engine.limits import EngineLimits
from coldstream.engine.opened_model import OpenedModel
from coldstream.engine.request_reader import RequestReader
from coldstream.engine.submission import Submission
from coldstream.errors import InvalidRequestError
from coldstream.gguf.tokenizer import Tokenizer
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
        # A prompt needs room for a token after it, and decoding begins after a prompt of one token.
        return self.depth + 1 + (self.num_prompt or self.num_generated + 1)


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
    opened: OpenedModel,
    token_ids: Sequence[int],
    test: BenchmarkTest,
    repetitions: int,
    report: Callable[[int], None],
) -> BenchmarkResult:
    """Run `test` over `token_ids` without drafts, once to warm up and `repetitions` times for the record.

    Calls `report(run)` before each run. Raises InvalidRequestError for too few tokens, and what computing
    raises.
    """
    if len(token_ids) < test.num_tokens:
        raise InvalidRequestError(
            f"{test.name} needs {test.num_tokens} tokens of text, there are {len(token_ids)}"
        )
    opened, samples = replace(opened, speculation=None), []
    for run in range(repetitions + 1):
        report(run)
        with closing(Engine(opened, EngineLimits(target_step_ms=math.inf))) as engine:
            samples.append(_run_once(engine, RequestReader(opened), token_ids, test))
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


def _run_once(engine: Engine, reader: RequestReader, token_ids: Sequence[int], test: BenchmarkTest) -> float:
    """Tokens per second. What lies before the timed rows is a kept prefix."""
    if test.depth:
        _times(engine, reader, token_ids[: test.depth], 1)
    num_prompt = test.depth + (test.num_prompt or 1)
    times = _times(engine, reader, token_ids[:num_prompt], 1 + test.num_generated)
    if test.num_prompt:
        return test.num_prompt / (times[1] - times[0])
    return test.num_generated / (times[-1] - times[1])


def _times(engine: Engine, reader: RequestReader, token_ids: Sequence[int], max_tokens: int) -> list[float]:
    """When a request began, and when each of its tokens was there, in seconds."""
    params = SamplingParams(seed=0, max_tokens=max_tokens, ignore_eos=True)
    engine.add(Submission(0, reader.of_prompt(list(token_ids), "prompt", params)))
    times = [time.perf_counter()]
    while not engine.is_idle:
        events = engine.step()
        now = time.perf_counter()
        for event in events:
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, Delta):
                times += [now] * len(event.piece.token_ids)
    return times


def _source(module_name: str) -> str:
    spec = importlib.util.find_spec(module_name)
    if spec is None or spec.origin is None:
        raise InvalidRequestError(f"this Python has no source of {module_name} to measure with")
    return Path(spec.origin).read_text(encoding="utf-8")
