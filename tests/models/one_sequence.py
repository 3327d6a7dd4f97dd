"""A runner with one current sequence, for tests that follow a single text."""

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from bench.runners import open_cpu_runner
from coldstream import kvcache
from coldstream.decoding import AnyLogits, SamplingParams, TokenChooser
from coldstream.kvcache import Batch, Segment
from coldstream.models.runner import ModelRunner, Progress


class OneSequence:
    """Whatever it lacks is the runner's, with which it is closed."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.sequence = runner.new_sequence()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.runner.close()

    @property
    def position(self) -> int:
        return self.sequence.length

    def reset(self) -> None:
        self.runner.clear(self.sequence)

    def extend(self, token_ids: Sequence[int], progress: Progress | None = None) -> Any:
        return self.runner.extend(self.sequence, token_ids, progress)

    def prefill(self, token_ids: Sequence[int], progress: Progress | None = None) -> np.ndarray:
        """`extend`, with logits in an array of their own."""
        return np.array(self.extend(token_ids, progress))

    def decode(self, token_id: int) -> np.ndarray:
        return self.prefill((token_id,))

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        self.reset()
        return self.runner.logits(token_ids)


def step_rows(
    runner: OneSequence, sequences: Sequence[kvcache.Sequence], token_ids: Sequence[int]
) -> np.ndarray:
    """A token of each of several sequences in one step: logits [sequences, vocab]."""
    segments = tuple(Segment(each, [token]) for each, token in zip(sequences, token_ids, strict=True))
    return np.concatenate([np.array(logits) for logits in runner.step(Batch(segments))])


def chosen_after(logits: AnyLogits, context: Sequence[int], params: SamplingParams, seed: int) -> int:
    """The token that follows `context`."""
    return TokenChooser(params, seed, 0, ())(logits, context).token_id


def open_cpu(path: Path, **options: Any) -> OneSequence:
    return OneSequence(open_cpu_runner(path, **options))
