"""Allocations on the device that fail one after the other: errors of ours, and everything is given back."""

import gc
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cuda_runner_cases import open_partly
from one_sequence import OneSequence
from runner_cases import token_ids

from coldstream.errors import OutOfMemoryError
from coldstream.experts import partial_experts
from coldstream.experts.slots.segments import SlotSegments
from coldstream.kernels.cuda.runtime import allocations
from coldstream.models.cuda.graphs import CapturedStep

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

NEVER = 0
PROMPTS = (5, 40, 90)


class FailingAllocations:
    """Counts tensors on the device and in page-locked memory, and captures; the number-th finds no memory."""

    def __init__(self, number: int) -> None:
        self._number = number
        self.count = 0

    def _check(self) -> None:
        self.count += 1
        if self.count == self._number:
            raise torch.OutOfMemoryError("CUDA out of memory: as the test wants it")

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("empty", "zeros"):
            monkeypatch.setattr(torch, name, self._watched(getattr(torch, name)))
        page_locked = allocations.page_locked

        def taken(shape: tuple[int, ...], dtype: str) -> np.ndarray:
            self._check()
            return page_locked(shape, dtype)

        monkeypatch.setattr(allocations, "page_locked", taken)
        capture = CapturedStep.of

        def captured(step: Callable[[], Any], without_memory: Callable[[Any], Any]) -> CapturedStep:
            def watched() -> Any:
                outputs = step()
                self._check()
                return outputs

            return capture(watched, without_memory)

        monkeypatch.setattr(CapturedStep, "of", captured)

    def _watched(self, make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def made(*size: Any, **options: Any) -> torch.Tensor:
            if str(options.get("device", "")).startswith("cuda"):
                self._check()
            return make(*size, **options)

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


def allocated() -> int:
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


def test_mm02_whichever_allocation_fails_everything_is_given_back_and_a_retry_succeeds(
    moe_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = answers(moe_path)
    counting = FailingAllocations(NEVER)
    with monkeypatch.context() as patch:
        counting.install(patch)
        assert all(outcomes(moe_path, expected))
    assert counting.count > 10
    before, failed_loads = allocated(), 0
    for number in range(1, counting.count + 1):
        with monkeypatch.context() as patch:
            FailingAllocations(number).install(patch)
            loaded, *served = outcomes(moe_path, expected)
        failed_loads += not loaded
        assert served.count(False) <= 1, number
        assert allocated() == before, number
        if number % 5 == 0:
            assert all(outcomes(moe_path, expected)), number
    assert 5 < failed_loads < counting.count
    assert all(outcomes(moe_path, expected))


@pytest.mark.parametrize("share", [0.0, 0.2, 0.4, 0.6, 0.8, 0.95])
def test_mm02_a_process_that_may_take_less_than_the_model_needs(moe_path: Path, share: float) -> None:
    expected = answers(moe_path)
    before = allocated()
    torch.cuda.reset_peak_memory_stats()
    reserved = torch.cuda.memory_reserved()
    assert all(outcomes(moe_path, expected))
    need = torch.cuda.max_memory_reserved() - reserved
    total = torch.cuda.get_device_properties().total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((reserved + share * need) / total)
    try:
        results = list(outcomes(moe_path, expected))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert share > 0 or results == [False]
    assert allocated() == before
    assert all(outcomes(moe_path, expected))
