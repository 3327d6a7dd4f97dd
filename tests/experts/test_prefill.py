"""The order of a long prompt's work on experts: copies, staging buffers, the CPU's part. Without a GPU."""

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("cuda.bindings")

from stream_cases import BUFFER_BYTES, CHUNK, MAX_CPU_ROWS, NUM_EXPERTS, NUM_LAYERS, Prompts, open_host

from builders import write_gguf
from coldstream.errors import DeviceError, ModelChangedError
from coldstream.experts import prefill
from coldstream.experts.cpu_part import CpuPart
from coldstream.experts.cpu_share import BusRate, CpuShare, Share
from coldstream.experts.step_division import StepDivision
from coldstream.gguf.reader import GGUFFile
from coldstream.kernels.cuda.host_memory import RegisteredMemory
from device_model import Pieces
from device_seams import any_schedule, model_device, seeds

TRIED = "some, once layers of the bus were tried"
SHARES: dict[str, Callable[..., Share]] = {
    "none": lambda self, rows, experts, *rest: Share(0, 1.0, math.inf),
    "some": lambda self, rows, experts, *rest: Share(len(experts) // 3, 1.0, math.inf),
    "all": lambda self, rows, experts, *rest: Share(len(experts), 1.0, math.inf),
    TRIED: lambda self, rows, experts, *rest: Share(len(experts) // 3, 1.0, 1.0),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_gguf(path)
    return path


@contextmanager
def prompts_of(
    path: Path, seed: int, registers: bool = True, num_slots: int | None = None
) -> Iterator[Prompts]:
    """In the end the ring is given back."""
    with model_device(seed) as device:
        device.registers = registers
        prompts = Prompts(device, path, seed, num_slots)
        yield prompts
        prompts.close()


@any_schedule
@given(
    seed=seeds,
    share=st.sampled_from(sorted(SHARES)),
    registers=st.booleans(),
    short_rows=st.sampled_from([4, 1024]),
)
def test_ex04_every_pair_is_computed_once_of_bytes_that_have_arrived(
    path: Path, seed: int, share: str, registers: bool, short_rows: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuShare, "split", SHARES[share])
        patch.setattr(prefill, "MAX_SHORT_ROWS", short_rows)
        with prompts_of(path, seed, registers) as prompts:
            for rows in (MAX_CPU_ROWS, CHUNK, 3, MAX_CPU_ROWS):
                prompts.step(rows)
            counters = prompts.stream.counters
            used = counters.streamed - counters.unused
            assert np.array_equal(used + counters.on_cpu, counters.wanted)
            if share != TRIED:
                assert (counters.on_cpu.sum() == 0) == (share == "none")


@any_schedule
@given(
    seed=seeds,
    share=st.sampled_from(sorted(SHARES)),
    num_slots=st.sampled_from([2, 3, 9, NUM_LAYERS * NUM_EXPERTS]),
    short_rows=st.sampled_from([4, 1024]),
)
def test_ex04_experts_of_a_pool_stay_until_they_are_copied_and_others_come_from_the_disk(
    path: Path, seed: int, share: str, num_slots: int, short_rows: int
) -> None:
    """While the CPU has others read into the pool."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuShare, "split", SHARES[share])
        patch.setattr(prefill, "MAX_SHORT_ROWS", short_rows)
        with prompts_of(path, seed, num_slots=num_slots) as prompts:
            pool = prompts.host.pool
            assert pool is not None
            from_pool = [0]

            def note(pieces: Pieces) -> bool:
                begin, num_bytes = pool.stacks.pool.memory()
                from_pool[0] += sum(begin <= source < begin + num_bytes for _, source, _ in pieces)
                return False

            prompts.device.refuses = note
            for rows in (MAX_CPU_ROWS, CHUNK, 3, MAX_CPU_ROWS):
                pool.stacks.pool.clear()
                for layer in range(NUM_LAYERS):
                    pool.stacks.pool.preload(layer, prompts.rng.permutation(NUM_EXPERTS)[: num_slots // 3])
                prompts.step(rows)
            assert from_pool[0] > 0 or num_slots < 9
            for layer in range(NUM_LAYERS):
                for expert in range(NUM_EXPERTS):
                    with pytest.raises(ValueError, match="not held"):
                        pool.release(layer, expert)


@any_schedule
@given(seed=seeds, share=st.sampled_from(sorted(SHARES)), registers=st.booleans())
def test_trap_15_copies_are_no_more_than_on_demand_but_for_what_is_counted_as_unused(
    path: Path, seed: int, share: str, registers: bool
) -> None:
    """And groups that were begun and not read are never more than the ring has bytes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuShare, "split", SHARES[share])
        with prompts_of(path, seed, registers) as prompts:
            copied = [0]

            def note(pieces: Pieces) -> bool:
                begun = sum(size for _, _, size in pieces)
                copied[0] += begun
                if registers:  # or a thread begins copies later than the stream does
                    waiting = sum(group.transfer.num_bytes for group in prompts.stream._waiting)
                    assert waiting + begun <= prompts.ring.numel()
                return False

            prompts.device.refuses = prompts.into_ring(note)
            for rows in (CHUNK, MAX_CPU_ROWS, CHUNK, CHUNK):
                prompts.step(rows)
            prompts.stream.settle()
            counters = prompts.stream.counters
            experts = counters.wanted - counters.on_cpu + counters.unused
            sizes = [sum(stack.matrix_bytes for stack in stacks) for stacks in prompts.layers]
            assert copied[0] == sum(experts * sizes)


def test_the_cpu_takes_part_in_steps_of_as_many_rows_as_it_has_room_for(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuShare, "split", SHARES["all"])
    with prompts_of(path, seed=1) as prompts:
        prompts.stream.resident[:] = False
        on_cpu = prompts.stream.counters.on_cpu
        prompts.step(MAX_CPU_ROWS + 1)
        assert not on_cpu.any()
        prompts.step(MAX_CPU_ROWS)
        assert on_cpu[0] > 0


def test_a_step_goes_the_way_that_is_chosen_for_it_and_its_time_is_learned(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step of a way does something for the first time."""
    ways, learned = [True, False, True, False, True], []
    order = iter(ways)
    monkeypatch.setattr(CpuShare, "split", SHARES["all"])
    monkeypatch.setattr(CpuPart, "choose", lambda self, rows: next(order))
    monkeypatch.setattr(BusRate, "end_step", lambda self, *, with_cpu: 1e9 if with_cpu else 2e9)
    monkeypatch.setattr(
        CpuPart,
        "learn",
        lambda self, rows, seconds, on_bus, *, with_cpu, is_usual: learned.append(
            (rows, on_bus, with_cpu, is_usual)
        ),
    )
    with prompts_of(path, seed=1) as prompts:
        stream, counters = prompts.stream, prompts.stream.counters
        stream.resident[:] = False
        for way in ways:
            before, missed = counters.on_cpu.sum(), counters.wanted.copy()
            prompts.step(MAX_CPU_ROWS)
            assert (counters.on_cpu.sum() > before) == way
            sizes = [sum(layer.sizes) for layer in stream._layers]
            missed_bytes = int(((counters.wanted - missed) * sizes).sum())
            assert learned[-1][1] == pytest.approx(missed_bytes / (1e9 if way else 2e9))
        prompts.step(MAX_CPU_ROWS + 1)
    firsts = [False, False, True, True, True]
    assert [(rows, *rest) for rows, _, *rest in learned] == [
        (MAX_CPU_ROWS, way, is_usual) for way, is_usual in zip(ways, firsts, strict=True)
    ]


@pytest.mark.parametrize("share", ["some", TRIED])
def test_copies_of_a_layer_that_is_all_the_bus_s_count_as_without_the_cpu(
    path: Path, monkeypatch: pytest.MonkeyPatch, share: str
) -> None:
    """Those that were begun ahead of its router do not: the CPU computed for the layer before."""
    learned: list[tuple[int, bool]] = []
    monkeypatch.setattr(CpuShare, "split", SHARES[share])
    monkeypatch.setattr(
        BusRate, "learn", lambda bus, size, seconds, *, is_alone: learned.append((size, is_alone))
    )
    with prompts_of(path, seed=1) as prompts:
        prompts.stream.resident[:] = False
        streamed: list[int] = []
        divide = StepDivision.divide

        def noted(division: StepDivision, *given: Any) -> Any:
            found = divide(division, *given)
            size = sum(prompts.stream._layers[0].sizes)
            streamed.append(size * len(found.streamed) if found.is_alone else 0)
            return found

        monkeypatch.setattr(StepDivision, "divide", noted)
        prompts.step(MAX_CPU_ROWS)
        prompts.stream._learn_bus()
        assert sum(size for size, is_alone in learned if is_alone) == sum(streamed)
        assert (sum(streamed) > 0) == (share == TRIED)


@any_schedule
@given(seed=seeds)
def test_pauses_between_copies_that_follow_each_other_are_the_time_of_the_bus(path: Path, seed: int) -> None:
    """By the device's clock, which counts operations. A copy that was begun when none was on its way counts
    from its own beginning.
    """
    learned: list[tuple[int, float]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuPart, "choose", lambda part, rows: False)
        patch.setattr(BusRate, "learn", lambda bus, *copy, is_alone: learned.append(copy))
        with prompts_of(path, seed) as prompts:
            stream = prompts.stream
            stream.resident[:] = False
            stream.start_step(CHUNK)
            for group in ([0, 1], [2], [3, 4]):
                stream._begin(0, group)
                prompts.device.queue("others", effect=lambda operation: None)
            ends = [moving.transfer._result().event for moving in stream._moving]
            follows = [moving._behind is not None for moving in stream._moving]
            begun = [moving.transfer._result().begun for moving in stream._moving]
            prompts.device.synchronize()
            stream._learn_bus()
            since = [ends[i - 1] if follow else begun[i] for i, follow in enumerate(follows)]
            expected = [end.milliseconds_since(each) / 1e3 for end, each in zip(ends, since, strict=True)]
            assert [seconds for _, seconds in learned] == pytest.approx(expected)
            assert not follows[0]
            assert all(follows[1:]) or prompts.device._eagerness > 0


def test_copies_ahead_are_those_of_the_experts_that_the_last_step_chose(path: Path) -> None:
    """The last ones by number, so that no order of the file gives them."""
    with prompts_of(path, seed=1) as prompts:
        prompts.stream.resident[:] = False
        prompts.only = [NUM_EXPERTS - 3, NUM_EXPERTS - 2, NUM_EXPERTS - 1]
        prompts.step(CHUNK)
        for layer in range(NUM_LAYERS):
            ahead = [expert for group in prompts.stream._waiting for expert in group.experts]
            assert len(set(ahead) & set(prompts.only)) == min(len(ahead), len(prompts.only))
            assert bool(ahead) == (layer > 0)
            if layer == 0:
                prompts.stream.start_step(CHUNK)
            prompts._layer(layer, CHUNK)
        prompts.device.current.synchronize()
        prompts.stream.end_step()


def test_copies_ahead_are_those_that_are_guessed_in_a_step_that_need_not_want_all(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuPart, "choose", lambda part, rows: False)
    with prompts_of(path, seed=1) as prompts:
        stream = prompts.stream
        stream.resident[:] = False
        prompts.only, likely = [0, 1, 2], [NUM_EXPERTS - 3, NUM_EXPERTS - 2, NUM_EXPERTS - 1]
        prompts.step(MAX_CPU_ROWS + 1)
        prompts.guesses = likely
        stream.start_step(MAX_CPU_ROWS)
        for layer in range(NUM_LAYERS):
            ahead = [expert for group in stream._waiting for expert in group.experts]
            assert bool(ahead) == (layer > 0)
            assert len(set(ahead) & set(likely)) == min(len(ahead), len(likely))
            prompts._layer(layer, MAX_CPU_ROWS)
        prompts.device.current.synchronize()
        stream.end_step()


@any_schedule
@given(seed=seeds, first=st.integers(0, 20), registers=st.booleans())
def test_ex01_a_copy_refused_twice_is_an_error_and_the_next_step_is_right(
    path: Path, seed: int, first: int, registers: bool
) -> None:
    with prompts_of(path, seed, registers) as prompts:
        calls = [0]

        def refuses(pieces: Pieces) -> bool:
            calls[0] += 1
            return first < calls[0] <= first + 2

        prompts.device.refuses = prompts.into_ring(refuses)
        for _ in range(3):
            try:
                prompts.step(CHUNK)
            except DeviceError:
                assert calls[0] >= first + 2
                break
        prompts.device.refuses = lambda pieces: False
        # The runner waits for what the failed step has launched.
        prompts.device.current.synchronize()
        prompts.step(MAX_CPU_ROWS)
        prompts.step(CHUNK)


@any_schedule
@given(seed=seeds, registers=st.booleans())
def test_ex01_a_copy_refused_once_is_repeated(path: Path, seed: int, registers: bool) -> None:
    with prompts_of(path, seed, registers) as prompts:
        calls = [0]

        def refuses(pieces: Pieces) -> bool:
            calls[0] += 1
            return calls[0] % 2 == 1

        prompts.device.refuses = prompts.into_ring(refuses)
        prompts.step(CHUNK)
        prompts.step(MAX_CPU_ROWS)


@any_schedule
@given(seed=seeds, registers=st.booleans())
def test_ex04_a_settled_ring_may_be_written_by_others(path: Path, seed: int, registers: bool) -> None:
    """Also while groups of a failed step are on their way."""
    with prompts_of(path, seed, registers) as prompts:
        prompts.step(CHUNK)
        prompts.stream.start_step(CHUNK)
        prompts._layer(0, CHUNK)  # the first groups of the next layer have begun
        prompts.device.current.synchronize()
        prompts.stream.settle()
        prompts.device.queue("prefetch", writes=[(prompts.ring.data_ptr(), prompts.ring.numel())])
        prompts.device.current.synchronize()
        prompts.step(CHUNK)


def test_fl01_a_file_that_shrank_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    content = path.read_bytes()
    with prompts_of(path, seed=1, registers=False) as prompts:
        prompts.step(CHUNK)
        with path.open("r+b") as file:
            file.truncate(4096)
        with pytest.raises(ModelChangedError, match="shrank"):
            prompts.step(CHUNK)
        path.write_bytes(content)
        prompts.device.current.synchronize()
        prompts.step(CHUNK)


def test_ex01_a_prompt_whose_file_cannot_be_read_leaves_nothing_held(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    content = path.read_bytes()
    with prompts_of(path, seed=1, num_slots=6) as prompts:
        pool = prompts.host.pool
        assert pool is not None
        prompts.step(CHUNK)
        pool.stacks.pool.clear()
        pool.stacks.pool.preload(0, [0, 1, 2])
        os.truncate(path, 4096)
        with pytest.raises(ModelChangedError, match="shrank"):
            prompts.step(CHUNK)
        path.write_bytes(content)
        prompts.device.current.synchronize()
        prompts.step(CHUNK)
        prompts.step(MAX_CPU_ROWS)
        pool.stacks.pool.clear()
        assert (pool.stacks.pool.owners(0) < 0).all()


def test_fl02_a_read_that_brings_less_than_asked_for_goes_on(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = os.preadv
    monkeypatch.setattr(
        os, "preadv", lambda file, views, offset, *flags: read(file, [views[0][:9999]], offset, *flags)
    )
    with prompts_of(path, seed=1, registers=False) as prompts:
        prompts.step(CHUNK)


def test_an_address_belongs_to_the_file_that_is_mapped_there(path: Path) -> None:
    with prompts_of(path, seed=1) as prompts:
        host, size = prompts.host, path.stat().st_size
        mapped = host.ops.mapped_file(prompts.file, 0)
        for offset in (0, 1, size - 1):
            assert host.locate(mapped.address + offset) == (prompts.file, 0, offset)
        for outside in (mapped.address - 1, mapped.address + size):
            with pytest.raises(ValueError, match="no model file is mapped"):
                host.locate(outside)


@pytest.mark.parametrize("refused", [set(), {0}, {1}, {0, 1}])
def test_the_device_reads_all_of_a_model_or_not(refused: set[int], tmp_path: Path) -> None:
    """A file of two parts, of which the system may refuse to register one."""

    parts = write_gguf(tmp_path / "tiny.gguf", num_shards=2)
    calls: list[int] = []
    register = RegisteredMemory.register

    def registered(address: int, num_bytes: int, **_: object) -> RegisteredMemory | None:
        calls.append(address)
        return None if len(calls) - 1 in refused else register(address, num_bytes)

    with model_device(0), pytest.MonkeyPatch.context() as patch:
        patch.setattr(RegisteredMemory, "register", registered)
        with GGUFFile.open(parts[0]) as file:
            host, layers = open_host(file)
            assert len(calls) == 2
            assert host.is_readable == (not refused)
            mapped = [stack.mapped for stacks in layers for stack in stacks]
            assert any(mapped) == (len(refused) < 2)
            assert all(mapped) == (not refused)
            host.close()


def test_a_ring_that_no_expert_fits_into_is_refused(path: Path) -> None:
    with prompts_of(path, seed=1) as prompts, pytest.raises(ValueError, match="too small"):
        prefill.ExpertStream(prompts.host, prompts.ring[: BUFFER_BYTES // 2]).add_layer(prompts.layers[0])


@pytest.mark.parametrize("registers", [True, False])
def test_the_copy_engine_alone_copies_what_a_locked_pool_holds(path: Path, registers: bool) -> None:
    """Threads bring what is on the disk, and all that is in memory which is not locked."""
    with prompts_of(path, seed=3, registers=registers, num_slots=NUM_LAYERS * NUM_EXPERTS) as prompts:
        pool, stream = prompts.host.pool, prompts.stream
        assert pool is not None
        for layer in range(NUM_LAYERS):
            pool.stacks.pool.preload(layer, list(range(NUM_EXPERTS)))
        prompts.step(CHUNK)
        assert set(stream._copies) == {registers}
        pool.stacks.pool.clear()
        prompts.step(CHUNK)
        assert False in stream._copies
