"""Allocations on the device that fail one after the other: errors of ours, and everything is given back."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_runner_cases import TakenMemory, open_partly, taken_memory
from one_sequence import OneSequence
from runner_cases import token_ids

from bench.device import no_memory_left
from coldstream.errors import OutOfMemoryError
from coldstream.experts import partial_experts
from coldstream.experts.slots.segments import SlotSegments
from coldstream.kernels.cuda.runtime import allocations, calls
from coldstream.models.cuda.graphs import CapturedStep

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

NEVER = 0
PROMPTS = (5, 40, 90)


class FailingAllocations:
    """Counts memory of the device and page-locked memory, and captures; the number-th finds no memory."""

    def __init__(self, number: int) -> None:
        self._number = number
        self.count = 0

    def _check(self) -> None:
        self.count += 1
        if self.count == self._number:
            raise calls.out_of_memory()

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("block", "scratch", "page_locked"):
            monkeypatch.setattr(allocations, name, self._watched(getattr(allocations, name)))
        capture = CapturedStep.of

        def captured(step: Callable[[], Any], without_memory: Callable[[Any], Any]) -> CapturedStep:
            def watched() -> Any:
                outputs = step()
                self._check()
                return outputs

            return capture(watched, without_memory)

        monkeypatch.setattr(CapturedStep, "of", captured)

    def _watched(self, make: Callable[..., Any]) -> Callable[..., Any]:
        def made(*size: Any) -> Any:
            self._check()
            return make(*size)

        return made


@pytest.fixture(autouse=True)
def several_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial_experts, "SlotSegments", partial(SlotSegments, segment_bytes=2**19))


def answer(runner: OneSequence, size: int) -> np.ndarray:
    """A request: the logits after a prompt and after two tokens more."""
    runner.reset()
    return np.stack([runner.prefill(token_ids(size)), runner.decode(3), runner.decode(1)])


def outcomes(path: Path, expected: list[np.ndarray]) -> Iterator[bool]:
    """Whether a load and three requests were served with the expected bits."""
    try:
        runner = open_partly(path, 0.5, streamed=0.5)
    except OutOfMemoryError:
        yield False
        return
    yield True
    with runner:
        for size, want in zip(PROMPTS, expected, strict=True):
            try:
                actual = answer(runner, size)
            except OutOfMemoryError:
                assert runner.position == 0
                yield False
                continue
            assert np.array_equal(actual, want)
            yield True


def answers(path: Path) -> list[np.ndarray]:
    with open_partly(path, 0.5, streamed=0.5) as runner:
        return [answer(runner, size) for size in PROMPTS]


@pytest.fixture
def taken() -> Iterator[TakenMemory]:
    with taken_memory() as taken:
        yield taken


def test_mm02_whichever_allocation_fails_everything_is_given_back_and_a_retry_succeeds(
    moe_path: Path, taken: TakenMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = answers(moe_path)
    counting = FailingAllocations(NEVER)
    with monkeypatch.context() as patch:
        counting.install(patch)
        assert all(outcomes(moe_path, expected))
    assert counting.count > 10
    failed_loads = 0
    for number in range(1, counting.count + 1):
        with monkeypatch.context() as patch:
            FailingAllocations(number).install(patch)
            loaded, *served = outcomes(moe_path, expected)
        failed_loads += not loaded
        assert served.count(False) <= 1, number
        assert taken.now() == 0, number
        if number % 5 == 0:
            assert all(outcomes(moe_path, expected)), number
    assert 5 < failed_loads < counting.count
    assert all(outcomes(moe_path, expected))


@pytest.mark.parametrize("share", [0.0, 0.2, 0.4, 0.6, 0.8, 0.95])
def test_mm02_a_process_that_may_take_less_than_the_model_needs(
    moe_path: Path, taken: TakenMemory, share: float
) -> None:
    expected = answers(moe_path)
    assert all(outcomes(moe_path, expected))
    with no_memory_left(int(share * taken.most)):
        results = list(outcomes(moe_path, expected))
    assert share > 0 or results == [False]
    assert taken.now() == 0
    assert all(outcomes(moe_path, expected))
