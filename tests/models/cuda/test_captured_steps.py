"""What a capture keeps away from its stream."""

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest

from coldstream.errors import DeviceError, OutOfMemoryError
from coldstream.kernels.cuda.runtime.graphs import Pieces, recording
from coldstream.models.cuda.capacity import MAX_GRAPHS
from coldstream.models.cuda.graphs import GRAPHS_OF_PIECES, CapturedStep, CapturedSteps
from host_driver import HostDriver


class Cycle:
    """Garbage that only a collection finds."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def driver() -> Iterator[None]:
    with HostDriver().installed():
        yield


@pytest.fixture
def enabled() -> None:
    assert gc.isenabled(), "as Python starts"


@pytest.mark.usefixtures("enabled", "driver")
@pytest.mark.parametrize("fails", [False, True])
def test_no_garbage_is_collected_within_a_capture(fails: bool) -> None:
    garbage = weakref.ref(Cycle())

    def step() -> None:
        several = gc.get_threshold()[0] * (gc.get_threshold()[1] + 1) * (gc.get_threshold()[2] + 1)
        kept = [[] for _ in range(several + 1)]  # type: ignore[var-annotated]
        assert kept
        assert garbage() is not None
        if fails:
            raise OutOfMemoryError("none")

    with pytest.raises(OutOfMemoryError) if fails else nullcontext():
        CapturedStep.of(step, lambda nothing: nothing)
    assert gc.isenabled()
    gc.collect()
    assert garbage() is None


def test_of_an_early_start_the_second_step_of_a_shape_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch)
    steps.steps = CapturedSteps(is_early=True)
    assert [steps.run(shape) for shape in (1, 2)] == [1, 2]
    assert steps.captured == []
    assert [steps.run(shape) for shape in (2, 2)] == [2, 2]
    assert (steps.captured, steps.replayed) == ([2], [2])
    assert steps.steps.num_captured == 3, "steps that were no replays"


@pytest.mark.usefixtures("driver")
def test_a_collection_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        CapturedStep.of(lambda: None, lambda nothing: nothing)
        assert not gc.isenabled()
    finally:
        gc.enable()


class Steps:
    """Captures that only note what is asked of them; the first ones may find no memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.refused = self.asked = 0
        self.captured: list[object] = []
        self.replayed: list[object] = []
        self.steps = CapturedSteps()
        monkeypatch.setattr(CapturedStep, "of", self.of)

    def of(self, step: Callable[[], object], without_memory: object) -> SimpleNamespace:
        if self.refused:
            self.refused -= 1
            raise OutOfMemoryError("none")
        outputs = step()
        self.captured.append(outputs)
        return SimpleNamespace(
            graph=SimpleNamespace(launch=lambda: self.replayed.append(outputs)), outputs=outputs, weight=1
        )

    def run(self, shape: int, *, has_room: bool = True) -> object:
        def make_room() -> bool:
            self.asked += 1
            return has_room

        return self.steps.run(("step", shape), lambda: shape, lambda outputs: outputs, make_room)


def test_the_graphs_that_were_used_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch)
    for shape in range(MAX_GRAPHS):
        assert steps.run(shape) == shape
    assert steps.run(0) == 0
    steps.run(MAX_GRAPHS)  # in place of the one that was not used for longest
    assert steps.run(0) == 0
    assert steps.replayed == [0, 0]
    steps.run(1)
    assert steps.captured == [*range(MAX_GRAPHS + 1), 1]
    assert steps.steps.num_captured == MAX_GRAPHS + 2


@pytest.mark.usefixtures("driver")
def test_steps_in_pieces_count_as_several_graphs_and_forms_share_their_first_step() -> None:
    steps, runs = CapturedSteps(), list[tuple[int, int]]()

    def run(shape: int, form: int) -> object:
        def step() -> int:
            runs.append((shape, form))
            return shape

        return steps.run_in_pieces(("step", shape), form, step, lambda outputs: outputs)

    most = MAX_GRAPHS // GRAPHS_OF_PIECES
    for shape in range(most):
        assert [run(shape, 0), run(shape, 0), run(shape, 1), run(shape, 1)] == [shape] * 4
        assert runs == [(shape, 0), (shape, 0), (shape, 1)], "the first one, and a recording of each form"
        runs.clear()
    assert run(most - 1, 0) == most - 1
    assert runs == []
    assert run(0, 0) == 0
    assert runs == [(0, 0)], "its graphs have made place for others"
    assert sum(each.weight for each in steps._graphs.values()) <= MAX_GRAPHS


def test_a_capture_without_memory_is_tried_again_if_room_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch)
    steps.refused = 1
    with pytest.raises(OutOfMemoryError):
        steps.run(1, has_room=False)
    assert (steps.asked, steps.captured) == (1, [])
    steps.refused = 1
    assert steps.run(1) == 1
    assert (steps.asked, steps.captured) == (2, [1])


@pytest.mark.usefixtures("driver")
def test_a_step_in_pieces_that_failed_has_not_run() -> None:
    """It is not recorded next, as its kernels may not be there."""
    steps, in_a_recording = CapturedSteps(), list[bool]()

    def run(*, fails: bool) -> None:
        def step() -> None:
            in_a_recording.append(recording() is not None)
            if fails:
                raise DeviceError("a step that fails")

        steps.run_in_pieces(("step", 0), 0, step, lambda outputs: outputs)

    with pytest.raises(DeviceError):
        run(fails=True)
    run(fails=False)
    run(fails=False)
    assert in_a_recording == [False, False, True]


@pytest.mark.usefixtures("driver")
def test_steps_in_pieces_are_not_recorded_again_once_there_was_no_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps, recorded = CapturedSteps(), list[int]()

    def record(step: Callable[[], object]) -> object:
        recorded.append(1)
        raise OutOfMemoryError("no memory for a graph")

    monkeypatch.setattr(Pieces, "record", record)
    run = partial(steps.run_in_pieces, ("step", 0), 0, lambda: 7, lambda outputs: outputs)
    assert run() == 7
    with pytest.raises(OutOfMemoryError):
        run()
    assert [run(), run()] == [7, 7]
    assert recorded == [1]
