"""The work around a step if the GPU does not hold all experts, without a GPU."""

from collections import deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial as bound
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("cuda.bindings")


from dataclasses import replace

import pytest
from partial_cases import RING_BYTES, DecodeSteps

from builders import write_gguf
from coldstream.errors import GenerationFault, OutOfMemoryError
from coldstream.experts import partial_experts
from coldstream.experts.partial_experts import SlotShares, slot_shares
from coldstream.experts.partial_tables import PartialTables
from coldstream.experts.prefetch import Prefetching
from coldstream.experts.slots.cache import ExpertCache
from coldstream.kernels.experts.mailbox import MAX_MAILBOX_ROWS, WORDS_PER_LINE, Mailbox
from coldstream.kernels.experts.shapes import MATRICES
from coldstream.placement.plan import FixedPart, PlacementPlan
from coldstream.placement.policies import DecayedFrequency
from coldstream.placement.routing_trace import RoutedModel
from coldstream.placement.run_plan import RunPlan
from device_model import Operation, range_of
from device_seams import any_schedule, model_device, seeds

PLACE_BYTES = 3 * 256 * 272  # of an expert of the model below
caps = st.none() | st.integers(4 * 4 * PLACE_BYTES, RING_BYTES)
prefetchings = st.builds(Prefetching, st.integers(1, 3), st.integers(1, 4), caps)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_gguf(path)
    return path


@contextmanager
def decode_steps_of(
    path: Path,
    seed: int = 0,
    prefetching: Prefetching | None = None,
    whole_layers: Collection[int] = (),
    mailbox_rows: int = MAX_MAILBOX_ROWS,
) -> Iterator[DecodeSteps]:
    with model_device(seed) as device:
        prefetching = prefetching or Prefetching(1, 2, 8 * PLACE_BYTES)
        runner = DecodeSteps(device, path, seed, prefetching, whole_layers, mailbox_rows)
        yield runner
        runner.close()


@any_schedule
@given(seed=seeds, prefetching=prefetchings, rows=st.lists(st.integers(1, 8), min_size=3, max_size=5))
def test_ex04_no_place_is_filled_while_its_layer_may_read_it(
    path: Path, seed: int, prefetching: Prefetching, rows: list[int]
) -> None:
    with decode_steps_of(path, seed, prefetching) as runner:
        later = list(range(prefetching.distance, runner.spec.num_layers))
        for count in rows:
            runner.step(count)
            assert sorted(runner.fetches) == later
            assert runner.expected == (later if count > 1 else []), "a router of one row writes hints itself"
            # What has been waited for includes what ran beside the step.
            runner.device.queue(
                "another", writes=[(runner.executor.ring.data_ptr(), runner.executor.ring.numel())]
            )


@any_schedule
@given(seed=seeds, rows=st.lists(st.sampled_from([1, 3, 64, 65, 100]), min_size=2, max_size=4))
def test_ex04_experts_of_a_prefill_are_staged_beside_no_other(path: Path, seed: int, rows: list[int]) -> None:
    """Steps whose experts the device shares out may follow one another without the host."""
    with decode_steps_of(path, seed, mailbox_rows=100) as runner:
        assert runner.partial.shared_rows == 100
        assert [runner.partial.must_wait(count) for count in (100, 101)] == [False, False]
        for count in rows:
            runner.partial.start_step(count)
            runner.num_asked = 0
            runner.queue(count)
            assert runner.num_asked == (len(runner.weights) if count > MAX_MAILBOX_ROWS else 0)
            runner.partial.launched()
            assert [runner.partial.must_wait(each) for each in (100, 101)] == [False, True]
            runner.device.current.synchronize()
            runner.partial.ended()


def test_what_the_bus_cannot_read_is_shared_out_by_the_host(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU would compute all missing experts of a prompt otherwise."""
    monkeypatch.setattr(PartialTables, "is_readable", False)
    with decode_steps_of(path, mailbox_rows=100) as runner:
        assert runner.partial.shared_rows == MAX_MAILBOX_ROWS


@any_schedule
@given(seed=seeds)
def test_ex04_copies_of_a_failed_prompt_are_over_before_experts_come_ahead(path: Path, seed: int) -> None:
    """Both go into the ring."""
    with decode_steps_of(path, seed) as runner:
        runner.step(1)
        runner.device.current.synchronize()
        rows, stream = MAX_MAILBOX_ROWS + 1, runner.executor.prefill.stream
        assert stream is not None
        runner.partial.start_step(rows)
        ids = torch.arange(rows * runner.spec.num_experts_per_tok, dtype=torch.int32) % 8
        stream.ask(torch.zeros(rows, runner.spec.hidden_size), ids.view(rows, -1))
        asked = torch.zeros(rows + 2, ids.numel() // rows, dtype=torch.int32)
        stream.share_out(0, rows, lambda groups, places: None, asked, None)
        # It fails here, when groups of the next layer have begun, so that nobody ends it.
        runner.device.current.synchronize()
        runner.step(1)
        runner.step(2)


def test_layers_have_their_numbers_before_any_has_run(path: Path) -> None:
    with decode_steps_of(path, whole_layers=[1]) as runner:
        partial = [0, 2, 3]
        found = [stacks[2] for stacks in runner.executor.tables.layers]
        downs = [runner.weights[i].down for i in partial]
        assert [each.source for each in found] == [down.source for down in downs]
        assert all(each.addresses is down.addresses for each, down in zip(found, downs, strict=True))
        addresses = [runner.partial.host.device_address(each.source, 1) for each in found]
        assert [each.mapped for each in found] == addresses
        assert all(addresses), "which the device reads from then on"
        assert len(runner.partial.host.server.work()) == len(partial)
        stream = runner.executor.prefill.stream
        assert stream is not None
        assert len(stream.resident) == len(partial)
        for number, layer in reversed(list(enumerate(partial))):
            runner.route(layer, 2)
            assert runner.sharing.request == (number + 1) | 2 << 16


def test_a_layer_without_guesses_has_no_places(path: Path) -> None:
    with decode_steps_of(path, prefetching=Prefetching(2, 2)) as runner:
        ring, stacks = runner.executor.prefetch, runner.weights[0]
        assert ring is not None
        tables = (stacks.gate, stacks.up, stacks.down)
        assert [bool(ring.prefetched(layer, tables).keys) for layer in range(4)] == [False, False, True, True]
        offsets = list(ring.prefetched(2, tables).room.offsets)
        sizes = [table.matrix_bytes for table in tables]
        assert all(offset % 256 == 0 for offset in offsets)
        ends = [offset + size for offset, size in zip(offsets, sizes, strict=True)]
        assert all(ends[m] <= offsets[m + 1] for m in range(MATRICES - 1))
        assert offsets[0] == 0
        assert not ring.notes(1, is_guessing=False).emptied
        assert ring.notes(1, is_guessing=True).emptied == ring.prefetched(3, tables).keys


@pytest.mark.parametrize("missing", [0, 1])
def test_places_are_as_large_as_the_cap_allows_and_hold_an_expert_or_are_refused(
    path: Path, missing: int
) -> None:
    cap = 3 * 2 * PLACE_BYTES - missing
    with decode_steps_of(path, prefetching=Prefetching(2, 2, cap)) as runner:
        ring, stacks = runner.executor.prefetch, runner.weights[2]
        assert ring is not None
        tables = (stacks.gate, stacks.up, stacks.down)
        if missing:
            with pytest.raises(ValueError, match=f"an expert of {PLACE_BYTES} bytes for places of"):
                ring.prefetched(2, tables)
            return
        first, places = runner.executor.ring.data_ptr(), [ring.prefetched(i, tables).room for i in (2, 3)]
        assert all(each.place_bytes == PLACE_BYTES for each in places)
        ends = [each.data + each.count * each.place_bytes for each in places]
        assert max(ends) == first + cap
        assert places[1].data == first, "that the third layer gave up"


@pytest.mark.parametrize("place", ["mailbox", "bulk"])
def test_an_answer_that_came_too_late_is_an_error(path: Path, place: str) -> None:
    with decode_steps_of(path) as runner:
        box: Mailbox = getattr(runner.partial.host, place)
        runner.partial.start_step(1 if place == "mailbox" else MAX_MAILBOX_ROWS + 1)
        box.words.numpy()[WORDS_PER_LINE + 1] = 3
        with pytest.raises(GenerationFault, match="in time"):
            runner.partial.ended()
        box.words.numpy()[WORDS_PER_LINE + 1] = 0
        runner.partial.ended()


def test_a_mailbox_is_answered_at_first_and_shared_with_the_host(path: Path) -> None:
    with model_device(0):
        box = Mailbox.create(2, 8, 5)
        assert box.done.numpy().tolist() == [1, 0]
        assert box.request.numpy().tolist() == [0]
        assert abs(box.done.data_ptr() - box.request.data_ptr()) >= 64
        request, done, x, ids, out = box.arrays()
        request[0], done[0], x[4, 7], ids[4, 1], out[4, 1, 7] = 1, 2, 3, 4, 5
        assert (int(box.request.numpy()[0]), int(box.done.numpy()[0])) == (1, 2)
        assert (box.x.numpy()[4, 7], box.ids.numpy()[4, 1], box.out.numpy()[4, 1, 7]) == (3, 4, 5)
        box.check()


class Residency:
    """Calls of an `ExpertResidency` when memory is short."""

    missing_bytes = 0
    grown = 0
    fails = False

    num_layers = 3

    def __init__(self) -> None:
        self.begun = 0
        self.events: list[str] = []
        self.ids: list[np.ndarray | None] = []  # of steps that ended
        self.resident = np.zeros((4, 8), bool)

    def start_step(self) -> None:
        self.begun += 1
        self.events.append("start")

    def ended(self, ids: np.ndarray | None) -> None:
        self.events.append("end")
        self.ids.append(None if ids is None else ids.copy())

    def prepare(self) -> None:
        self.events.append("prepare")

    def shrink(self) -> int:
        self.missing_bytes += 100
        return 100

    def grow(self) -> None:
        self.grown += 1
        if self.fails:
            raise OutOfMemoryError("no memory")
        self.missing_bytes -= 100

    def close(self) -> None: ...


@pytest.mark.parametrize(("free", "fails", "grows"), [(199, False, 0), (200, False, 1), (10**6, True, 1)])
def test_mm03_slots_come_back_once_twice_their_memory_is_free(
    path: Path, monkeypatch: pytest.MonkeyPatch, free: int, fails: bool, grows: int
) -> None:
    monkeypatch.setattr(partial_experts, "STEPS_BEFORE_GROWTH", 3)
    with decode_steps_of(path) as runner:
        residency = Residency()
        residency.fails = fails
        runner.device.free_bytes = free
        runner.partial._residency = residency  # type: ignore[assignment]
        for _ in range(5):
            runner.step(1)
        assert residency.grown == 0, "nothing is missing"
        assert runner.partial.shrink() == 100
        grown = []
        for _ in range(7):
            runner.step(1)
            grown.append(residency.grown)
        again = 2 if fails else grows
        assert grown == [0, 0, grows, grows, grows, again, again]


@pytest.mark.parametrize("mailbox_rows", [MAX_MAILBOX_ROWS, 100])
def test_ex05_a_prefill_teaches_nothing(path: Path, mailbox_rows: int) -> None:
    with decode_steps_of(path, mailbox_rows=mailbox_rows) as runner:
        residency = Residency()
        runner.partial._residency = residency  # type: ignore[assignment]
        for rows in (1, MAX_MAILBOX_ROWS, MAX_MAILBOX_ROWS + 1):
            runner.partial.start_step(rows)
            runner.partial.launched()
            runner.device.current.synchronize()
            runner.partial.ended()
        assert [ids is not None and ids.shape for ids in residency.ids] == [
            (3, 1, 2), (3, MAX_MAILBOX_ROWS, 2), False,
        ]  # fmt: skip


class Server:
    """Whether an `ExpertServer` looks for requests."""

    serves = False

    def begin(self) -> None:
        self.serves = True

    def end(self) -> None:
        self.serves = False

    def check(self) -> None: ...


def test_an_error_of_one_step_leaves_the_next_one_prepared_for(path: Path) -> None:
    with decode_steps_of(path) as runner:
        residency, partial = Residency(), runner.partial
        partial._residency = residency  # type: ignore[assignment]
        for _ in range(2):
            partial.start_step(1)
            runner.queue(1)
            partial.launched()
        assert partial.must_wait(1), "two steps run, and there is room for what two leave"
        late = partial.host.mailbox.words.numpy()[WORDS_PER_LINE + 1 :][:1]
        late.fill(3)
        with pytest.raises(GenerationFault, match="in time"):
            partial.ended(1)
        assert residency.events == ["start", "prepare", "start", "end", "prepare"]
        late.fill(0)
        runner.device.current.synchronize()
        partial.ended()


@any_schedule
@given(seed=seeds, ways=st.lists(st.sampled_from(["wait", "ahead", "left out", "prompt"]), max_size=12))
def test_trap_26_a_step_ahead_of_the_host_teaches_what_it_used_when_it_has_ended(
    path: Path, seed: int, ways: list[str]
) -> None:
    """Each step is prepared for once, after the end of the one before it, and its ids are its own."""
    with decode_steps_of(path, seed) as runner:
        residency, partial = Residency(), runner.partial
        partial._residency = residency  # type: ignore[assignment]
        used, expected = runner.executor.decode.chosen.used, list[int | None]()
        running = deque[Operation | None]()
        partial.host.server = server = Server()  # type: ignore[assignment]

        def note(number: int, operation: Operation) -> None:
            used.numpy()[:] = number

        for number, way in enumerate(ways):
            rows = MAX_MAILBOX_ROWS + 1 if way == "prompt" else 2
            is_beside_prompt = "prompt" in (way, ways[max(0, number - 1)])
            must_wait = len(running) > 1 or (is_beside_prompt and len(running) == 1)
            assert partial.must_wait(rows) == must_wait
            if way in ("prompt", "wait") or must_wait:
                runner.device.current.synchronize()
                partial.ended()
                running.clear()
            partial.start_step(rows)
            runner.device.queue("routers", writes=[range_of(used)], effect=bound(note, number))
            partial.launched()
            if way == "left out":
                partial.left_out()
            expected.append(number if way in ("wait", "ahead") else None)
            running.append(runner.device.current.last)
            assert server.serves == (way != "prompt")
            assert residency.events.count("start") == number + 1
            if len(running) == 2:
                assert residency.events[-1] != "prepare", "the one before may not have ended"
                runner.device.wait_for(running.popleft())
                partial.ended(1)
                assert server.serves
            assert residency.events.count("prepare") == number + 1
        runner.device.current.synchronize()
        partial.ended()
        assert not server.serves
        assert residency.events.count("prepare") == residency.events.count("start") == len(ways)
        assert [None if ids is None else int(ids.max()) for ids in residency.ids] == expected
        assert all(ids is None or (ids == ids.flat[0]).all() for ids in residency.ids)


USES = ((0.5, 0.5, 0.5, 0.5), (0.9, 0.8, 0.2, 0.1), (0.1, 0.2, 0.8, 0.9))
PLACEMENT = PlacementPlan(
    model=RoutedModel("00", 3, 4, 2),
    tier="vram",
    budget_bytes=10**4,
    fixed=FixedPart(16, "f16", 8, 0, 0, 0),
    ring_bytes=0,
    expert_bytes=(256, 512, 256),
    resident=((0, 1, 2, 3), (0, 1), (1, 2, 3)),
    pinned_layers=(0,),
)


def shares(uses: tuple[tuple[float, ...], ...] | None) -> SlotShares:
    return slot_shares(RunPlan(PLACEMENT, 1, uses))


def test_pinned_layers_are_outside_of_slots() -> None:
    found = shares(USES)
    assert found.layer_bytes == [512, 256]
    assert found.num_slots == {512: 2, 256: 3}
    assert found.residents == [0, 1, 5, 6, 7]
    assert np.array_equal(found.uses, USES[1:])  # type: ignore[arg-type]
    assert shares(None).uses is None


def test_weights_are_those_of_the_layers_with_slots() -> None:
    assert shares(USES).weights is None
    found = slot_shares(RunPlan(replace(PLACEMENT, layer_weights=(5.0, 2.0, 1.0)), 1))
    assert found.weights is not None
    assert found.weights.tolist() == [2.0] * 4 + [1.0] * 4


@pytest.mark.parametrize(("uses", "stays"), [(USES, True), (None, False)])
def test_one_use_of_another_expert_pushes_no_planned_one_out(
    uses: tuple[tuple[float, ...], ...] | None, stays: bool
) -> None:
    found = shares(uses)
    policy = DecayedFrequency.for_late_copies()
    cache = ExpertCache(found.layer_bytes, 4, found.num_slots, policy, profile=found.uses)
    for copy in cache.load(found.residents):
        cache.copied([copy])
    for used in ([], [2, 4], []):  # residents of neither layer
        step = cache.start_step().step
        cache.finish_step(step, np.array(used, np.int64))
    assert (cache.counters.evictions.sum() == 0) == stays
    assert (cache.counters.copies.sum() == len(found.residents)) == stays
