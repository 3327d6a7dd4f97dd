"""Streamed experts on the host: those that were listed are in their places, and nothing else is written."""

from dataclasses import replace

import pytest
import torch
from guarded import POISON_BYTE, Guarded
from hypothesis import given, settings
from hypothesis import strategies as st

from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.cuda.array import ALIGNMENT
from coldstream.kernels.experts import stage
from coldstream.kernels.experts.partition import ExpertPlaces, Staging
from coldstream.kernels.experts.shapes import MATRICES
from coldstream.kernels.experts.stage import stage_experts_cuda
from coldstream.kernels.experts.table import ExpertTable

EXPERTS, COLS = 12, 64


def layer_of(quant_type: QuantType, rows: tuple[int, ...]) -> tuple[list[torch.Tensor], list[ExpertTable]]:
    """Random bytes [experts, bytes] of each matrix, and their tables without slots."""
    generator = torch.Generator().manual_seed(sum(rows))
    sizes = [count * quant_type.row_bytes(COLS) for count in rows]
    data = [torch.randint(256, (EXPERTS, size), dtype=torch.uint8, generator=generator) for size in sizes]
    slots = torch.zeros(EXPERTS).long()
    stacks = [
        ExpertTable(slots, quant_type, count, COLS, True, None, memory.data_ptr(), memory.shape[1])
        for count, memory in zip(rows, data, strict=True)
    ]
    return data, stacks


@pytest.mark.usefixtures("host")
@given(
    quant_type=st.sampled_from([QuantType.F32, QuantType.Q8_0]),  # of 16 bytes and of 2
    rows=st.tuples(*[st.integers(1, 150)] * MATRICES),
    experts=st.lists(st.integers(0, EXPERTS - 1), unique=True),
    blocks=st.sampled_from([1, 5, stage.BLOCKS]),
    is_in_pool=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_listed_experts_are_in_their_places(
    quant_type: QuantType, rows: tuple[int, ...], experts: list[int], blocks: int, is_in_pool: bool
) -> None:
    data, stacks = layer_of(quant_type, rows)
    if is_in_pool:  # in another order
        pool = [memory.flip(0).contiguous() for memory in data]
        tables = [torch.tensor([places[-1 - e].data_ptr() for e in range(EXPERTS)]) for places in pool]
        stacks = [replace(each, mapped=0, pooled=table) for each, table in zip(stacks, tables, strict=True)]
    places = Guarded(
        EXPERTS, sum(-(-each.shape[1] // ALIGNMENT) * ALIGNMENT for each in data), dtype=torch.uint8
    )
    room = ExpertPlaces.of(places.tensor.view(-1), stacks, EXPERTS)
    chosen = torch.tensor([len(experts), *experts, *[-1] * (EXPERTS - len(experts))], dtype=torch.int32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage, "BLOCKS", blocks)
        stage_experts_cuda(stacks, Staging(chosen, room))
    staged = places.checked()
    expected = torch.full_like(staged, POISON_BYTE)
    for place, expert in enumerate(experts):
        offset = 0
        for matrix in data:
            size = matrix.shape[1]
            expected[place, offset : offset + size] = matrix[expert]
            offset += -(-size // ALIGNMENT) * ALIGNMENT
    assert torch.equal(staged, expected)


@pytest.mark.parametrize(("num_bytes", "places"), [(0, 0), (767, 0), (768, 1), (5 * 768 - 1, 4), (9000, 6)])
def test_a_room_has_as_many_places_as_fit(num_bytes: int, places: int) -> None:
    _, stacks = layer_of(QuantType.Q8_0, (1, 2, 3))
    assert ExpertPlaces.of(torch.zeros(num_bytes, dtype=torch.uint8), stacks, most=6).count == places


def test_an_expert_larger_than_its_place_is_refused() -> None:
    _, stacks = layer_of(QuantType.Q8_0, (1, 2, 4))
    with pytest.raises(ValueError, match="an expert of 1024 bytes for places of 768"):
        ExpertPlaces.of(torch.zeros(5000, dtype=torch.uint8), stacks, 2, place_bytes=768)
