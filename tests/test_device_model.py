"""The model of a device: what it allows, and what it finds, whatever its schedule."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from device_model import ModelDevice, ModelEvent, ModelStream, Violation, range_of

seeds = st.integers(0, 2**32 - 1)


def memory(num_bytes: int = 16) -> torch.Tensor:
    return torch.zeros(num_bytes, dtype=torch.uint8)


def copy(device: ModelDevice, target: torch.Tensor, source: torch.Tensor, stream: ModelStream) -> None:
    assert device.copy_to_device([(target.data_ptr(), source.data_ptr(), target.numel())], stream.number)


@given(seeds, st.booleans())
def test_what_waits_for_a_copy_reads_its_bytes_and_what_does_not_is_a_race(seed: int, waits: bool) -> None:
    device = ModelDevice(seed)
    side, event = ModelStream(device), ModelEvent(device)
    source, target = memory() + 3, memory()
    copy(device, target, source, side)
    event.record(side)
    if waits:
        device.current.wait_event(event)
    found: list[int] = []

    def read(*_: object) -> None:
        found.extend(target.tolist())

    if not waits:
        with pytest.raises(Violation, match="copy 0 writes what kernel reads, in no order"):
            device.queue("kernel", reads=[range_of(target)], effect=read)
        with pytest.raises(Violation):
            device.check()
        return
    device.queue("kernel", reads=[range_of(target)], effect=read)
    device.synchronize()
    assert found == source.tolist()


@given(seeds)
def test_an_event_waits_for_what_was_recorded_and_not_for_what_came_later(seed: int) -> None:
    device = ModelDevice(seed)
    side, event = ModelStream(device), ModelEvent(device)
    first, second, source = memory(), memory(), memory()
    copy(device, first, source, side)
    event.record(side)
    copy(device, second, source, side)
    device.current.wait_event(event)
    device.queue("kernel", reads=[range_of(first)])
    with pytest.raises(Violation, match="copy 1"):
        device.queue("kernel", reads=[range_of(second)])


@given(seeds)
def test_a_query_is_true_only_when_the_work_is_done_and_orders_what_follows(seed: int) -> None:
    device = ModelDevice(seed)
    side, event = ModelStream(device), ModelEvent(device)
    assert event.query(), "nothing was recorded"
    source, target = memory() + 3, memory()
    copy(device, target, source, side)
    event.record(side)
    if event.query():
        assert torch.equal(source, target)
    else:
        event.synchronize()
        assert event.query()
    device.queue("kernel", reads=[range_of(target)])
    device.synchronize()


def test_schedules_are_early_and_late() -> None:
    answers = set()
    source, target = memory(), memory()
    for seed in range(40):
        device = ModelDevice(seed)
        event = ModelEvent(device)
        copy(device, target, source, device.default)
        event.record()
        answers.add(event.query())
    assert answers == {True, False}


@given(seeds)
def test_host_memory_that_is_changed_before_a_copy_read_it(seed: int) -> None:
    device = ModelDevice(seed)
    source, target = memory(), memory()
    copy(device, target, source, device.default)
    device.default.synchronize()
    source += 1  # has been read
    copy(device, target, source, device.default)
    has_run = bool(target[0])
    source += 1
    if has_run:
        device.synchronize()
    else:
        with pytest.raises(Violation, match="changed before its turn"):
            device.synchronize()


@given(seeds)
def test_host_memory_holds_rubbish_until_it_has_been_written(seed: int) -> None:
    device = ModelDevice(seed)
    source, target = memory() + 3, memory()
    device.copy_to_host(target, source)
    assert target.tolist() in ([0xA5] * 16, [3] * 16)
    device.synchronize()
    assert torch.equal(target, source)


@given(seeds, st.booleans())
def test_host_memory_that_is_written_again_before_the_host_knows(seed: int, waits: bool) -> None:
    device = ModelDevice(seed)
    source, target = memory(), memory()
    copy(device, target, source, device.default)
    if waits:
        device.synchronize()
        device.written_by_host(range_of(source))
        return
    with pytest.raises(Violation, match="the host writes what copy 0 may still touch"):
        device.written_by_host(range_of(source))


@given(seeds, st.booleans())
def test_memory_is_given_back_when_nothing_touches_it(seed: int, waits: bool) -> None:
    device = ModelDevice(seed)
    source, allocation = memory(), device.allocate(16)
    assert device.copy_to_device([(allocation.address, source.data_ptr(), 16)], device.default.number)
    if waits:
        device.synchronize()
    del allocation
    if waits:
        device.check()
        return
    with pytest.raises(Violation, match="given back"):
        device.check()


@given(seeds)
def test_a_refused_copy_moves_nothing(seed: int) -> None:
    device = ModelDevice(seed)
    device.refuses = lambda pieces: True
    source, target = memory() + 3, memory()
    assert not device.copy_to_device([(target.data_ptr(), source.data_ptr(), 16)], 0)
    device.synchronize()
    assert not target.any()
    device.refuses = lambda pieces: False
    copy(device, target, source, device.default)
    device.synchronize()
    assert target.all()


def test_times_are_of_events_that_keep_them_and_have_happened() -> None:
    device = ModelDevice(0)
    timed = [ModelEvent(device, has_time=True) for _ in range(2)]
    for event in timed:
        event.record()
    with pytest.raises(RuntimeError, match="must have happened"):
        timed[1].milliseconds_since(timed[0])
    device.synchronize()
    assert timed[1].milliseconds_since(timed[0]) > 0
    plain = ModelEvent(device)
    plain.record()
    device.synchronize()
    with pytest.raises(RuntimeError, match="keep their time"):
        plain.milliseconds_since(timed[0])


def test_an_operation_without_an_answer_is_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("device_model.WAIT_LIMIT_S", 0.0)
    device = ModelDevice(0)
    device.queue("wait_answer", is_ready=lambda: False)
    with pytest.raises(Violation, match="waits for ever"):
        device.synchronize()
