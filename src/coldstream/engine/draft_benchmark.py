"""Timing generation with drafts beside the same without: what speculation brings on this machine.

The prompt is the text of `benchmark.py`, and the tokens are the model's own likeliest ones, the same in every
run. Choosing them is part of the times.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from coldstream.decoding import SamplingParams, SpeculationStatistics
from coldstream.engine.benchmark import BenchmarkTest
from coldstream.engine.llm import LLM
from coldstream.engine.opened_model import OpenedModel
from coldstream.engine.request import Statistics

LEAST_PROMPT = 64  # tokens: a drafter needs a text to go on from


@dataclass(frozen=True)
class DraftedTest:
    """A decode test of `benchmark.py`, after a prompt of LEAST_PROMPT tokens at least."""

    test: BenchmarkTest

    @property
    def name(self) -> str:
        """llama-bench's name, and that there are drafts."""
        return f"{self.test.name}, drafted"

    @property
    def num_prompt(self) -> int:
        return max(LEAST_PROMPT, self.test.depth)

    @property
    def num_tokens(self) -> int:
        """Tokens of context that the test needs."""
        return self.num_prompt + self.test.num_generated + 1


@dataclass(frozen=True)
class DraftedResult:
    """Tokens per second of each repetition, after one that isn't counted."""

    test: DraftedTest
    samples: tuple[float, ...]
    plain_samples: tuple[float, ...]  # without drafts, interleaved with the others
    speculation: SpeculationStatistics  # of the last repetition

    @property
    def mean(self) -> float:
        return statistics.fmean(self.samples)

    @property
    def plain_mean(self) -> float:
        return statistics.fmean(self.plain_samples)


def run_drafted(
    opened: OpenedModel,
    token_ids: Sequence[int],
    test: DraftedTest,
    repetitions: int,
    report: Callable[[int], None],
) -> DraftedResult:
    """Run `test` after the first of `token_ids`, of which there must be enough; the model must have drafts.

    report(run) is called before each pair of runs. Raises as `LLM.generate`.
    """
    plain = LLM.from_opened(replace(opened, speculation=None))
    drafted = LLM.from_opened(opened)
    samples, plain_samples = [], []
    for run in range(repetitions + 1):
        report(run)
        plain_samples.append(_run_once(plain, token_ids, test).generated_tokens_per_s)
        last = _run_once(drafted, token_ids, test)
        samples.append(last.generated_tokens_per_s)
    assert last.speculation is not None, "a model with drafts says what they brought"
    return DraftedResult(test, tuple(samples[1:]), tuple(plain_samples[1:]), last.speculation)


def _run_once(llm: LLM, token_ids: Sequence[int], test: DraftedTest) -> Statistics:
    params = SamplingParams(temperature=0, max_tokens=1 + test.test.num_generated, ignore_eos=True, seed=0)
    try:
        (output,) = llm.generate(list(token_ids[: test.num_prompt]), params)
    finally:
        llm.forget()
    return output.statistics
