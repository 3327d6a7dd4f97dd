"""Experts that come over the bus before their layer's router has run: what its router would choose now.

The router of a later layer is also applied to this layer's input, in the launch of this layer's own
(`router/cuda.py`). What it chooses and no slot holds is copied into a ring of places, by one kernel that runs
beside all layers of a step. Where the later layer's pairs are shared out, an expert in a place is as good as
one in a slot; one that is still on its way is computed elsewhere, and its copy is given up. So no answer
waits for a guess, or depends on one.

What lies where is said by keys, one for each place. Those of a layer's places are emptied where the layer
`distance` before it is shared out, and are only set after that, so that a key is true for as long as the step
asks for it: the places are not filled again before the layer's experts have been computed.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from coldstream.kernels.cuda.few_shapes import MAX_ROWS as MAX_FEW_ROWS
from coldstream.kernels.cuda.memory import ALIGNMENT
from coldstream.kernels.cuda.program import CudaProgram
from coldstream.kernels.experts.partition import MATRICES, Prefetched, PrefetchNotes, Stack, stack_of
from coldstream.kernels.experts.table import ExpertTable

PROGRAM = CudaProgram(Path(__file__).with_name("prefetch.cu"), ("prefetch_experts",))
THREADS = 32
BLOCKS = 16  # enough for the bus, and few enough for the kernels beside it
MAX_PLACES = 8


@dataclass(frozen=True)
class Prefetching:
    """How far ahead experts are guessed, in layers, and how many of a layer are brought at most."""

    distance: int
    experts: int

    def __post_init__(self) -> None:
        if self.distance < 1 or not 1 <= self.experts <= MAX_PLACES:
            raise ValueError(f"{self}: at least 1 layer ahead, and 1 to {MAX_PLACES} experts")


@dataclass(frozen=True)
class PrefetchSizes:
    """`prefetching` for a model.

    num_layers: at least those that may miss an expert; expert_bytes: of the largest expert, the rounding up
    of each matrix to ALIGNMENT included.
    """

    prefetching: Prefetching
    num_layers: int
    num_ranks: int
    expert_bytes: int


class Zeros(Protocol):
    """Persistent memory, all zero."""

    def __call__(self, shape: tuple[int, ...], dtype: str) -> torch.Tensor: ...


class PrefetchRing:
    """Places for the experts of the layers whose routers have yet to run, and who lies in them.

    `guesses` is int32 [layers, MAX_FEW_ROWS, K]; `tallies` int32 [layers, 2], how many experts came and how
    many of them were used.
    """

    def __init__(self, sizes: PrefetchSizes, zeros: Zeros) -> None:
        self.distance, self._count = sizes.prefetching.distance, sizes.prefetching.experts
        self._depth = self.distance + 1
        self._place_bytes = sizes.expert_bytes
        self._data = zeros((self._depth, self._count * sizes.expert_bytes), "uint8")
        self._keys = zeros((self._depth, self._count), "int32")
        layers = sizes.num_layers
        # Layers shared out; for each target the blocks that finished it; the same for each of its places.
        self._progress = zeros((1 + layers + layers * self._count,), "int32")
        self._targets = zeros((layers, ctypes.sizeof(_Target)), "uint8")
        self._num_targets = 0
        self.guesses = zeros((layers, MAX_FEW_ROWS, sizes.num_ranks), "int32")
        self.tallies = zeros((layers, 2), "int32")

    def set_targets(self, layers: Sequence[Sequence[ExpertTable]]) -> None:
        """Takes gate, up and down of all layers, in their order, from host memory that the device reads."""
        targets = [self._target(layer, layers[layer]) for layer in range(self.distance, len(layers))]
        self._num_targets = len(targets)
        if targets and not self._targets.is_meta:
            data = torch.frombuffer(bytearray(b"".join(map(bytes, targets))), dtype=torch.uint8)
            self._targets[: len(targets)].copy_(data.view(len(targets), -1))

    def _target(self, layer: int, stacks: Sequence[ExpertTable]) -> "_Target":
        return _Target(
            self.guesses[layer].data_ptr(),
            len(stacks[0].addresses),
            layer,
            (Stack * MATRICES)(*map(stack_of, stacks)),
            (ctypes.c_int64 * MATRICES)(*map(_matrix_bytes, stacks)),
            self.prefetched(layer, stacks),
        )

    def begin_step(self) -> None:
        """Queues that nothing has been shared out yet; `fetch` and the routers come after it."""
        self._progress.zero_()

    def fetch(self, rows: int) -> None:
        """Queues what runs beside the layers of a step of `rows` rows, on a stream of its own.

        It waits for each layer to be shared out, so that only a graph may hold it: between launches from the
        host the driver may wait for it in turn. Where kernels do not run side by side, as under some tools,
        it gives up after a moment.
        """
        if self._num_targets == 0:
            return
        counts = [1, 1 + self._targets.shape[0]]
        progress = (self._progress, self._progress[counts[0] :], self._progress[counts[1] :])
        step = _Step(
            self._targets.data_ptr(),
            self._num_targets,
            self.distance,
            rows * self.guesses.shape[2],
            (ctypes.c_void_p * 3)(*(part.data_ptr() for part in progress)),
        )
        PROGRAM.kernel("prefetch_experts").launch((BLOCKS, 1, 1), THREADS, (step,))

    def prefetched(self, layer: int, stacks: Sequence[ExpertTable]) -> Prefetched:
        """Where the experts of `layer` may lie: nowhere for the first, which nobody could guess.

        ValueError if one is larger than a place.
        """
        if layer < self.distance:
            return Prefetched()
        sizes = [_matrix_bytes(stack) for stack in stacks]
        aligned = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
        if sum(aligned) > self._place_bytes:
            raise ValueError(f"an expert of {sum(aligned)} bytes for places of {self._place_bytes}")
        offsets = (ctypes.c_int64 * MATRICES)(*(sum(aligned[:i]) for i in range(MATRICES)))
        keys, data = self._part(layer)
        return Prefetched(keys.data_ptr(), data.data_ptr(), self._place_bytes, offsets, self._count)

    def notes(self, layer: int, *, is_guessing: bool) -> PrefetchNotes:
        """What the sharing out of `layer` does; is_guessing: whether it guesses at a later layer."""
        emptied = self._part(layer + self.distance)[0].data_ptr() if is_guessing else None
        return PrefetchNotes(emptied, self._count, self._progress.data_ptr(), self.tallies.data_ptr())

    def _part(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and the places of a layer."""
        return self._keys[layer % self._depth], self._data[layer % self._depth]


class _Target(ctypes.Structure):
    """As in prefetch.cu."""

    _fields_ = (
        ("guesses", ctypes.c_void_p),
        ("num_experts", ctypes.c_int32),
        ("layer", ctypes.c_uint32),
        ("matrix", Stack * MATRICES),
        ("bytes", ctypes.c_int64 * MATRICES),
        ("places", Prefetched),
    )


class _Step(ctypes.Structure):
    _fields_ = (
        ("targets", ctypes.c_void_p),
        ("num_targets", ctypes.c_int32),
        ("distance", ctypes.c_int32),
        ("num_guesses", ctypes.c_int32),
        ("progress", ctypes.c_void_p * 3),
    )


def _matrix_bytes(stack: ExpertTable) -> int:
    return stack.rows * stack.quant_type.row_bytes(stack.cols)
