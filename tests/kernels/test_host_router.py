"""The choice of experts on the host: the exact reference's ids and weights, whatever the logits."""

import ctypes

import pytest
import torch
from guarded import Guarded
from hypothesis import given, settings
from hypothesis import strategies as st
from same_bits import assert_same_bits
from test_host_partition import USED

from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.arithmetic.reference import dot_lanes
from coldstream.kernels.experts.mailbox import MAX_MAILBOX_ROWS, Mailbox
from coldstream.kernels.experts.partition import (
    ExpertPlaces,
    Partition,
    Prefetched,
    PrefetchNotes,
    begin_of,
    hints_of,
    sharing_of,
)
from coldstream.kernels.experts.prefetch import TALLIES
from coldstream.kernels.experts.shapes import MATRICES
from coldstream.kernels.experts.split import NUM_WORDS, MissTimes
from coldstream.kernels.experts.stamps import WORDS
from coldstream.kernels.experts.table import ExpertTable
from coldstream.kernels.router.cuda import Ahead, RouterBuffers, router_choose_cuda, router_gemv_cuda
from coldstream.kernels.router.reference import choose_experts_exact
from host_device import HostDevice

CPU = torch.device("cpu")


def check_choice(logits: torch.Tensor, ranks: int) -> None:
    ids, weights = choose_experts_exact(logits, ranks)
    out_ids = Guarded(len(logits), ranks, dtype=torch.int32, device=CPU)
    out_weights = Guarded(len(logits), ranks, device=CPU)
    wide = torch.full((len(logits), logits.shape[1] + 3), torch.nan)
    wide[:, : logits.shape[1]] = logits
    router_choose_cuda(wide[:, : logits.shape[1]], out_ids.tensor, out_weights.tensor)
    assert_same_bits(out_ids.checked(), ids)
    assert_same_bits(out_weights.checked(), weights)


@st.composite
def logit_rows(draw: st.DrawFn) -> tuple[torch.Tensor, int]:
    """Ties, −inf, values that differ by a unit in the last place, and ranges beyond those of exp."""
    experts = draw(st.sampled_from([1, 2, 7, 31, 32, 33, 64, 200, 256, 300, 512, 1024]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    kind = draw(st.sampled_from(["any", "ties", "near", "wide", "few", "equal"]))
    x = torch.randn(draw(st.integers(1, 9)), experts, generator=generator)
    chance = torch.rand(x.shape, generator=generator)
    rows = {
        "any": 3 * x,
        "ties": x.round(),
        "near": (x * 20).round().clamp(max=0) * 2.0**-24 - 80 * (chance < 0.5),
        "wide": 200 * x,
        "few": torch.where(chance < 0.9, -torch.inf, x),
        "equal": torch.zeros_like(x),
    }[kind]
    rows[:, -1] = rows[:, -1].clamp(min=-100)  # one is finite
    return rows, draw(st.integers(1, min(16, experts)))


@pytest.mark.sharded(of="kernels")
@pytest.mark.usefixtures("host")
@given(drawn=logit_rows())
@settings(max_examples=100)
def test_choice(drawn: tuple[torch.Tensor, int]) -> None:
    check_choice(*drawn)


@pytest.mark.usefixtures("host")
@given(drawn=logit_rows(), num_padded=st.integers(0, 8))
@settings(max_examples=30)
def test_rows_of_no_sequence_choose_what_the_first_row_does(
    drawn: tuple[torch.Tensor, int], num_padded: int
) -> None:
    logits, ranks = drawn
    positions = torch.arange(len(logits), dtype=torch.int32)
    positions[max(1, len(logits) - num_padded) :] = -1
    ids, weights = choose_experts_exact(torch.where(positions[:, None] < 0, logits[0], logits), ranks)
    out_ids = Guarded(len(logits), ranks, dtype=torch.int32, device=CPU)
    out_weights = Guarded(len(logits), ranks, device=CPU)
    router_choose_cuda(logits, out_ids.tensor, out_weights.tensor, positions)
    assert_same_bits(out_ids.checked(), ids)
    assert_same_bits(out_weights.checked(), weights)


def test_positions_of_other_rows_are_refused() -> None:
    ids, weights = torch.empty(4, 2, dtype=torch.int32), torch.empty(4, 2)
    for positions in (torch.zeros(3, dtype=torch.int32), torch.zeros(4, dtype=torch.int64)):
        with pytest.raises(ValueError, match="positions"):
            router_choose_cuda(torch.zeros(4, 8), ids, weights, positions)


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("ranks", [8, 9, 16])
def test_probabilities_that_tie_though_their_exponentials_differ(ranks: int) -> None:
    """The lowest id comes first also where only the division makes two experts equal."""
    generator = torch.Generator().manual_seed(2)
    steps = torch.randint(-40, 1, (150, 256), generator=generator).float() * 2.0**-24
    check_choice(steps, ranks)
    check_choice(steps - 80 * (torch.rand(150, 256, generator=generator) < 0.95), ranks)


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("experts", [17, 256])
def test_logits_that_are_not_finite_give_ids_of_experts(experts: int) -> None:
    logits = torch.randn(4, experts, generator=torch.Generator().manual_seed(0))
    logits[0], logits[1] = torch.nan, torch.inf
    logits[2, 5] = torch.nan
    logits[3, 6] = torch.inf
    ids, weights = Guarded(4, 8, dtype=torch.int32, device=CPU), Guarded(4, 8, device=CPU)
    router_choose_cuda(logits, ids.tensor, weights.tensor)
    for row in ids.checked().tolist():
        assert len(set(row)) == 8
        assert set(row) <= set(range(experts))
    assert ids.checked()[:2].tolist() == [list(range(8))] * 2
    assert weights.checked().isnan().any(dim=1).all()


class Outputs:
    """Outputs and workspace of the single launch."""

    def __init__(self, tokens: int, ranks: int, experts: int) -> None:
        self.ids = Guarded(tokens, ranks, dtype=torch.int32, device=CPU)
        self.weights = Guarded(tokens, ranks, device=CPU)
        self.gate = Guarded(tokens, 1, device=CPU)
        self.logits = Guarded(tokens, experts, device=CPU)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return tuple(each.tensor for each in (self.ids, self.weights, self.gate, self.logits))

    def check(self, x: torch.Tensor, weight: torch.Tensor, shared: torch.Tensor) -> None:
        ids, weights = choose_experts_exact(dot_lanes(x, weight), self.ids.tensor.shape[1])
        assert_same_bits(self.logits.checked(), dot_lanes(x, weight))
        assert_same_bits(self.gate.checked(), dot_lanes(x, shared))
        assert_same_bits(self.ids.checked(), ids)
        assert_same_bits(self.weights.checked(), weights)


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize(
    ("experts", "cols", "ranks"),
    [(1, 16, 1), (7, 31, 3), (40, 384, 4), (63, 100, 16), (300, 33, 16), (8, 5000, 2)],
)
@pytest.mark.parametrize("tokens", [1, 3, 8])
@pytest.mark.parametrize("gap", [0, 1])
def test_router_of_any_shape(experts: int, cols: int, ranks: int, tokens: int, gap: int) -> None:
    """Twice with one counter of arrivals; with a later layer's router beside it the second time."""
    generator = torch.Generator().manual_seed(experts)
    x = torch.randn(tokens, cols + gap, generator=generator)[:, :cols]
    weight, later = (torch.randn(experts, cols, generator=generator) * cols**-0.5 for _ in range(2))
    weight[experts // 2] = weight[min(1, experts - 1)]  # equal logits: the lower id comes first
    shared = torch.randn(1, cols, generator=generator)
    arrivals = torch.zeros(1, dtype=torch.int32)
    guesses = Outputs(tokens, ranks, experts)
    ahead = Ahead(later, guesses.ids.tensor, guesses.logits.tensor, guesses.weights.tensor)
    for beside in (None, ahead):
        outs = Outputs(tokens, ranks, experts)
        router_gemv_cuda(x, weight, shared, RouterBuffers(*outs.tensors, arrivals), None, beside)
        outs.check(x, weight, shared)
        assert arrivals.item() == 0
    guessed, _ = choose_experts_exact(dot_lanes(x, later), ranks)
    assert_same_bits(guesses.ids.checked(), guessed)


def test_what_is_chosen_is_shared_out_and_the_ring_emptied(host: HostDevice) -> None:
    """The places that are filled next are counted by layer and forgotten; the next kernel learns it."""
    tokens, ranks, experts, cols, layer = 1, 8, 20, 48, 2
    generator = torch.Generator().manual_seed(1)
    x, weight = (
        torch.randn(tokens, cols, generator=generator),
        torch.randn(experts, cols, generator=generator),
    )
    shared, outs = torch.randn(1, cols, generator=generator), Outputs(tokens, ranks, experts)
    slots = (torch.arange(experts) % 2) * 1000
    stacks = [ExpertTable(slots, QuantType.F32, 1, 4, True) for _ in range(MATRICES)]
    box, noted = Mailbox.planned(ranks, cols, tokens), torch.full((tokens, ranks), -7).int()
    places = Partition(
        torch.full((MATRICES, experts), -7), torch.full((tokens, ranks), -7).int(),
        torch.zeros(WORDS, dtype=torch.int64),
    )  # fmt: skip
    ids, _ = choose_experts_exact(dot_lanes(x, weight), ranks)
    come = int(ids[ids % 2 == 0][0])
    here, next_layer = (layer << 16 | come) + 1, (layer + 1) << 16
    keys = torch.tensor([0, here, 0, 0], dtype=torch.int32)
    room = ExpertPlaces(
        data=1 << 30, place_bytes=4096, offsets=(ctypes.c_int64 * MATRICES)(0, 256, 512), count=4
    )
    prefetched = Prefetched(keys=keys.data_ptr(), room=room)
    # In the places of the layer after the next: one that was used, one that was not, and an empty one.
    used = next_layer + 6 | USED
    emptied = torch.tensor([used - (1 << 32), next_layer + 8, 0], dtype=torch.int32)
    reached, tallies = torch.zeros(1, dtype=torch.int32), torch.zeros(5, len(TALLIES), dtype=torch.int32)
    notes = PrefetchNotes(
        emptied=emptied.data_ptr(), count=3, reached=reached.data_ptr(), tallies=tallies.data_ptr()
    )
    times = torch.zeros(NUM_WORDS, dtype=torch.int32)
    sharing = sharing_of(stacks, times, box, layer, places, noted, prefetched, notes)
    arrivals = torch.zeros(1, dtype=torch.int32)
    router_gemv_cuda(x, weight, shared, RouterBuffers(*outs.tensors, arrivals), sharing)
    outs.check(x, weight, shared)
    on_cpu = (ids % 2 == 0) & (ids != come)
    assert on_cpu.any()
    assert torch.equal(places.cpu_ids, torch.where(on_cpu, ids, -1))
    there = torch.where(ids == come, (1 << 30) + 4096 + 256, 1000)
    assert torch.equal(places.addresses[1, ids.long()], torch.where(on_cpu, 0, there))
    assert torch.equal(noted, ids)
    assert torch.equal(torch.from_numpy(box.x.numpy()), torch.where(on_cpu.any(dim=1, keepdim=True), x, 0.0))
    assert box.request.numpy()[0] == (layer + 1) | tokens << 16
    assert not emptied.any()
    assert tallies.tolist() == [[0] * 3] * 3 + [[2, 1, 0]] + [[0] * 3]
    assert reached.item() == layer + 1
    assert keys.tolist() == [0, (here | USED) - (1 << 32), 0, 0], "whoever was used is marked"
    assert places.stamps is not None
    assert 0 < places.stamps[0] < places.stamps[1]


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("num_places", [0, 2])
@pytest.mark.parametrize("mapped", [0, 1 << 20])
@pytest.mark.parametrize("tokens", [1, 2])
def test_the_cpu_gets_a_guess_at_what_a_single_token_will_ask(
    tokens: int, mapped: int, num_places: int
) -> None:
    """Of the guess: what has no slot, is not fetched, and is not the bus's share of what is left."""
    ranks, experts, cols, later = 8, 40, 32, 3
    generator = torch.Generator().manual_seed(3)
    x, weight, guess = (torch.randn(n, cols, generator=generator) for n in (tokens, experts, experts))
    slots = (torch.arange(experts) % 3 == 0) * 1000
    stacks = [ExpertTable(slots, QuantType.F32, 1, 4, True, mapped=mapped, step=16) for _ in range(MATRICES)]
    times = MissTimes(10, tuple(20 * rows for rows in range(1, MAX_MAILBOX_ROWS + 1)), layer=1)
    box = Mailbox.planned(ranks, cols, tokens)
    words = torch.tensor(times.words(1.0 if num_places else None), dtype=torch.int32)
    hints = hints_of(stacks, words, box, later, num_places)
    outs, guesses = Outputs(tokens, ranks, experts), Outputs(tokens, ranks, experts)
    ahead = Ahead(guess, guesses.ids.tensor, guesses.logits.tensor, guesses.weights.tensor, hints)
    arrivals = torch.zeros(1, dtype=torch.int32)
    router_gemv_cuda(
        x, weight, None, RouterBuffers(*outs.tensors[:2], None, outs.tensors[3], arrivals), None, ahead
    )
    words = box.ahead.numpy().tolist()
    if tokens > 1:
        assert words == [0] * len(words)
        return
    ids = guesses.ids.checked()[0].tolist()
    missing = [expert for expert in ids if expert % 3]
    assert 0 < len(missing) < ranks
    if num_places:
        num_elsewhere = min(num_places, times.by_fetches(ranks)[len(missing)])
    else:
        num_elsewhere = times.by_misses(ranks)[len(missing)] if mapped else 0
    assert (num_elsewhere > 0) == bool(mapped or num_places)
    on_cpu = missing[num_elsewhere:]
    assert on_cpu
    assert words[:ranks] == [(later + 1) << 16 | (each + 1 if each in on_cpu else 0) for each in ids]
    assert not any(words[ranks:])


def test_of_several_tokens_the_router_notes_only_when_it_begins(host: HostDevice) -> None:
    tokens, ranks, experts, cols = 3, 2, 9, 32
    generator = torch.Generator().manual_seed(2)
    x, weight = (torch.randn(n, cols, generator=generator) for n in (tokens, experts))
    shared, outs = torch.randn(1, cols, generator=generator), Outputs(tokens, ranks, experts)
    stacks = [ExpertTable(torch.zeros(experts).long(), QuantType.F32, 1, 4, True) for _ in range(MATRICES)]
    places = Partition(
        torch.full((MATRICES, experts), -7), torch.full((tokens, ranks), -7).int(),
        torch.zeros(WORDS, dtype=torch.int64),
    )  # fmt: skip
    times, noted = torch.zeros(NUM_WORDS, dtype=torch.int32), torch.full((tokens, ranks), -7).int()
    box, arrivals = Mailbox.planned(ranks, cols, tokens), torch.zeros(1, dtype=torch.int32)
    sharing = sharing_of(stacks, times, box, 0, places, noted)
    router_gemv_cuda(x, weight, shared, RouterBuffers(*outs.tensors, arrivals), begin_of(sharing))
    outs.check(x, weight, shared)
    assert places.stamps is not None
    assert places.stamps[0] > 0
    assert not places.stamps[1:].any()
    assert noted.eq(-7).all()
    assert box.request.numpy()[0] == 0
    with pytest.raises(ValueError, match="3 tokens are shared out by a launch of their own"):
        router_gemv_cuda(x, weight, shared, RouterBuffers(*outs.tensors, arrivals), sharing)
