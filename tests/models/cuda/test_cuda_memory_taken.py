"""Another program takes the device's memory: slots of experts give some back, and no bit changes."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from cuda_runner_cases import TakenMemory, open_cuda, open_partly, taken_memory
from one_sequence import OneSequence, step_rows
from runner_cases import MIX, token_ids

from bench.device import no_memory_left
from builders import Dims, write_gguf
from coldstream.assets import demo_model_path
from coldstream.errors import OutOfMemoryError
from coldstream.experts import partial_experts
from coldstream.experts.executor import PartialExecutor
from coldstream.experts.prefetch import Prefetching
from coldstream.experts.slots.segments import SlotSegments
from coldstream.kernels.cuda.runtime import calls
from coldstream.kvcache import CacheSize
from coldstream.models.cuda.graphs import CapturedStep
from coldstream.models.cuda.inputs import StepShape
from coldstream.models.cuda.loaded_model import Loaded

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

MIB = 2**20
SIZES = (1, 2, 7, 9, 17, 40, 64, 70, 200)


@pytest.fixture(scope="module")
def expected() -> dict[int, np.ndarray]:
    """Logits after prompts of several lengths, with everything resident."""
    with open_cuda(demo_model_path(), context_length=512) as runner:
        return {size: after_prompt(runner, size) for size in SIZES}


@pytest.fixture
def taken() -> Iterator[TakenMemory]:
    with taken_memory() as taken:
        yield taken


@pytest.fixture
def shrinking(taken: TakenMemory, monkeypatch: pytest.MonkeyPatch) -> Iterator[OneSequence]:
    """Half of the experts in slots, whose memory is in several pieces."""
    monkeypatch.setattr(partial_experts, "SlotSegments", partial(SlotSegments, segment_bytes=MIB))
    with open_partly(
        demo_model_path(), 0.5, streamed=0.5, context_length=512, cache_size=CacheSize.of(41, 512)
    ) as runner:
        yield runner


def after_prompt(runner: OneSequence, size: int) -> np.ndarray:
    """Logits after a prompt and three tokens more."""
    runner.reset()
    logits = [runner.prefill(token_ids(size))]
    logits += [runner.decode(token) for token in (3, 1, 4)]
    return np.stack(logits)


def num_slots(runner: OneSequence) -> int:
    assert runner.gpu_experts is not None
    return runner.gpu_experts.num_slots


def more_than_there_is() -> NoReturn:
    raise calls.out_of_memory()


def every_other_capture_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    capture, numbers = CapturedStep.of, count()

    def failing(step: Callable[[], Any], without_memory: Callable[[Any], Any]) -> CapturedStep:
        def running_out() -> Any:
            outputs = step()
            more_than_there_is()
            return outputs

        return capture(step if next(numbers) % 2 else running_out, without_memory)

    monkeypatch.setattr(CapturedStep, "of", failing)


def test_mm03_a_capture_that_finds_no_memory_takes_some_from_slots(
    shrinking: OneSequence,
    taken: TakenMemory,
    expected: dict[int, np.ndarray],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slots, before = num_slots(shrinking), taken.num_bytes
    every_other_capture_fails(monkeypatch)
    for size, want in expected.items():
        assert np.array_equal(after_prompt(shrinking, size), want), size
    left = num_slots(shrinking)
    assert 0 < left < slots
    assert taken.num_bytes < before
    for size, want in expected.items():
        assert np.array_equal(after_prompt(shrinking, size), want), size
    assert num_slots(shrinking) == left


def test_mm03_memory_that_is_free_again_is_taken_for_slots(
    shrinking: OneSequence, expected: dict[int, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = num_slots(shrinking)
    with monkeypatch.context() as patch:
        every_other_capture_fails(patch)
        assert np.array_equal(after_prompt(shrinking, 9), expected[9])
    assert num_slots(shrinking) < slots
    monkeypatch.setattr(partial_experts, "STEPS_BEFORE_GROWTH", 2)
    shrinking.reset()
    shrinking.prefill(token_ids(9))
    for _ in range(600):
        if shrinking.position > 500:
            shrinking.reset()
        shrinking.decode(7)
    assert num_slots(shrinking) == slots
    for size, want in expected.items():
        assert np.array_equal(after_prompt(shrinking, size), want), size


def test_mm03_a_capture_that_ends_in_its_middle_leaves_nothing_running_beside_the_next(
    expected: dict[int, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partial_experts, "SlotSegments", partial(SlotSegments, segment_bytes=MIB))
    compute, numbers = PartialExecutor.compute, count()

    def failing_once(executor: PartialExecutor, *args: Any) -> Any:
        if calls.is_capturing() and next(numbers) == 2:
            more_than_there_is()
        return compute(executor, *args)

    with open_partly(
        demo_model_path(), 0.5, streamed=0.5, context_length=512, prefetching=Prefetching(1, 4)
    ) as runner:
        slots = num_slots(runner)
        with monkeypatch.context() as patch:
            patch.setattr(PartialExecutor, "compute", failing_once)
            assert np.array_equal(after_prompt(runner, 7), expected[7])
        assert num_slots(runner) < slots
        for size, want in expected.items():
            assert np.array_equal(after_prompt(runner, size), want), size


def test_mm03_captures_go_on_until_no_slot_is_left_and_then_fail_their_request_alone(
    shrinking: OneSequence, expected: dict[int, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        every_other_capture_fails(patch)
        for size in range(2, 41):  # each is a graph of its own
            sequences = [shrinking.new_sequence() for _ in range(size)]
            before = num_slots(shrinking)
            if before == 0:
                with pytest.raises(OutOfMemoryError, match="memory ran out"):
                    step_rows(shrinking, sequences, [7] * size)
                break
            step_rows(shrinking, sequences, [7] * size)
            for sequence in sequences:
                shrinking.release(sequence)
            assert num_slots(shrinking) < before
    assert num_slots(shrinking) == 0
    for size, want in expected.items():
        assert np.array_equal(after_prompt(shrinking, size), want), size


def test_mm03_the_first_step_of_a_sequence_is_repeated_where_memory_was_given_back(
    shrinking: OneSequence, expected: dict[int, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Loaded.step
    for size in (9, 70, 200):
        failures = count()

        def failing_once(loaded: Loaded, shape: StepShape, failures: Iterator[int] = failures) -> Any:
            hidden = step(loaded, shape)
            if next(failures) == 0:
                more_than_there_is()  # when the state is already another one
            return hidden

        before = num_slots(shrinking)
        with monkeypatch.context() as patch:
            patch.setattr(Loaded, "step", failing_once)
            assert np.array_equal(after_prompt(shrinking, size), expected[size]), size
        assert num_slots(shrinking) < before


def test_mm03_a_later_step_fails_its_request_and_the_next_one_has_the_same_bits(
    shrinking: OneSequence, expected: dict[int, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    shrinking.reset()
    shrinking.prefill(token_ids(9))

    def failing(loaded: Loaded, rows: int) -> Any:
        more_than_there_is()

    with monkeypatch.context() as patch:
        patch.setattr(Loaded, "step", failing)
        with pytest.raises(OutOfMemoryError, match="memory ran out"):
            shrinking.prefill(token_ids(70))
    assert shrinking.position == 0
    assert np.array_equal(after_prompt(shrinking, 70), expected[70])


def test_mm03_all_memory_is_taken_and_generation_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Segments that are large enough to be the driver's own; whether it asks for them is its business."""
    (path,) = write_gguf(
        tmp_path / "moe.gguf", types=MIX, dims=Dims(hidden=512, experts=32, expert_ffn=512, experts_used=4)
    )
    monkeypatch.setattr(partial_experts, "SlotSegments", partial(SlotSegments, segment_bytes=24 * MIB))
    sizes = (17, 24, 33, 64)
    with open_cuda(path) as whole:
        expected = {size: after_prompt(whole, size) for size in sizes}
    with open_partly(path, 0.75, streamed=0.5) as runner, no_memory_left():
        for size in sizes:
            assert np.array_equal(after_prompt(runner, size), expected[size])
