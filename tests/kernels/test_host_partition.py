"""The place of each (token, expert) pair: the kernel on the host against a definition in Python."""

import ctypes
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from expert_client import LIMIT_S
from hypothesis import given, settings
from hypothesis import strategies as st
from random_blocks import activations
from test_expert_server import NUM_EXPERTS, RANKS, experts, random_ids
from test_expert_server import E as WIDTH

from coldstream.gguf.quant_types import QuantType
from coldstream.kernels import _csrc
from coldstream.kernels.experts.mailbox import ROWS_SHIFT, Mailbox
from coldstream.kernels.experts.partition import (
    PairAddresses,
    Prefetched,
    partition_experts_cuda,
    sharing_of,
)
from coldstream.kernels.experts.shapes import MATRICES
from coldstream.kernels.experts.stamps import WORDS
from coldstream.kernels.experts.table import ExpertTable
from host_device import HostDevice
from same_bits import assert_same_bits

MAX_LAYERS = 4
USED = 1 << 31
NOTHING_WRITTEN = -77


@dataclass
class Layer:
    """The kernel's inputs for a layer, as plain numbers; addresses are not read."""

    number: int
    slots: list[list[int]]  # by matrix and expert; 0: none
    mapped: list[int]  # by matrix; 0: the GPU cannot read it
    streamed: list[int]  # of a token's n missing experts
    keys: list[int] = field(default_factory=list)  # of places of the ring
    num_experts: int = 0

    def __post_init__(self) -> None:
        self.num_experts = len(self.slots[0])


STEPS = (48, 80, 112)
RING, PLACE_BYTES, OFFSETS = 1 << 40, 4096, (0, 256, 1024)


def expected(layer: Layer, ids: Sequence[Sequence[int]]) -> tuple[list[list[tuple[int, ...]]], set[int], int]:
    """(gate, up, down, CPU's expert) of each pair, the ring's places that are used, pairs from the bus."""
    used_places: set[int] = set()
    from_bus, pairs = 0, []
    for token in ids:
        row: list[tuple[int, ...]] = []
        for expert in token:
            row.append((*(slots[expert] for slots in layer.slots), -1))
        missing = [rank for rank, place in enumerate(row) if 0 in place[:MATRICES]]
        for rank in list(missing):
            wanted = (layer.number << 16 | token[rank]) + 1
            found = [place for place, key in enumerate(layer.keys) if key & ~USED == wanted]
            if found:
                used_places.add(found[0])
                missing.remove(rank)
                row[rank] = (*(RING + found[0] * PLACE_BYTES + offset for offset in OFFSETS), -1)
        num_streamed = layer.streamed[len(missing)] if layer.mapped[0] else 0
        for rank in missing[:num_streamed]:
            row[rank] = (*(layer.mapped[m] + token[rank] * STEPS[m] for m in range(MATRICES)), -1)
        for rank in missing[num_streamed:]:
            row[rank] = (0, 0, 0, token[rank])
        from_bus += len(missing[:num_streamed])
        pairs.append(row)
    return pairs, used_places, from_bus


class Shared:
    """The kernel's outputs and arguments; all memory is poisoned."""

    def __init__(self, layer: Layer, ids: torch.Tensor, x: torch.Tensor) -> None:
        tokens, ranks = ids.shape
        self.box = Mailbox._of(ranks, x.shape[1], tokens)
        self.used = torch.full((tokens, ranks), NOTHING_WRITTEN).int()
        self.box.words.fill_(NOTHING_WRITTEN)
        self.box.x.fill_(NOTHING_WRITTEN)
        self.pair_addresses = PairAddresses(
            torch.full((MATRICES, tokens, ranks), NOTHING_WRITTEN),
            torch.full((tokens, ranks), NOTHING_WRITTEN).int(),
            torch.zeros(WORDS, dtype=torch.int64),
        )
        self.keys = torch.tensor([key - (1 << 32) * (key >> 31) for key in layer.keys], dtype=torch.int32)
        prefetched = Prefetched(
            self.keys.data_ptr(), RING, PLACE_BYTES, (ctypes.c_int64 * MATRICES)(*OFFSETS), len(layer.keys)
        )
        self._slots = [torch.tensor(slots) for slots in layer.slots]
        self._streamed = torch.tensor(layer.streamed, dtype=torch.int32)
        stacks = [
            ExpertTable(slots, QuantType.Q8_0, 1, 32, True, None, mapped, step)
            for slots, mapped, step in zip(self._slots, layer.mapped, STEPS, strict=True)
        ]
        sharing = sharing_of(
            stacks, self._streamed, self.box, layer.number, self.pair_addresses, self.used, prefetched
        )
        partition_experts_cuda(ids, x, sharing)


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
    streamed = [draw(st.integers(0, n)) for n in range(ranks + 1)]
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
    ids = draw(st.lists(row, min_size=1, max_size=5))
    return Layer(number, slots, mapped, streamed, keys), ids


@pytest.mark.usefixtures("host")
@given(drawn=layers(), cols=st.sampled_from([1, 4, 31, 64, 1100]), gap=st.sampled_from([0, 1, 4]))
@settings(max_examples=100)
def test_every_pair_goes_to_the_place_that_is_its(
    drawn: tuple[Layer, list[list[int]]], cols: int, gap: int
) -> None:
    layer, rows = drawn
    ids = torch.tensor(rows, dtype=torch.int32)
    x = torch.randn(len(rows), cols + gap, generator=torch.Generator().manual_seed(cols))[:, :cols]
    shared = Shared(layer, ids, x)
    pairs, used_places, from_bus = expected(layer, rows)
    assert [
        [(*place, cpu) for place, cpu in zip(zip(*addresses, strict=True), cpu_ids, strict=True)]
        for addresses, cpu_ids in zip(
            shared.pair_addresses.addresses.transpose(0, 1).tolist(),
            shared.pair_addresses.cpu_ids.tolist(),
            strict=True,
        )
    ] == pairs
    cpu_ids = [[pair[-1] for pair in token] for token in pairs]
    assert shared.box.ids.tolist() == cpu_ids
    assert shared.used.tolist() == rows
    for token, each in enumerate(cpu_ids):
        is_sent = any(expert >= 0 for expert in each)
        assert torch.equal(shared.box.x[token], x[token] if is_sent else torch.full((cols,), -77.0))
    is_asked = any(expert >= 0 for token in cpu_ids for expert in token)
    request = (layer.number + 1) | len(rows) << ROWS_SHIFT
    assert shared.box.request.item() == (request if is_asked else NOTHING_WRITTEN)
    assert shared.box.done[0].item() == (0 if is_asked else NOTHING_WRITTEN)
    assert shared.pair_addresses.stamps is not None
    assert shared.pair_addresses.stamps[2].item() == from_bus
    assert [key % (1 << 32) for key in shared.keys.tolist()] == [
        key | USED * (place in used_places) for place, key in enumerate(layer.keys)
    ]


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("tokens", [33, 64])
@pytest.mark.parametrize("asking", [0, -1])
def test_more_tokens_than_warps(tokens: int, asking: int) -> None:
    """Each warp takes several; one token asks for all, the first or the last of its warp."""
    num_experts, ranks = 12, 8
    slots = [[1000 * (m + 1) + e for e in range(num_experts)] for m in range(MATRICES)]
    for matrix in slots:
        matrix[11] = 0
    layer = Layer(2, slots, [0] * MATRICES, [0] * (ranks + 1))
    rows = [[(token + rank) % 11 for rank in range(ranks)] for token in range(tokens)]
    rows[asking][3] = 11
    x = torch.randn(tokens, 40, generator=torch.Generator().manual_seed(tokens))
    shared = Shared(layer, torch.tensor(rows, dtype=torch.int32), x)
    assert shared.pair_addresses.cpu_ids.ge(0).nonzero().tolist() == [[asking % tokens, 3]]
    assert shared.box.request.item() == 3 | tokens << ROWS_SHIFT
    assert shared.used.tolist() == rows


def test_the_cpu_answers_what_the_device_asks(host: HostDevice) -> None:
    """One mailbox between the kernel and the server in C++: layer, rows, ids and x arrive as sent."""
    tokens, ranks = 5, RANKS
    box, used = Mailbox._of(ranks, WIDTH, tokens), torch.zeros(tokens, ranks).int()
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
        places = PairAddresses(torch.zeros(MATRICES, tokens, ranks).long(), torch.zeros(tokens, ranks).int())
        streamed = torch.zeros(ranks + 1, dtype=torch.int32)
        partition_experts_cuda(ids, x, sharing_of(stacks, streamed, box, number, places, used))
        deadline = time.monotonic() + LIMIT_S
        while done[0] == 0:
            assert time.monotonic() < deadline, "no answer came"
        cpu_ids = torch.where(ids % 2 == 0, ids, -1)
        answer = torch.zeros(tokens, ranks, WIDTH)
        _csrc.routed_experts(runtime, x, cpu_ids.contiguous(), *layer, answer)
        on_cpu = cpu_ids >= 0
        assert on_cpu.any()
        assert not on_cpu.all()
        assert_same_bits(box.out[on_cpu], answer[on_cpu])
    server.end()
    server.check()
    assert [requests for requests, _, _ in server.work()] == [1, 1]
