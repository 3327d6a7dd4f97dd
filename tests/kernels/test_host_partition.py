"""The place of each (token, expert) pair: the kernel on the host against a definition in Python."""

import ctypes
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from unittest.mock import Mock

import pytest
import torch
from expert_client import LIMIT_S
from hypothesis import given, settings
from hypothesis import strategies as st
from random_blocks import activations
from same_bits import assert_same_bits
from test_expert_server import NUM_EXPERTS, RANKS, experts, random_ids
from test_expert_server import E as WIDTH

from coldstream.gguf.quant_types import QuantType
from coldstream.kernels import _csrc
from coldstream.kernels.experts import partition
from coldstream.kernels.experts.mailbox import ROWS_SHIFT, Mailbox
from coldstream.kernels.experts.partition import (
    ExpertPlaces,
    Partition,
    Prefetched,
    Sharing,
    Staging,
    begin_of,
    partition_experts_cuda,
    sharing_of,
)
from coldstream.kernels.experts.shapes import MATRICES, MAX_MAILBOX_ROWS
from coldstream.kernels.experts.split import NUM_WORDS, WHOLE, MissTimes, streamed_experts
from coldstream.kernels.experts.stamps import WORDS
from coldstream.kernels.experts.table import ExpertTable
from coldstream.kernels.router.cuda import RouterBuffers, router_gemv_cuda
from host_device import HostDevice

MAX_LAYERS = 4
USED = 1 << 31
NOTHING_WRITTEN = -77


@dataclass
class Layer:
    """The kernel's inputs for a layer, as plain numbers; addresses are not read."""

    number: int
    slots: list[list[int]]  # by matrix and expert; 0: none
    mapped: list[int]  # by matrix; 0: the GPU cannot read it
    times: MissTimes | None
    num_staging: int = 64  # places for experts from the bus
    keys: list[int] = field(default_factory=list)  # of places of the ring
    pooled: list[list[int]] | None = None  # by matrix and expert; 0: the GPU cannot read it
    num_experts: int = 0

    def __post_init__(self) -> None:
        self.num_experts = len(self.slots[0])

    def over_bus(self, expert: int) -> tuple[int, ...]:
        """Where the GPU reads an expert in the host's memory; the first is 0 if it cannot."""
        if self.pooled is not None:
            return tuple(matrix[expert] for matrix in self.pooled)
        return tuple(first and first + expert * step for first, step in zip(self.mapped, STEPS, strict=True))


STEPS = (48, 80, 112)
RING, PLACE_BYTES, OFFSETS = 1 << 40, 4096, (0, 256, 1024)
STAGING = 1 << 50
ON_CPU = (0, 0, 0)
Rows = Sequence[Sequence[int]]


def expected(
    layer: Layer, ids: Rows, *, is_staged: bool = True
) -> tuple[dict[int, tuple[int, ...]], set[int], list[int]]:
    """(gate, up, down) of each chosen expert, the ring's places that are used, the experts from the bus in
    ascending order. is_staged: whether those are copied; otherwise they are read where they are.
    """
    used_places: set[int] = set()
    places, missing = {}, []
    for expert in dict.fromkeys(expert for token in ids for expert in token):
        places[expert] = tuple(slots[expert] for slots in layer.slots)
        if 0 not in places[expert]:
            continue
        wanted = (layer.number << 16 | expert) + 1
        found = [place for place, key in enumerate(layer.keys) if key & ~USED == wanted]
        if found:
            used_places.add(found[0])
            places[expert] = tuple(RING + found[0] * PLACE_BYTES + offset for offset in OFFSETS)
        else:
            missing.append(expert)
            places[expert] = ON_CPU
    readable = [expert for expert in missing if layer.over_bus(expert)[0]]
    if layer.times is None:
        return places, used_places, []
    if is_staged:
        chosen = streamed_experts(ids, readable, layer.times, layer.num_staging)
    else:
        chosen = set(readable[: layer.times.by_misses(len(missing))[-1]])  # of a single token
    streamed = sorted(chosen)
    for number, expert in enumerate(streamed):
        staged = tuple(STAGING + number * PLACE_BYTES + offset for offset in OFFSETS)
        places[expert] = staged if is_staged else layer.over_bus(expert)
    return places, used_places, streamed


class Shared:
    """The kernel's outputs and arguments; all memory is poisoned."""

    def __init__(self, layer: Layer, ids: torch.Tensor, x: torch.Tensor, *, notes_used: bool = True) -> None:
        tokens, ranks = ids.shape
        self.ids, self.x = ids, x
        self.box = Mailbox.planned(ranks, x.shape[1], tokens)
        self.used = torch.full((tokens, ranks), NOTHING_WRITTEN).int() if notes_used else None
        self.arrivals = torch.zeros(1, dtype=torch.int32)
        self.box.words.numpy().fill(NOTHING_WRITTEN)
        self.box.x.numpy().fill(NOTHING_WRITTEN)
        self.box.ids.numpy().fill(NOTHING_WRITTEN)
        self.places = Partition(
            torch.full((MATRICES, layer.num_experts), NOTHING_WRITTEN),
            torch.full((tokens, ranks), NOTHING_WRITTEN).int(),
            torch.zeros(WORDS, dtype=torch.int64),
        )
        self.keys = torch.tensor([key - (1 << 32) * (key >> 31) for key in layer.keys], dtype=torch.int32)
        offsets = (ctypes.c_int64 * MATRICES)(*OFFSETS)
        prefetched = Prefetched(
            keys=self.keys.data_ptr(),
            room=ExpertPlaces(data=RING, place_bytes=PLACE_BYTES, offsets=offsets, count=len(layer.keys)),
        )
        self.staged = torch.full((1 + layer.num_staging,), NOTHING_WRITTEN).int()
        staging = Staging(
            self.staged,
            ExpertPlaces(data=STAGING, place_bytes=PLACE_BYTES, offsets=offsets, count=layer.num_staging),
        )
        self._slots = [torch.tensor(slots) for slots in layer.slots]
        pools = [None] * MATRICES if layer.pooled is None else list(map(torch.tensor, layer.pooled))
        words = (0,) * NUM_WORDS if layer.times is None else layer.times.words()
        self._times = torch.tensor(words, dtype=torch.int32)
        stacks = [
            ExpertTable(slots, QuantType.Q8_0, 1, 32, True, None, mapped, step, pooled=pooled)
            for slots, mapped, step, pooled in zip(self._slots, layer.mapped, STEPS, pools, strict=True)
        ]
        self.sharing = sharing_of(
            stacks, self._times, self.box, layer.number, self.places, self.used, prefetched,
            staging=staging,
        )  # fmt: skip

    def share_out(self) -> None:
        partition_experts_cuda(self.ids, self.x, self.sharing, self.arrivals)

    def check(self, layer: Layer, *, is_staged: bool = True, always_sends: bool = False) -> None:
        """Holds everything that was written to `expected`. always_sends: x, also if the CPU has no pair."""
        rows = self.ids.tolist()
        places, used_places, streamed = expected(layer, rows, is_staged=is_staged)
        nothing = (NOTHING_WRITTEN,) * MATRICES
        wanted = [places.get(expert, nothing) for expert in range(layer.num_experts)]
        assert [tuple(place) for place in self.places.addresses.T.tolist()] == wanted
        cpu_ids = [[expert if places[expert] == ON_CPU else -1 for expert in token] for token in rows]
        assert self.places.cpu_ids.tolist() == self.box.ids.numpy().tolist() == cpu_ids
        assert self.used is None or self.used.tolist() == rows
        assert self.arrivals.item() == 0
        for token, each in enumerate(cpu_ids):
            is_sent = always_sends or any(expert >= 0 for expert in each)
            kept = torch.full_like(self.x[token], NOTHING_WRITTEN)
            assert torch.equal(
                torch.from_numpy(self.box.x[token].numpy()), self.x[token] if is_sent else kept
            )
        is_asked = any(expert >= 0 for token in cpu_ids for expert in token)
        request = (layer.number + 1) | len(rows) << ROWS_SHIFT
        assert self.box.request.numpy()[0] == (request if is_asked else NOTHING_WRITTEN)
        assert self.box.done.numpy()[0] == (0 if is_asked else NOTHING_WRITTEN)
        assert self.places.stamps is not None
        assert self.places.stamps[2].item() == sum(expert in streamed for token in rows for expert in token)
        listed = [len(streamed), *streamed] if is_staged else []
        assert self.staged[: len(listed)].tolist() == listed
        assert self.staged[len(listed) :].eq(NOTHING_WRITTEN).all()
        assert [key % (1 << 32) for key in self.keys.tolist()] == [
            key | USED * (place in used_places) for place, key in enumerate(layer.keys)
        ]


@st.composite
def miss_times(draw: st.DrawFn) -> MissTimes:
    time, share = st.integers(1, 4000), st.integers(1, WHOLE)
    cpu = draw(st.lists(time, min_size=MAX_MAILBOX_ROWS, max_size=MAX_MAILBOX_ROWS))
    return MissTimes(draw(time), tuple(cpu), draw(time), draw(share), draw(share), draw(time))


@st.composite
def layers(draw: st.DrawFn) -> tuple[Layer, list[list[int]]]:
    num_experts, ranks = draw(st.integers(1, 20)), draw(st.integers(1, 16))
    ranks = min(ranks, num_experts)
    slot = st.one_of(st.just(0), st.integers(1, 1 << 45))
    slots = [[draw(slot) for _ in range(num_experts)] for _ in range(MATRICES)]
    if draw(st.booleans()):  # as it is in truth: all three or none
        slots = [[value if slots[0][e] else 0 for e, value in enumerate(matrix)] for matrix in slots]
    mapped = (
        [draw(st.integers(1, 1 << 46)) for _ in range(MATRICES)] if draw(st.booleans()) else [0] * MATRICES
    )
    pooled = None
    if draw(st.booleans()):
        address = st.one_of(st.just(0), st.integers(1, 1 << 46))
        in_pool = [draw(address) for _ in range(num_experts)]
        pooled = [[first and first + matrix for first in in_pool] for matrix in range(MATRICES)]
    number = draw(st.integers(0, MAX_LAYERS - 1))
    key = st.one_of(
        st.just(0),
        st.builds(
            lambda layer, expert, used: (layer << 16 | expert) + 1 | used,
            st.sampled_from([number, number, number + 1]),
            st.integers(0, num_experts),
            st.sampled_from([0, USED]),
        ),
    )
    keys = draw(st.lists(key, max_size=8, unique_by=lambda key: key & ~USED))
    row = st.permutations(range(num_experts)).map(lambda order: list(order[:ranks]))
    ids = draw(st.lists(row, min_size=1, max_size=9))
    times = draw(st.one_of(st.none(), miss_times(), miss_times()))
    return Layer(number, slots, mapped, times, draw(st.sampled_from([0, 1, 3, 64])), keys, pooled), ids


@pytest.mark.usefixtures("host")
@given(drawn=layers(), cols=st.sampled_from([1, 4, 31, 64, 1100]), gap=st.sampled_from([0, 1, 4]))
@settings(max_examples=150, deadline=None)
def test_every_pair_goes_to_the_place_that_is_its(
    drawn: tuple[Layer, list[list[int]]], cols: int, gap: int
) -> None:
    layer, rows = drawn
    ids = torch.tensor(rows, dtype=torch.int32)
    x = torch.randn(len(rows), cols + gap, generator=torch.Generator().manual_seed(cols))[:, :cols]
    shared = Shared(layer, ids, x)
    shared.share_out()
    shared.check(layer)


def random_layer(experts: int, missing: float, seed: int) -> Layer:
    """With times of which neither side wins alone."""
    generator = torch.Generator().manual_seed(seed)
    slots = (torch.rand(experts, generator=generator) >= missing).long() * 1000
    cpu = tuple(30 + 3 * max(0, rows - 4) for rows in range(1, MAX_MAILBOX_ROWS + 1))
    times = MissTimes(100, cpu, 20, 900, 800)
    return Layer(2, [slots.tolist()] * MATRICES, [1 << 30, 2 << 30, 3 << 30], times, experts)


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize(
    ("tokens", "ranks", "experts"),
    [
        (2, 8, 256), (33, 8, 256), (64, 8, 40), (64, 16, 1024), (64, 1, 3),
        (65, 8, 256), (100, 8, 256), (127, 4, 40), (128, 16, 1024), (128, 1, 3),
    ],
)  # fmt: skip
@pytest.mark.parametrize("missing", [1.0, 0.2])
def test_steps_of_every_size(tokens: int, ranks: int, experts: int, missing: float) -> None:
    """Most experts are wanted by several tokens; some are read over the bus, some computed by the CPU."""
    generator = torch.Generator().manual_seed(tokens)
    odds = torch.rand(experts, generator=generator) ** 4 + 1e-3
    ids = torch.multinomial(odds.expand(tokens, -1), min(ranks, experts), generator=generator).int()
    layer = random_layer(experts, missing, seed=tokens)
    x = torch.randn(tokens, 40, generator=generator)
    shared = Shared(layer, ids, x, notes_used=tokens <= MAX_MAILBOX_ROWS)
    shared.share_out()
    shared.check(layer)
    _, _, streamed = expected(layer, ids.tolist())
    if experts > 40 and missing == 1.0:
        assert 0 < len(streamed) < len(ids.unique()), "both sides have some"


@pytest.mark.usefixtures("host")
def test_all_tokens_want_other_experts() -> None:
    """As many experts as a block has threads."""
    ids = torch.arange(1024, dtype=torch.int32).view(64, 16)
    layer = random_layer(1024, 1.0, seed=1)
    shared = Shared(layer, ids, torch.randn(64, 4, generator=torch.Generator().manual_seed(1)))
    shared.share_out()
    shared.check(layer)


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("asking", [0, -1])
@pytest.mark.parametrize("tokens", [64, 65, 128])
def test_one_pair_of_many_tokens_is_missing(asking: int, tokens: int) -> None:
    num_experts, ranks = 12, 8
    slots = [[1000 * (m + 1) + e for e in range(num_experts)] for m in range(MATRICES)]
    for matrix in slots:
        matrix[11] = 0
    layer = Layer(2, slots, [0] * MATRICES, None)
    rows = [[(token + rank) % 11 for rank in range(ranks)] for token in range(tokens)]
    rows[asking][3] = 11
    x = torch.randn(tokens, 40, generator=torch.Generator().manual_seed(tokens))
    shared = Shared(layer, torch.tensor(rows, dtype=torch.int32), x)
    shared.share_out()
    shared.check(layer)
    assert shared.places.cpu_ids.ge(0).nonzero().tolist() == [[asking % tokens, 3]]


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("experts", [6, 40])
@pytest.mark.parametrize("missing", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("in_pool", [None, 0.0, 0.6, 1.0])
def test_a_single_token_is_shared_out_by_its_router_alike(
    experts: int, missing: float, in_pool: float | None
) -> None:
    """The launch for one token and that for several put its pairs into the same places, except that a
    router's streamed experts are read where they are, mapped or in a pool. It sends x before it knows whether
    the CPU has a pair.
    """
    ranks, cols = min(experts, 16), 48
    layer, generator = random_layer(experts, missing, 3), torch.Generator().manual_seed(experts)
    if in_pool is not None:
        there = (torch.rand(experts, generator=generator) < in_pool).long()
        pooled = [(there * (first + torch.arange(experts))).tolist() for first in (1 << 20, 2 << 20, 3 << 20)]
        layer = replace(layer, pooled=pooled)
    x, weight = (torch.randn(n, cols, generator=generator) for n in (1, experts))
    shared = Shared(layer, torch.zeros(1, ranks, dtype=torch.int32), x)
    router_gemv_cuda(
        x, weight, None,
        RouterBuffers(
            shared.ids, torch.empty(1, ranks), None, torch.empty(1, experts),
            torch.zeros(1, dtype=torch.int32),
        ),
        shared.sharing,
    )  # fmt: skip
    shared.check(layer, is_staged=False, always_sends=True)


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize(("tokens", "is_streamed"), [(80, False), (128, True)])
def test_an_expert_that_most_rows_want_takes_the_cpu_long(tokens: int, is_streamed: bool) -> None:
    layer = replace(random_layer(3, 1.0, seed=1), times=MissTimes(150, (100,) * MAX_MAILBOX_ROWS))
    shared = Shared(layer, torch.ones(tokens, 1, dtype=torch.int32), torch.ones(tokens, 4))
    shared.share_out()
    shared.check(layer)
    assert shared.places.cpu_ids.eq(-1).all().item() == is_streamed


@pytest.mark.usefixtures("host")
def test_rows_beyond_a_mailbox_have_a_launch_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One block would take long to send them."""
    tokens = MAX_MAILBOX_ROWS + 1
    layer = random_layer(8, 1.0, seed=1)
    shared = Shared(layer, torch.arange(tokens, dtype=torch.int32)[:, None] % 8, torch.ones(tokens, 4))
    kernel = partition.PROGRAM.kernel
    with monkeypatch.context() as patch:
        patch.setattr(
            type(partition.PROGRAM),
            "kernel",
            lambda program, name: kernel(name) if name == "partition_experts" else Mock(),
        )
        shared.share_out()
    assert shared.places.cpu_ids.ge(0).any()
    assert shared.box.request.numpy()[0] == NOTHING_WRITTEN
    assert (shared.box.x.numpy() == NOTHING_WRITTEN).all()


def test_rows_beyond_a_mailbox_need_an_array_for_arrivals() -> None:
    tokens = MAX_MAILBOX_ROWS + 1
    shared = Shared(
        random_layer(8, 1.0, seed=1), torch.zeros(tokens, 1, dtype=torch.int32), torch.ones(tokens, 4)
    )
    with pytest.raises(ValueError, match="65 tokens need an array"):
        partition_experts_cuda(shared.ids, shared.x, shared.sharing)


def test_what_an_argument_names_is_kept_as_long_as_it() -> None:
    """A launch reads addresses alone, and the last name of an array may be gone by then."""

    def ints(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32)

    def named() -> tuple[Sharing, list[weakref.ref[object]]]:
        slots, data = [torch.zeros(4).long() for _ in STEPS], torch.zeros(5000, dtype=torch.uint8)
        stacks = [ExpertTable(each, QuantType.F32, 1, 4, True) for each in slots]
        box, times, used = Mailbox.planned(2, 4, 3), ints(NUM_WORDS), ints(3, 2)
        places = Partition(torch.zeros(MATRICES, 4).long(), ints(3, 2), torch.zeros(WORDS).long())
        staging = Staging(ints(5), ExpertPlaces.of(data, stacks, 4))
        assert places.stamps is not None
        arrays = (*slots, data, box, times, used, places.addresses, places.cpu_ids, places.stamps)
        sharing = sharing_of(stacks, times, box, 0, places, used, staging=staging)
        return sharing, [weakref.ref(array) for array in (*arrays, staging.chosen)]

    sharing, arrays = named()
    assert all(array() is not None for array in arrays)
    begin = begin_of(sharing)
    del sharing
    assert all(array() is not None for array in arrays)
    del begin
    assert all(array() is None for array in arrays)


def test_sizes_beyond_a_block_are_refused() -> None:
    layer = random_layer(1025, 1.0, seed=1)
    with pytest.raises(ValueError, match="at most 128, 16 and 1024"):
        Shared(layer, torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, 4))


def test_the_cpu_answers_what_the_device_asks(host: HostDevice) -> None:
    """One mailbox between the kernel and the server in C++: layer, rows, ids and x arrive as sent."""
    tokens, ranks = 5, RANKS
    box, used = Mailbox.planned(ranks, WIDTH, tokens), torch.zeros(tokens, ranks).int()
    request, done, x_there, ids_there, out = box.arrays()
    runtime = _csrc.Runtime(2)
    server = _csrc.ExpertServer(runtime, request, done, x_there, ids_there, out)
    weights = [experts(seed=10 * layer) for layer in range(2)]
    for layer in weights:
        server.add_layer(*layer)
    server.begin()
    ids = random_ids(tokens, elsewhere=0.0)
    for number, layer in enumerate(weights):
        x = activations(number, tokens, WIDTH)
        slots = torch.arange(NUM_EXPERTS) % 2 * 1000  # those of even numbers are missing
        stacks = [ExpertTable(slots, QuantType.Q4_K, 1, 256, True) for _ in range(MATRICES)]
        places = Partition(torch.zeros(MATRICES, NUM_EXPERTS).long(), torch.zeros(tokens, ranks).int())
        times = torch.zeros(NUM_WORDS, dtype=torch.int32)
        partition_experts_cuda(ids, x, sharing_of(stacks, times, box, number, places, used))
        deadline = time.monotonic() + LIMIT_S
        while done[0] == 0:
            assert time.monotonic() < deadline, "no answer came"
        cpu_ids = torch.where(ids % 2 == 0, ids, -1)
        answer = torch.zeros(tokens, ranks, WIDTH)
        _csrc.routed_experts(runtime, x, cpu_ids.contiguous(), *layer, answer)
        on_cpu = cpu_ids >= 0
        assert on_cpu.any()
        assert not on_cpu.all()
        assert_same_bits(torch.from_numpy(box.out.numpy())[on_cpu], answer[on_cpu])
    server.end()
    server.check()
    assert [requests for requests, _, _ in server.work()] == [1, 1]


@pytest.mark.parametrize("tokens", [1, 3])
def test_nothing_is_written_before_the_last_request_is_over(
    host: HostDevice, monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:
    """Rows of the last request may have been read, while a thread that computed them reads its ids."""
    layer, cols = random_layer(6, 1.0, seed=1), 48
    x, weight = (torch.randn(n, cols, generator=torch.Generator().manual_seed(1)) for n in (tokens, 6))
    shared = Shared(layer, torch.arange(6, dtype=torch.int32).repeat(tokens, 1), x)
    box, words, launches = shared.box, shared.box.words.numpy(), host.launches
    words[:] = 0
    monkeypatch.setattr(host, "keeps_time", True)  # so that the wait lasts as long as on a GPU
    seen = []

    def end_last_request() -> None:
        while host.launches == launches:
            pass
        for _ in range(5000):  # for longer than the launch takes without a wait
            untouched = [(each.numpy() == NOTHING_WRITTEN).all() for each in (box.x, box.ids)]
            seen.append(all(untouched) and not words.any())
        box.done.numpy()[0] = 1

    thread = threading.Thread(target=end_last_request)
    thread.start()
    if tokens == 1:
        buffers = RouterBuffers(
            shared.ids, torch.empty(1, 6), None, torch.empty(1, 6), torch.zeros(1, dtype=torch.int32)
        )
        router_gemv_cuda(x, weight, None, buffers, shared.sharing)
    else:
        shared.share_out()
    thread.join()
    assert all(seen)
    assert box.done.numpy()[0] == 0
    assert box.request.numpy()[0] == shared.sharing.request
