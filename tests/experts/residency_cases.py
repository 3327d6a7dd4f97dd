"""Layers of small experts in the host's memory, and slots for some of them."""

import ctypes

import torch

from coldstream.experts.residency import expert_bytes
from coldstream.experts.segments import SlotSegments
from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.experts.table import ExpertTable

NUM_EXPERTS = 5
SLOTS_OF_A_SIZE = 6


class Host:
    """The experts of a matrix in the host's memory."""

    def __init__(self, table: torch.Tensor) -> None:
        self.values = table


def layer(rows: int, cols: int, down: QuantType, seed: int) -> list[ExpertTable]:
    stacks = []
    for number, (quant_type, size) in enumerate(
        ((QuantType.Q8_0, (rows, cols)), (QuantType.Q8_0, (rows, cols)), (down, (cols, rows)))
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
        stacks.append(ExpertTable(table, quant_type, *size, True, Host(values), 0, step, values.data_ptr()))
    return stacks


LAYERS = [
    layer(32, 32, QuantType.F16, 0),
    layer(32, 64, QuantType.Q8_0, 9),
    layer(32, 32, QuantType.F16, 5),
]
SIZES = [expert_bytes(stacks) for stacks in LAYERS]


def read(address: int, num_bytes: int) -> bytes:
    return ctypes.string_at(address, num_bytes)


def make_slots(segment_bytes: int) -> SlotSegments:
    return SlotSegments(
        dict.fromkeys(SIZES, SLOTS_OF_A_SIZE),
        lambda size: torch.empty(size, dtype=torch.uint8, device="cuda"),
        segment_bytes,
    )
