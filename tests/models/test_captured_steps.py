"""What a capture keeps away from its stream."""

import gc
import weakref
from contextlib import nullcontext

import pytest
import torch

from coldstream.models.captured_steps import CapturedStep


class Cycle:
    """Garbage that only a collection finds."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def enabled() -> None:
    assert gc.isenabled(), "as Python starts"


@pytest.mark.usefixtures("enabled")
@pytest.mark.parametrize("fails", [False, True])
def test_no_garbage_is_collected_within_a_capture(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: nullcontext())
    garbage = weakref.ref(Cycle())

    def step() -> None:
        several = gc.get_threshold()[0] * (gc.get_threshold()[1] + 1) * (gc.get_threshold()[2] + 1)
        kept = [[] for _ in range(several + 1)]  # type: ignore[var-annotated]
        assert kept
        assert garbage() is not None
        if fails:
            raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError) if fails else nullcontext():
        CapturedStep.of(step, lambda nothing: nothing)
    assert gc.isenabled()
    gc.collect()
    assert garbage() is None
