"""Where experts lie on a device: what is copied and what is written into the tables, without a device."""

import ctypes

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("cuda.bindings")

from coldstream.experts.residency import MATRICES, _Places, expert_bytes
from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.experts.table import ExpertTable

NUM_EXPERTS = 5


class Host:
    """The experts of a matrix in the host's memory."""

    def __init__(self, table: torch.Tensor) -> None:
        self.values = table
        self.address = table.data_ptr()


def layer(rows: int, cols: int, down: QuantType, seed: int) -> list[ExpertTable]:
    stacks = []
    for number, (quant_type, size) in enumerate(
        ((QuantType.Q4_K, (rows, cols)), (QuantType.Q4_K, (rows, cols)), (down, (cols, rows)))
    ):
        step = size[0] * quant_type.row_bytes(size[1])
        values = torch.randint(
            0,
            256,
            (NUM_EXPERTS, step),
            dtype=torch.uint8,
            generator=torch.Generator().manual_seed(seed + number),
        )
        table = torch.zeros(NUM_EXPERTS, dtype=torch.int64)
        stacks.append(ExpertTable(table, quant_type, *size, True, Host(values), 0, step))
    return stacks


LAYERS = [
    layer(256, 256, QuantType.Q6_K, 0),
    layer(256, 512, QuantType.Q4_K, 9),
    layer(256, 256, QuantType.Q6_K, 5),
]
SIZES = [expert_bytes(stacks) for stacks in LAYERS]


def read(address: int, num_bytes: int) -> bytes:
    return ctypes.string_at(address, num_bytes)


@given(st.lists(st.integers(0, 3 * NUM_EXPERTS - 1), unique=True, min_size=1, max_size=6))
def test_trap_20_tables_lead_to_the_bytes_of_their_experts(experts: list[int]) -> None:
    slots = {size: torch.zeros((8, size), dtype=torch.uint8) for size in SIZES}
    places = _Places(LAYERS, slots)
    numbers = {expert: index for index, expert in enumerate(experts)}
    for expert, slot in numbers.items():
        for source, target, size in zip(*places.of_copy(expert, slot), strict=True):
            ctypes.memmove(target, source, size)
    arrived = np.array(experts, np.int64)
    where, values = places.entries(arrived, np.array(list(numbers.values())), np.empty(0, np.int64))
    assert len(where) == len(values) == MATRICES * len(experts)
    for address, value in zip(where.tolist(), values.tolist(), strict=True):
        ctypes.c_int64.from_address(address).value = value
    for number in range(3 * NUM_EXPERTS):
        stacks = LAYERS[number // NUM_EXPERTS]
        for stack in stacks:
            found = int(stack.addresses[number % NUM_EXPERTS])
            assert (found != 0) == (number in numbers)
            if found:
                expected = stack.host.values[number % NUM_EXPERTS].numpy().tobytes()
                assert read(found, len(expected)) == expected
    where, values = places.entries(np.empty(0, np.int64), np.empty(0, np.int64), arrived)
    assert not values.any()
    for address in where.tolist():
        ctypes.c_int64.from_address(address).value = 0
    assert not any(stack.addresses.any() for stacks in LAYERS for stack in stacks)
