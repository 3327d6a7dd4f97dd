"""Prefetched experts: which are chosen, that they arrive complete, and that they are found."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from cuda_row_cases import CUDA, check_compiles, for_each_architecture, random
from same_bits import assert_same_bits

from coldstream.experts.prefetch import MAX_PREFETCHED, Prefetching
from coldstream.experts.prefetch_ring import PrefetchRing
from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.arithmetic.reference import dot_lanes
from coldstream.kernels.cuda.array import ALIGNMENT
from coldstream.kernels.experts.mailbox import Mailbox
from coldstream.kernels.experts.partition import Partition, partition_experts_cuda, sharing_of
from coldstream.kernels.experts.prefetch import PROGRAM
from coldstream.kernels.experts.shapes import MAX_MAILBOX_ROWS, MAX_RANKS
from coldstream.kernels.experts.split import BY_FETCHES, BY_SHARED_FETCHES, NUM_WORDS, MissTimes
from coldstream.kernels.experts.table import ExpertTable
from coldstream.kernels.router.cuda import Ahead, RouterBuffers, router_gemv_cuda
from coldstream.kernels.router.reference import choose_experts_exact

EXPERTS, RANKS, COLS = 40, 4, 64
ROWS = {QuantType.F32: 6, QuantType.Q8_0: 5}  # gate and up; those of Q8_0 are no multiple of 16 bytes


def zeros(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    return torch.zeros(shape, dtype=getattr(torch, dtype), device=CUDA)


def stacks_of(quant_type: QuantType, seed: int) -> tuple[tuple[ExpertTable, ...], list[torch.Tensor]]:
    """Gate, up and down of a layer without slots, and their bytes in the host's memory, by expert."""
    tables, memories = [], []
    for i, rows in enumerate((ROWS[quant_type], ROWS[quant_type], 3)):
        step = rows * quant_type.row_bytes(COLS)
        generator = torch.Generator().manual_seed(seed + i)
        data = torch.randint(256, (EXPERTS, step), dtype=torch.uint8, generator=generator).pin_memory()
        addresses = torch.zeros(EXPERTS, dtype=torch.int64, device=CUDA)
        tables.append(ExpertTable(addresses, quant_type, rows, COLS, True, None, data.data_ptr(), step))
        memories.append(data)
    return tuple(tables), memories


def ring_of(distance: int, count: int, quant_type: QuantType) -> PrefetchRing:
    sizes = [rows * quant_type.row_bytes(COLS) for rows in (ROWS[quant_type], ROWS[quant_type], 3)]
    expert_bytes = sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)
    data = zeros(((distance + 1) * count * expert_bytes + 100,), "uint8")
    return PrefetchRing(Prefetching(distance, count), data, zeros, 6)


def fetch(
    ring: PrefetchRing,
    layer: int,
    guesses: Sequence[Sequence[int]],
    stacks: Sequence[ExpertTable],
    reached: int,
) -> None:
    """When so many layers have been shared out."""
    ring._reached.fill_(reached)
    words = np.array(MissTimes(1, (1000,) * MAX_MAILBOX_ROWS).words())
    words[BY_FETCHES] = words[BY_SHARED_FETCHES] = np.arange(MAX_RANKS + 1)  # all come in time
    times = torch.tensor(words, dtype=torch.int32, device=CUDA)
    ring.fetch(layer, torch.tensor(guesses, dtype=torch.int32, device=CUDA), stacks, times)
    torch.cuda.synchronize()
    assert not ring._arrivals.any()


def wanted(guesses: Sequence[Sequence[int]], with_slots: set[int], count: int) -> list[int]:
    """The most wanted that have no slot; of equals, the likeliest of the first token that guesses it."""
    demand: Counter[int] = Counter()
    first: dict[int, tuple[int, int]] = {}
    for token, row in enumerate(guesses):
        for rank, guess in enumerate(row):
            if 0 <= guess < EXPERTS and guess not in with_slots:
                demand[guess] += 1
                first.setdefault(guess, (rank, token))
    return sorted(demand, key=lambda expert: (-demand[expert], *first[expert]))[:count]


def brought(ring: PrefetchRing, layer: int, memories: list[torch.Tensor]) -> list[int]:
    """The experts in the places of a layer, whose bytes must be theirs."""
    keys, data = ring._part(layer)
    experts = []
    for key, place in zip(keys.cpu().tolist(), data.cpu().view(len(keys), -1), strict=True):
        if key == 0:
            continue
        number, expert = divmod((key & 0x7FFFFFFF) - 1, 1 << 16)
        assert number == layer
        offset = 0
        for memory in memories:
            size = memory.shape[1]
            assert torch.equal(place[offset : offset + size], memory[expert])
            offset += -(-size // ALIGNMENT) * ALIGNMENT
        experts.append(expert)
    return experts


@for_each_architecture
def test_kernels_compile(arch: str) -> None:
    check_compiles(PROGRAM, arch)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 5, 8])
@pytest.mark.parametrize("quant_type", list(ROWS))
def test_trap_16_the_most_wanted_without_a_slot_arrive_whole(rows: int, quant_type: QuantType) -> None:
    """Repeated and impossible guesses among them, and caps below, at and above the demand."""
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        count = 1 + seed % MAX_PREFETCHED
        ring, (stacks, memories) = ring_of(1, count, quant_type), stacks_of(quant_type, seed)
        guesses = torch.randint(-2, EXPERTS + 2, (rows, RANKS), dtype=torch.int32, generator=generator)
        with_slots = set(torch.randperm(EXPERTS, generator=generator)[: 5 * seed].tolist())
        for expert in with_slots:
            stacks[seed % 3].addresses[expert] = 1  # counts only if all three are there
        if with_slots and seed % 2:
            for stack in stacks:
                stack.addresses[sorted(with_slots)] = 1
        else:
            with_slots = set()
        fetch(ring, 3, guesses.tolist(), stacks, 3)
        assert brought(ring, 3, memories) == wanted(guesses.tolist(), with_slots, count)


@pytest.mark.gpu
def test_nothing_arrives_once_its_layer_has_been_shared_out() -> None:
    ring, (stacks, memories) = ring_of(2, 3, QuantType.F32), stacks_of(QuantType.F32, 1)
    fetch(ring, 4, [[7, 8, 9, 10]], stacks, reached=5)
    assert brought(ring, 4, memories) == []
    assert ring.tallies[4].tolist() == [0, 0, 3]
    fetch(ring, 4, [[7, 8, 9, 10]], stacks, reached=4)
    assert brought(ring, 4, memories) == [7, 8, 9]


def share_out(ring: PrefetchRing, layer: int, ids: torch.Tensor, stacks: Sequence[ExpertTable]) -> Partition:
    """The places of pairs of a layer that makes no guess."""
    tokens = len(ids)
    places = Partition(
        torch.zeros(3, EXPERTS, dtype=torch.int64, device=CUDA),
        torch.zeros(tokens, RANKS, dtype=torch.int32, device=CUDA),
    )
    mailbox = Mailbox.create(RANKS, COLS)
    times = torch.zeros(NUM_WORDS, dtype=torch.int32, device=CUDA)
    used = torch.zeros(tokens, RANKS, dtype=torch.int32, device=CUDA)
    sharing = sharing_of(
        stacks, times, mailbox, layer, places, used, ring.prefetched(layer, stacks),
        ring.notes(layer, is_guessing=False),
    )  # fmt: skip
    partition_experts_cuda(ids.to(CUDA), random(0, tokens, COLS).to(CUDA), sharing)
    torch.cuda.synchronize()
    return places


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 3])
def test_trap_17_an_expert_is_found_once_all_of_it_is_there(tokens: int) -> None:
    ring, (stacks, _) = ring_of(1, 4, QuantType.F32), stacks_of(QuantType.F32, 2)
    ids = torch.tensor([[3, 9, 20, 31]] * tokens, dtype=torch.int32)
    assert (share_out(ring, 2, ids, stacks).cpu_ids.cpu() == ids).all()
    fetch(ring, 2, [[9, 31, 5, 6]], stacks, reached=2)
    places = share_out(ring, 2, ids, stacks)
    assert (places.cpu_ids.cpu() == torch.tensor([[3, -1, 20, -1]])).all()
    room = ring.prefetched(2, stacks).room
    for expert, place in ((9, 0), (31, 1)):
        for matrix in range(3):
            expected = room.data + place * room.place_bytes + room.offsets[matrix]
            assert places.addresses[matrix, expert] == expected
    # Nor by another layer whose places are the same.
    assert (share_out(ring, 4, ids, stacks).cpu_ids.cpu() == ids).all()


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", range(1, 9))
@pytest.mark.parametrize("experts", [256, 33])
def test_a_later_router_sees_the_same_rows_and_disturbs_nothing(tokens: int, experts: int) -> None:
    x, weight, later = (random(seed, n, 512) for seed, n in ((1, tokens), (2, experts), (3, experts)))
    shared = random(4, 1, 512)
    outs = [
        torch.empty(tokens, cols, dtype=dtype, device=CUDA)
        for cols, dtype in (
            (8, torch.int32),
            (8, torch.float32),
            (1, torch.float32),
            (experts, torch.float32),
        )
    ]
    ahead = Ahead(
        later.to(CUDA), torch.zeros(tokens, 8, dtype=torch.int32, device=CUDA),
        torch.empty(tokens, experts, device=CUDA), torch.empty(tokens, 8, device=CUDA),
    )  # fmt: skip
    arrivals = torch.zeros(1, dtype=torch.int32, device=CUDA)
    for _ in range(2):
        router_gemv_cuda(
            x.to(CUDA), weight.to(CUDA), shared.to(CUDA), RouterBuffers(*outs, arrivals), None, ahead
        )
    torch.cuda.synchronize()
    ids, weights = choose_experts_exact(dot_lanes(x, weight), 8)
    assert_same_bits(outs[0].cpu(), ids)
    assert_same_bits(outs[1].cpu(), weights)
    assert_same_bits(outs[2].cpu(), dot_lanes(x, shared))
    guessed, _ = choose_experts_exact(dot_lanes(x, later), 8)
    assert_same_bits(ahead.ids.cpu(), guessed)
    assert arrivals.item() == 0
