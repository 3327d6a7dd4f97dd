"""Inputs and results of steps that are queued before the host has seen the one before, under a model of a
device: what the host writes is not sent twice, and what it reads has arrived.
"""

import ctypes

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("cuda.bindings")

from coldstream.kernels.cuda.staged import StagedRing
from coldstream.kernels.sample.cuda import SETTINGS_WORDS, _RowSettings
from coldstream.kernels.sample.settings import RowSettings
from coldstream.models.cuda.logits import Sampler
from device_model import ModelDevice, ModelEvent, Operation, range_of
from device_seams import any_schedule, model_device, seeds


@any_schedule
@given(seeds, st.integers(0, 2))
def test_each_step_sees_what_was_written_for_it(seed: int, num_unseen: int) -> None:
    """The host may be some steps ahead."""
    with model_device(seed) as device:
        ring = StagedRing(torch.zeros(4, dtype=torch.int32))
        seen: list[list[int]] = []

        def step(operation: Operation) -> None:
            seen.append(ring.values[:3].tolist())

        steps = []
        for number in range(1, 9):
            ring.next_on_host()[:] = number
            ring.copy(3)
            steps.append(device.queue("step", reads=[range_of(ring.values)], effect=step))
            if num_unseen < 2 and number > num_unseen:
                device.wait_for(steps[-1 - num_unseen])
        device.synchronize()
        assert seen == [[number] * 3 for number in range(1, 9)]
        assert ring.values[3] == 0


def _sampler_scan(device: ModelDevice, sampling: ctypes.Structure) -> None:
    """The token of a row is its position."""
    settings = (sampling.settings, 4 * SETTINGS_WORDS)  # type: ignore[attr-defined]
    chosen = (sampling.chosen, 8)  # type: ignore[attr-defined]

    def choose(operation: Operation) -> None:
        row = _RowSettings.from_address(settings[0])
        ctypes.memmove(chosen[0], (ctypes.c_int32 * 2)(row.position, 0), 8)

    device.queue("sampler_scan", reads=[settings], writes=[chosen], effect=choose)


def _wait(event: ModelEvent) -> None:
    event.synchronize()


@any_schedule
@given(seeds)
def test_each_choice_is_read_when_it_is_made_while_the_next_is_queued(seed: int) -> None:
    with model_device(seed) as device:
        device.kernels["sampler_scan"] = lambda sampling: _sampler_scan(device, sampling)

        def zeros(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
            return torch.zeros(shape, dtype=getattr(torch, dtype))

        sampler = Sampler(zeros, 1, 8, 5)
        logits, started = torch.zeros(1, 5), []
        for position in range(1, 9):
            settings = RowSettings(0.0, 0, 1.0, 0.0, 1.0, 0.0, 0.0, (), 0, position)
            started.append(sampler.begin(logits, [0], [settings], _wait))
            if position > 1:
                assert started[-2].results() == [(position - 1, 0)]
        assert started[-1].results() == [(8, 0)]
        with pytest.raises(RuntimeError, match="these tokens are gone"):
            started[-3].results()
