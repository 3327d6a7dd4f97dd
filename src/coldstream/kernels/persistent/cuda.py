"""The launch of a token's layers: lists and memory on a device."""

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coldstream.errors import ColdstreamError
from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.cuda.array import DeviceArray
from coldstream.kernels.cuda.program import CudaProgram
from coldstream.kernels.cuda.skinny_shapes import instance_for
from coldstream.kernels.cuda.structs import declared_in
from coldstream.kernels.persistent.shapes import (
    CONSUMER_WARPS,
    MAX_RINGS,
    PLACES,
    TYPES,
    VECTORS,
    BlockLists,
    ProgramError,
    TokenLists,
)

WARP_SIZE = 32
LIMIT_NS = 2_000_000_000  # of a launch, after which every wait fails
MOST_SHARED_BYTES = 227 * 1024 - 6784  # of a block on sm_90, beside what the kernel declares itself
NOTHING_FAILED = (0, 2**32 - 1)
KERNEL = "token_layers"


def instance_of(types: Iterable[QuantType], warps: int, *, by_words: bool, has_stamps: bool = False) -> str:
    """The kernel for weights of these types, and how its blocks wait for each other."""
    flags = "".join(f", {str(flag).lower()}" for flag in (by_words, has_stamps))
    return instance_for(KERNEL, types).replace(">", f"{flags}, {warps}>")


PROGRAM = CudaProgram(
    Path(__file__).with_name("token.cu"),
    tuple(instance_of(TYPES, CONSUMER_WARPS, by_words=by_words) for by_words in (True, False)),
    is_slow=True,
)


@declared_in("persistent/token.cuh")
class LayerWeights(ctypes.Structure):
    """A layer's addresses."""


@declared_in("persistent/token.cuh")
class TokenProgram(ctypes.Structure):
    """A launch."""


class StuckError(ColdstreamError, RuntimeError):
    """A wait within a launch came to no end; the message says which."""


@dataclass(frozen=True)
class Signals:
    """How blocks wait for each other: for words or for counters, and for how long.

    is_patient: for the first word, before it looks at all.
    """

    by_words: bool = True
    is_patient: bool = False
    limit_ns: int = LIMIT_NS


@dataclass(frozen=True)
class LayerArrays:
    """Weights of a part of a layer on the device. matrices: by their names, experts' as whole stacks."""

    kind: int
    matrices: Mapping[str, DeviceArray]
    vectors: Mapping[str, DeviceArray]
    conv_state: DeviceArray | None = None  # float32 [taps − 1, channels]
    state: DeviceArray | None = None  # float32 [value heads, d, d]


def instance(lists: TokenLists, *, by_words: bool, has_stamps: bool = False) -> str:
    """`instance_of` the types of these lists."""
    types = {matrix.quant_type for kind in lists.kinds for matrix in kind.matrices.values()}
    return instance_of(types, lists.warps, by_words=by_words, has_stamps=has_stamps)


def shared_bytes(lists: TokenLists, num_layers: int) -> int:
    """Of a block. ProgramError if no block has as much."""
    found = lists.block_bytes + num_layers * ctypes.sizeof(LayerWeights)
    if found > MOST_SHARED_BYTES:
        raise ProgramError(f"{found} bytes of shared memory: {MOST_SHARED_BYTES} at most")
    return found


def packed_lists(lists: TokenLists) -> tuple[bytes, bytes, bytes, bytes]:
    """Steps, pieces, where each block's begin, and shapes, as the kernel reads them."""
    steps, pieces, heads = list[Any](), list[Any](), list[BlockLists]()
    for block in range(lists.num_blocks):
        for kind in lists.blocks:
            own, head = kind[block], BlockLists(first_step=len(steps), num_steps=len(kind[block].steps))
            for ring in range(MAX_RINGS):
                head.first_piece[ring], head.num_pieces[ring] = len(pieces), len(own.pieces[ring])
                pieces += own.pieces[ring]
            for step in own.steps:
                copied = type(step).from_buffer_copy(step)
                copied.first_piece += head.first_piece[step.ring]
                steps.append(copied)
            heads.append(head)
    return tuple(b"".join(map(bytes, each)) for each in (steps, pieces, heads, lists.shapes))  # type: ignore[return-value]


def packed_layers(layers: Sequence[LayerArrays]) -> bytes:
    """Addresses of all layers' weights."""
    packed = []
    for layer in layers:
        made = LayerWeights(kind=layer.kind)
        if layer.state is not None and layer.conv_state is not None:
            made.conv_state, made.state = layer.conv_state.data_ptr(), layer.state.data_ptr()
        for name, matrix in layer.matrices.items():
            made.matrices[PLACES[name]] = matrix.data_ptr()
        for number, name in enumerate(VECTORS):
            if name in layer.vectors:
                made.vectors[number] = layer.vectors[name].data_ptr()
        packed.append(bytes(made))
    return b"".join(packed)


@dataclass(frozen=True)
class TokenMemory:
    """Memory of a launch: uint8 `lists` (the four of `packed_lists`) and `layers`, float32 `activations`.

    counters: uint32, as many as `num_counters`, 0 before each launch. report: uint32 [2], `NOTHING_FAILED`.
    """

    lists: tuple[DeviceArray, DeviceArray, DeviceArray, DeviceArray]
    layers: DeviceArray
    activations: DeviceArray
    counters: DeviceArray
    report: DeviceArray
    stamps: DeviceArray | None = None  # uint32 [layers, slots, blocks, 5]: what a launch notes there


def num_counters(lists: TokenLists, num_layers: int) -> int:
    """Words that count in a launch of so many layers."""
    return num_layers * len(lists.counters)


def launch_token(
    lists: TokenLists,
    memory: TokenMemory,
    num_layers: int,
    eps: float,
    signals: Signals,
    first_layer: int = 0,
) -> None:
    """Queues all layers over the stream in `memory.activations`, whose other words are unwritten.

    Counters have been set to 0. first_layer: whose activations are those of the launch's first one.
    """
    sizes = lists.kinds[0].sizes
    steps, pieces, heads, shapes = (each.data_ptr() for each in memory.lists)
    activations = memory.activations.data_ptr() + 4 * first_layer * lists.buffers.num_words
    program = TokenProgram(
        steps=steps, pieces=pieces, lists=heads, shapes=shapes, layers=memory.layers.data_ptr(),
        activations=activations, report=memory.report.data_ptr(),
        stamps=None if memory.stamps is None else memory.stamps.data_ptr(), num_slots=lists.num_slots,
        num_layers=num_layers,
        num_kinds=len(lists.kinds), num_shapes=len(lists.shapes), hidden=sizes.hidden, ffn=sizes.ffn,
        num_experts=sizes.experts, chosen=sizes.chosen, key_heads=sizes.key_heads,
        value_heads=sizes.value_heads, proj=lists.buffers.projected,
        logits=lists.buffers.logits, eps=eps,
        limit_ns=signals.limit_ns,
        layer_words=lists.buffers.num_words,
        is_patient=signals.is_patient, rows=lists.rows,
    )  # fmt: skip
    counters = program.counters
    counters.words, counters.of_layer = memory.counters.data_ptr(), len(lists.counters)
    counters.splits, counters.stride, counters.backoff_ns = 1, 1, 0
    for number, ring in enumerate(lists.rings):
        program.stages[number], program.stage_bytes[number] = ring.stages, ring.stage_bytes
    PROGRAM.kernel(instance(lists, by_words=signals.by_words, has_stamps=memory.stamps is not None)).launch(
        (lists.num_blocks, 1, 1),
        WARP_SIZE * (lists.warps + MAX_RINGS),
        (program,),
        shared_bytes=shared_bytes(lists, num_layers),
        together=True,
    )


def check_report(lists: TokenLists, failed: int, number: int) -> None:
    """StuckError if the report of a launch has threads that waited without end."""
    if not failed:
        return
    layer, counter = divmod(number, len(lists.counters))
    is_counter = number != NOTHING_FAILED[1]
    waits_for = f"counter {lists.counters[counter]!r} of layer {layer}" if is_counter else "bytes or numbers"
    raise StuckError(f"one launch a token: {failed} threads waited without end, first for {waits_for}")
