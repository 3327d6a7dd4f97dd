"""Layers of small experts in the host's memory, and slots for some of them."""

import ctypes
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np
import torch

from coldstream.experts.ram_pool import Room
from coldstream.experts.slots.residency import expert_bytes
from coldstream.experts.slots.segments import SlotSegments
from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.cuda.memory import own_bytes
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
        table_of_pool = torch.zeros(NUM_EXPERTS, dtype=torch.int64)
        host = Host(values)
        stacks.append(
            ExpertTable(
                table, quant_type, *size, True, host, 0, step, values.data_ptr(), pooled=table_of_pool
            )
        )
    return stacks


LAYERS = [
    layer(32, 32, QuantType.F16, 0),
    layer(32, 64, QuantType.Q8_0, 9),
    layer(32, 32, QuantType.F16, 5),
]
# The same tables, whose experts the device may read where they are.
LOCKED_LAYERS = [[replace(stack, mapped=stack.source) for stack in stacks] for stacks in LAYERS]
SIZES = [expert_bytes(stacks) for stacks in LAYERS]


def read(address: int, num_bytes: int) -> bytes:
    return ctypes.string_at(address, num_bytes)


def expert_at(address: int) -> int:
    """The number of the expert in LAYERS that has this byte."""
    return next(
        number * NUM_EXPERTS + (address - stack.source) // stack.step
        for number, stacks in enumerate(LAYERS)
        for stack in stacks
        if 0 <= address - stack.source < stack.host.values.numel()
    )


def make_slots(segment_bytes: int, of_a_size: int = SLOTS_OF_A_SIZE) -> SlotSegments:
    return SlotSegments(dict.fromkeys(SIZES, of_a_size), own_bytes, segment_bytes)


class SmallPool:
    """In place of a `RamPool` for LAYERS: pieces that are overwritten at any moment unless they are held.

    num_back: experts that came back from the GPU. lasting_share: of the others, how many last.
    """

    device_offset = 1 << 52  # no address of the host is read by the device

    def __init__(self, num_pieces: int, seed: int) -> None:
        self.num_back, self.lasting_share = 0, 0.5
        self.is_registered = bool(seed % 2)
        self._rooms: dict[int, Room] = {}  # by piece
        self._rng = np.random.default_rng(seed)
        self._pieces = [np.zeros(max(SIZES), np.uint8) for _ in range(num_pieces)]
        self._owners: list[tuple[int, int] | None] = [None] * num_pieces
        self.holds = Counter[tuple[int, int]]()
        self.lasting = np.zeros(len(LAYERS) * NUM_EXPERTS, bool)

    def stir(self) -> None:
        """Others need pieces."""
        for index, owner in enumerate(self._owners):
            if index in self._rooms:
                continue
            if (owner is None or not self.holds[owner]) and self._rng.random() < 0.7:
                self._pieces[index].fill(255)
                self._owners[index] = None
                self._read(index, int(self._rng.integers(len(LAYERS) * NUM_EXPERTS)))

    def _read(self, index: int, number: int) -> None:
        key = divmod(number, NUM_EXPERTS)
        if key not in self._owners:
            self._owners[index] = key
            parts = [stack.host.values[key[1]].numpy() for stack in LAYERS[key[0]]]
            data = np.concatenate(parts)
            self._pieces[index][: data.size] = data

    def expert_at(self, address: int) -> int:
        """The number of the expert in the piece that has this byte."""
        begins = [piece.ctypes.data for piece in self._pieces]
        owner = next(
            owner
            for owner, begin in zip(self._owners, begins, strict=True)
            if 0 <= address - begin < max(SIZES)
        )
        assert owner is not None
        return owner[0] * NUM_EXPERTS + owner[1]

    def hold(self, layer: int, expert: int) -> tuple[int, ...] | None:
        if (layer, expert) not in self._owners:
            return None
        self.holds[layer, expert] += 1
        return self._matrices(layer, self._pieces[self._owners.index((layer, expert))].ctypes.data)

    def release(self, layer: int, expert: int) -> None:
        assert self.holds[layer, expert] > 0, "it is held"
        self.holds[layer, expert] -= 1

    def order(self, scores: np.ndarray, on_gpu: np.ndarray) -> None:
        """Any piece is overwritten first, and any expert but those of the GPU may be one that lasts."""
        self.lasting[:] = False
        for owner in self._owners:
            if owner is not None and self._rng.random() < self.lasting_share:
                self.lasting[owner[0] * NUM_EXPERTS + owner[1]] = True
        self.lasting &= ~on_gpu

    def room_for(self, layer: int, expert: int) -> Room | None:
        free = [
            index
            for index, owner in enumerate(self._owners)
            if index not in self._rooms and (owner is None or not self.holds[owner])
        ]
        if (layer, expert) in self._owners or not free:
            return None
        index = int(self._rng.choice(free))
        self._owners[index] = None
        self._pieces[index].fill(255)
        begin = self._pieces[index].ctypes.data
        room = self._rooms[index] = Room(layer, expert, index, self._matrices(layer, begin))
        return room

    def take_back(self, room: Room, *, is_whole: bool) -> None:
        assert self._rooms.pop(room.slot) is room
        key = (room.layer, room.expert)
        if not is_whole or key in self._owners:
            return
        self._owners[room.slot] = key
        self.num_back += 1
        for address, stack in zip(room.addresses, LAYERS[room.layer], strict=True):
            assert read(address, stack.step) == stack.host.values[room.expert].numpy().tobytes()

    @property
    def is_waiting(self) -> bool:
        """Whether a piece is kept for an expert that comes back."""
        return bool(self._rooms)

    @staticmethod
    def _matrices(layer: int, begin: int) -> tuple[int, ...]:
        sizes = [stack.matrix_bytes for stack in LAYERS[layer]]
        return tuple((begin + np.cumsum([0, *sizes[:-1]])).tolist())

    def brought(self, experts: Iterable[int]) -> Iterator[list[int]]:
        for number in experts:
            self._read(0, number)
            yield [number]
            assert not +self.holds, "copies have ended, and `ended` was called"
            self._pieces[0].fill(255)
            self._owners[0] = None
