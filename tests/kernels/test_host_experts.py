"""Groups of pairs, tiles, and tables of addresses: kernels on the host against definitions in Python."""

import numpy as np
import pytest
import torch
from guarded import Guarded
from hypothesis import given, settings
from hypothesis import strategies as st

from coldstream.kernels.experts.addresses import AddressWriter
from coldstream.kernels.experts.cuda_gemm import ExpertTables, Groups, group_and_plan, group_pairs, plan_tiles
from coldstream.kernels.experts.mailbox import Mailbox
from coldstream.kernels.experts.place_group import place_group_cuda
from coldstream.kernels.experts.shapes import MAX_GROUP
from coldstream.kernels.experts.wait_answer import wait_answer_cuda
from host_device import HostDevice

CPU = torch.device("cpu")


class GuardedGroups:
    """Memory that is not written beside what a routing needs of it."""

    def __init__(self, num_pairs: int, num_experts: int, tile_tokens: int) -> None:
        num_tiles = 1 + num_pairs // tile_tokens + min(num_pairs, num_experts)
        shapes = ((num_pairs,), (num_pairs,), (num_experts, 2), (num_tiles, 4))
        self.parts = [Guarded(*shape, dtype=torch.int32, device=CPU) for shape in shapes]
        self.groups = Groups(*(part.tensor for part in self.parts))


@st.composite
def routings(draw: st.DrawFn) -> tuple[torch.Tensor, int]:
    """Ids [T, K], some outside the experts, which often have a pair or two and sometimes nearly all."""
    num_experts = draw(st.sampled_from([1, 2, 5, 33, 70]))
    tokens, ranks = draw(st.integers(1, 300)), draw(st.integers(1, 8))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    ids = rng.integers(-1, num_experts + 1, (tokens, ranks))
    if draw(st.booleans()):
        ids[rng.random(ids.shape) < 0.9] = draw(st.integers(0, num_experts - 1))
    return torch.from_numpy(ids).int(), num_experts


@pytest.mark.usefixtures("host")
@given(
    routing=routings(),
    tile_tokens=st.sampled_from([1, 8, 16, 64]),
    absent=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 69)), max_size=8),
)
@settings(max_examples=50)
def test_groups_and_tiles(
    routing: tuple[torch.Tensor, int], tile_tokens: int, absent: list[tuple[int, int]]
) -> None:
    """Every pair is in its expert's group, in order, and if the expert is there in one tile."""
    ids, num_experts = routing
    tables = torch.ones(3, num_experts, dtype=torch.int64)
    for matrix, expert in absent:
        tables[matrix, expert % num_experts] = 0
    memory = GuardedGroups(ids.numel(), num_experts, tile_tokens)
    group_pairs(ids, num_experts, memory.groups)
    plan_tiles(ids.numel(), ExpertTables(*tables), memory.groups, tile_tokens)
    pairs, tokens, counts, tiles = (part.checked() for part in memory.parts)
    flat, start, expected_tiles = ids.view(-1), 0, []
    for expert in range(num_experts):
        own = (flat == expert).nonzero()[:, 0]
        assert counts[expert].tolist() == [len(own), start]
        assert torch.equal(pairs[start : start + len(own)].long(), own)
        assert torch.equal(tokens[start : start + len(own)].long(), own // ids.shape[1])
        if tables[:, expert].all():
            for first in range(0, len(own), tile_tokens):
                expected_tiles.append([min(tile_tokens, len(own) - first), start + first, expert, 0])
        start += len(own)
    assert tiles[0].tolist() == [len(expected_tiles), 0, 0, 0]
    assert tiles[1 : 1 + len(expected_tiles)].tolist() == expected_tiles
    assert (pairs[start:] == -1).all(), "pairs of no expert are in no group"
    assert (tiles[1 + len(expected_tiles) :] == -1).all()


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize(
    ("tokens", "ranks", "num_experts"), [(1, 1, 1), (33, 8, 9), (64, 8, 256), (128, 10, 512), (128, 22, 1024)]
)
@pytest.mark.parametrize("tile_tokens", [1, 16])
def test_groups_and_tiles_of_a_few_tokens(
    tokens: int, ranks: int, num_experts: int, tile_tokens: int
) -> None:
    """They are those of the launches for any number of tokens."""
    rng = np.random.default_rng(tokens)
    # Ids beyond the experts are of no group, and most tokens want the first experts.
    chosen = [
        rng.permutation(max(ranks, num_experts + 2 if row % 3 else ranks))[:ranks] for row in range(tokens)
    ]
    ids = torch.from_numpy(np.stack(chosen) - 1).int()
    tables = torch.ones(3, num_experts, dtype=torch.int64)
    tables[1, num_experts // 2 :: 7] = 0
    found, expected = (GuardedGroups(ids.numel(), num_experts, tile_tokens) for _ in range(2))
    group_and_plan(ids, ExpertTables(*tables), found.groups, tile_tokens)
    group_pairs(ids, num_experts, expected.groups)
    plan_tiles(ids.numel(), ExpertTables(*tables), expected.groups, tile_tokens)
    for actual, part in zip(found.parts, expected.parts, strict=True):
        assert torch.equal(actual.checked(), part.checked())


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("num_experts", [1023, 1024, 1025, 2500])
def test_tiles_of_more_experts_than_threads(num_experts: int) -> None:
    counts = torch.stack((torch.arange(num_experts) % 3, torch.zeros(num_experts).long()), dim=1).int()
    counts[1:, 1] = counts[:-1, 0].cumsum(0)
    num_pairs = int(counts[:, 0].sum())
    memory = GuardedGroups(num_pairs, num_experts, 1)
    memory.groups.counts.copy_(counts)
    ones = torch.ones(num_experts, dtype=torch.int64)
    plan_tiles(num_pairs, ExpertTables(ones, ones, ones), memory.groups, 1)
    tiles = memory.parts[3].checked()
    assert tiles[0, 0] == num_pairs
    experts = torch.arange(num_experts).repeat_interleave(counts[:, 0].long())
    assert tiles[1 : 1 + num_pairs, 2].tolist() == experts.tolist()
    assert tiles[1 : 1 + num_pairs, 1].tolist() == list(range(num_pairs))


@pytest.mark.usefixtures("host")
@given(
    experts=st.lists(st.integers(0, 299), max_size=MAX_GROUP, unique=True),
    first=st.lists(st.integers(1, 1 << 46), min_size=3, max_size=3),
    sizes=st.lists(st.integers(1, 1 << 24), min_size=3, max_size=3),
    clears=st.booleans(),
)
def test_a_group_of_experts_is_placed(
    experts: list[int], first: list[int], sizes: list[int], clears: bool
) -> None:
    tables = [Guarded(300, dtype=torch.int64, device=CPU) for _ in range(3)]
    place_group_cuda(experts, first, sizes, [table.tensor for table in tables], clears=clears)
    for matrix, table in enumerate(tables):
        expected = torch.full((300,), 0 if clears else -1)
        for place, expert in enumerate(experts):
            expected[expert] = first[matrix] + place * sizes[matrix]
        assert torch.equal(table.checked(), expected)


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("count", [1, 2, 255, 256, 257, 600])
def test_addresses_are_written(count: int) -> None:
    writer = AddressWriter(600)
    table = Guarded(1000, dtype=torch.int64, device=CPU)
    order = np.random.default_rng(count).permutation(1000)[:count]
    values = np.arange(count, dtype=np.int64) + (1 << 40)
    writer.write(table.tensor.data_ptr() + 8 * order.astype(np.int64), values)
    expected = torch.full((1000,), -1)
    expected[order] = torch.from_numpy(values)
    assert torch.equal(table.checked(), expected)
    with pytest.raises(ValueError, match="601 changes"):
        writer.write(np.zeros(601, np.int64), np.zeros(601, np.int64))


@pytest.mark.parametrize("is_answered", [True, False])
def test_a_wait_ends_with_the_answer_or_in_vain(is_answered: bool, host: HostDevice) -> None:
    """After a minute of the device's clock, which goes on with every look, the mailbox says so."""
    box = Mailbox.planned(1, 1, 1)
    box.done.numpy()[0] = int(is_answered)
    wait_answer_cuda(box.done)
    assert box.done.numpy().tolist() == ([1, 0] if is_answered else [0, 1])
