"""Attention on the GPU, over caches of an integer type.

`integers_prepare.cu` is first. Steps of decoding go on with `integers_decode.cu`, those of prefill with
`integers_warpgroups.cu` where it can, and else with `integers.cu`. `merge_cuda.py` is last.

    kernels = IntegerKernels(AttentionShape(16, 2, 256, CACHE_TYPES["i16"]), device_limits())
    kernels.prepare(inputs, heads, caches, rows, queries)
    kernels.attend(queries, caches, rows, workspace)
    kernels.merge(gates_of(inputs, heads), heads, rows, workspace, out=out)

Nothing here allocates, synchronises or looks at device data. T rows, H query heads, G key/value heads, D
values a head.
"""

import ctypes
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np

from coldstream.errors import UnsupportedError
from coldstream.kernels.attention.arguments import (
    AttentionShape,
    CacheStrides,
    ChosenWords,
    DecodeWorkspace,
    IntegerQueries,
)
from coldstream.kernels.attention.cache_layout import INTEGER_CACHE_TYPES
from coldstream.kernels.attention.chunks import BLOCK_SIZE
from coldstream.kernels.attention.merge_cuda import MergeKernels, gates_of
from coldstream.kernels.attention.workspace_sizes import SPLIT_ROWS, num_chunks
from coldstream.kernels.cuda.activations import Activations
from coldstream.kernels.cuda.array import DeviceArray, check_array
from coldstream.kernels.cuda.limits import DeviceLimits, device_limits, overlaps
from coldstream.kernels.cuda.program import CudaProgram, Kernel
from coldstream.kernels.cuda.structs import declared_in
from coldstream.kernels.ops import MAX_TREE_ROWS, AttentionHeads, AttentionInputs, Caches, Rows

FOLDER = Path(__file__).parent
PREPARE = "integers_prepare.cu"
WARPGROUPS = "integers_warpgroups.cu"
PREPARE_THREADS, PREPARE_HEADS = 128, 8  # a block
TILE_SCALE_BYTES = 16  # of a row in shared memory, behind the planes
PAIRS = 16  # of a row and a query head, which a warp takes
PLACES = (2, 1)  # of tiles: one for keys and one for values, or one that has them in turn
PREFILL_WARPS = (8, 4, 2, 1)  # of a block of threads: the first that fit
DECODE_WARPS, DECODE_BLOCKS = 4, (2, 1)  # warps for each block of positions of a step
GROUP_PAIRS, GROUP_WARPS = 64, 4  # that a warpgroup takes, and its warps; one more of a block copies
GROUP_STAGES, NOTE_BYTES = 2, 28
TILE_CODES = 512  # bytes of a row in shared memory, in integers.cu: others than 16-bit heads of 512 fit whole
WARP_COLUMNS = 256  # for whose sums a warp of integers.cu has registers
HEAD_MULTIPLE, MOST_MULTIPLES, LARGEST_HEAD = 32, 8, 512
HEAD_SIZES = f"multiples of {HEAD_MULTIPLE} up to {MOST_MULTIPLES * HEAD_MULTIPLE}, and {LARGEST_HEAD}"


@declared_in("attention/integers_tile.cuh", "BatchRows")
class BatchArguments(ctypes.Structure):
    @classmethod
    def of(cls, rows: Rows) -> "BatchArguments":
        """ValueError for rows that are distinguished by states alone."""
        batch = rows.batch
        if batch is None:
            raise ValueError("attention over integers takes rows with block tables")
        return cls(
            positions=rows.positions.data_ptr(),
            segments=batch.segments.data_ptr(),
            tables=batch.tables.data_ptr(),
            indices=batch.indices.data_ptr(),
            parents=batch.parents.data_ptr(),
            kept=batch.kept.data_ptr(),
            num_rows=len(rows.positions),
            table_stride=batch.tables.stride(0),
        )


@declared_in("attention/integers_arguments.cuh")
class IntegersArguments(ctypes.Structure): ...


@declared_in("attention/integers_prepare.cu")
class PrepareIntegersArguments(ctypes.Structure): ...


def takes_heads_of(head_dim: int) -> bool:
    """Whether there are kernels for them: HEAD_SIZES."""
    return head_dim in range(HEAD_MULTIPLE, (MOST_MULTIPLES + 1) * HEAD_MULTIPLE, HEAD_MULTIPLE) or (
        head_dim == LARGEST_HEAD
    )


class IntegerKernels:
    """The kernels for one shape on one device, compiled when first used."""

    def __init__(self, shape: AttentionShape, device: DeviceLimits) -> None:
        if not takes_heads_of(shape.head_dim) or shape.cache_type.name not in INTEGER_CACHE_TYPES:
            raise ValueError(f"no kernels for heads of {shape.head_dim} values in {shape.cache_type.name}")
        self.shape = shape
        self.device = device
        self._by_warpgroups = device.has_warpgroups and takes_warpgroups(shape)
        self._forms = {
            (kind, trees): form
            for kind, trees in product(FORMS, (False, True))
            if self._is_needed(kind, trees) and (form := self._fitting(kind, trees))
        }
        files = {PREPARE: {_instance("attention_prepare_integers", shape, shape.output_gate == "query")}}
        for form in self._forms.values():
            files.setdefault(form.file, set()).add(form.instance)
        self.programs = {
            file: CudaProgram(FOLDER / file, tuple(sorted(names)), is_slow=file == WARPGROUPS)
            for file, names in files.items()
        }
        merging = MergeKernels(shape, device.shared_per_block)
        self.programs |= merging.programs
        self.merge = merging.merge

    @property
    def forms(self) -> "Sequence[KernelForm]":
        """The forms of attention itself that the device runs."""
        return tuple(dict.fromkeys(self._forms.values()))

    def _is_needed(self, kind: str, trees: bool) -> bool:
        if kind == "decode_half":
            return not trees and self.shape.group_size <= PAIRS // 2
        if kind == "decode":
            return not trees and self.shape.group_size <= PAIRS
        return (not trees and self._by_warpgroups) == (kind in GROUPS)

    def _fitting(self, kind: str, trees: bool) -> "KernelForm | None":
        """The best form. None for decode if there is none; UnsupportedError for other kinds."""
        for form in FORMS[kind](self.shape, trees):
            if form.shared_bytes <= self.device.shared_per_block and form.num_pairs >= self.shape.group_size:
                return form
        if kind in DECODE:
            return None
        raise UnsupportedError(
            f"{self.shape.group_size} heads of {self.shape.head_dim} values on one key/value head: the GPU's "
            "attention has no tile for so many; use --device cpu"
        )

    @staticmethod
    def num_chunks(num_rows: int, num_positions: int) -> int:
        """Of the workspace, for contexts of up to `num_positions`: one in prefill, which merges at once."""
        return num_chunks(num_rows, num_positions)

    def prepare(
        self,
        inputs: AttentionInputs,
        heads: AttentionHeads,
        caches: Caches,
        rows: Rows,
        queries: IntegerQueries,
    ) -> None:
        """Writes `queries`, and the rows' places in the caches [blocks, 256, G, row].

        ValueError for rows without block tables.
        """
        shape, num_rows = self.shape, len(rows.positions)
        arguments = PrepareIntegersArguments(
            query_gate=inputs.query_gate.data_ptr(),
            key=inputs.key.data_ptr(),
            value=inputs.value.data_ptr(),
            angles=inputs.angles.data_ptr(),
            query=queries.codes.data_ptr(),
            query_scales=queries.scales.data_ptr(),
            k_cache=caches.k.data_ptr(),
            v_cache=caches.v.data_ptr(),
            rows=BatchArguments.of(rows),
            strides=_strides_of(caches),
            query_gate_stride=inputs.query_gate.stride(0),
            key_stride=inputs.key.stride(0),
            value_stride=inputs.value.stride(0),
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            rope_half=inputs.angles.shape[-2],
            v_norm=heads.v_norm,
            eps=heads.eps,
            query_scale=query_scale(shape, heads),
        )
        if heads.q_bias is not None:
            arguments.q_bias, arguments.k_bias = heads.q_bias.data_ptr(), heads.k_bias.data_ptr()
            arguments.v_bias = heads.v_bias.data_ptr()
        if heads.q_norm is not None:
            arguments.q_norm, arguments.k_norm = heads.q_norm.data_ptr(), heads.k_norm.data_ptr()
        blocks = -(-(shape.num_heads + 2 * shape.num_kv_heads) // PREPARE_HEADS)
        self._only_kernel(PREPARE).launch(
            (num_rows, blocks, 1), PREPARE_THREADS, (arguments,), overlap=overlaps(num_rows)
        )

    def attend(
        self,
        queries: IntegerQueries,
        window: int | None,
        caches: Caches,
        rows: Rows,
        workspace: DecodeWorkspace,
    ) -> None:
        """What the chunks of 256 positions leave of each row and head, in `workspace` with `num_chunks`.

        window: of the layer's `AttentionHeads`. caches: [blocks, 256, G, row]. ValueError for rows without
        block tables, for a window without a position, and for a window beside a choice of blocks.
        """
        shape, num_rows = self.shape, len(rows.positions)
        if window is not None and window < 1:
            raise ValueError(f"a window of {window} positions holds nothing")
        if (queries.chosen is not None) != shape.has_choice or (shape.has_choice and window is not None):
            raise ValueError("these kernels are for other rows: with a choice of blocks, or with a window")
        max_chunks = workspace.values.shape[2]
        arguments = IntegersArguments(
            query=queries.codes.data_ptr(),
            query_scales=queries.scales.data_ptr(),
            k_cache=caches.k.data_ptr(),
            v_cache=caches.v.data_ptr(),
            values=workspace.values.data_ptr(),
            stats=workspace.stats.data_ptr(),
            rows=BatchArguments.of(rows),
            strides=_strides_of(caches),
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            max_chunks=max_chunks,
            window=window or 0,
            chosen=ChosenWords.of(queries.chosen),
        )
        assert rows.batch is not None
        trees, is_deep = rows.batch.has_trees, rows.batch.is_deep
        is_branching = trees and rows.batch.is_branching
        kind = kind_of(shape, num_rows, is_branching, is_deep, self._by_warpgroups)
        if kind in DECODE and (kind, False) not in self._forms:
            kind = "prefill_small"  # a tile of all channels does not fit, but parts of one do
        form = self._forms[kind, trees and kind not in CHAINS]
        num_items = max_chunks * shape.num_kv_heads * -(-num_rows // (form.num_pairs // shape.group_size))
        block_bytes = form.shared_bytes + self.device.reserved_per_block
        at_once = max(1, self.device.shared_per_processor // block_bytes)
        self.programs[form.file].kernel(form.instance).launch(
            (min(num_items, at_once * self.device.num_processors), 1, 1),
            32 * form.warps,
            (arguments,),
            shared_bytes=form.shared_bytes,
            overlap=True,
        )

    def _only_kernel(self, file: str) -> Kernel:
        program = self.programs[file]
        return program.kernel(program.instances[0])


def query_scale(shape: AttentionShape, heads: AttentionHeads) -> float:
    """What queries are multiplied by, with the bits of the written arithmetic."""
    return float(1 / np.sqrt(np.float32(shape.head_dim))) if heads.scale is None else heads.scale


def kind_of(
    shape: AttentionShape, num_rows: int, is_branching: bool, is_deep: bool, by_warpgroups: bool
) -> str:
    """Which form computes so many rows.

    is_branching: whether the batch may have a draft tree that forks. Without a fork, its keys are in order
        of position, as a chain's. is_deep: whether rows may be far from their sequences' first positions, so
        that they had better share what they read.
    """
    num_pairs = num_rows * shape.group_size
    is_small = num_pairs <= PAIRS or (not is_deep and num_rows <= SPLIT_ROWS)
    if is_small and shape.group_size <= PAIRS and not is_branching:
        return "decode_half" if num_pairs <= PAIRS // 2 else "decode"
    if by_warpgroups and not is_branching:
        return "group" if num_pairs <= GROUP_PAIRS else "groups"
    return "prefill_small" if num_rows <= SPLIT_ROWS and num_pairs <= MIDDLE_PAIRS else "prefill"


@dataclass(frozen=True)
class KernelForm:
    """An instance of a kernel: what a block of threads takes at once, and the shared memory for that."""

    file: str
    instance: str
    warps: int
    num_pairs: int
    shared_bytes: int


def _tile_bytes(shape: AttentionShape, parts: int = 1) -> int:
    """Of a part of the channels of a block's keys or values in shared memory, where their planes are."""
    row_codes = shape.cache_type.num_planes * shape.head_dim // parts
    return BLOCK_SIZE * (row_codes + TILE_SCALE_BYTES)


def prefill_forms(shape: AttentionShape, trees: bool, most_warps: int = 8) -> Iterator[KernelForm]:
    """Of integers.cu, the best first."""
    parts = -(-shape.cache_type.num_planes * shape.head_dim // TILE_CODES)
    sharing = -(-shape.head_dim // WARP_COLUMNS)  # warps that have the same pairs, and columns of their own
    for places, warps in product(PLACES, PREFILL_WARPS[PREFILL_WARPS.index(most_warps) :]):
        num_pairs = PAIRS * (warps // sharing)
        if num_pairs == 0:
            continue
        # Tiles; queries; weights and positions of draft trees.
        shared = places * _tile_bytes(shape, parts) + num_pairs * (2 * shape.head_dim + 16)
        shared += PAIRS * warps * BLOCK_SIZE * 4 + MAX_TREE_ROWS * 4 if trees else 0
        instance = _attending("attention_integers", shape, warps, trees, places, parts, sharing)
        yield KernelForm("integers.cu", instance, warps, num_pairs, shared)


def decode_forms(shape: AttentionShape, trees: bool, halves: int) -> Iterator[KernelForm]:
    """Of integers_decode.cu for as many halves of PAIRS, the best first; there are none for trees."""
    tile_bytes = _tile_bytes(shape)
    for places, blocks in () if trees else product(PLACES, DECODE_BLOCKS):
        # Keys and values; queries; weights as floats, and as codes; numbers of a pair.
        shared = places * blocks * tile_bytes + PAIRS * (2 * shape.head_dim + 16)
        shared += blocks * PAIRS * (BLOCK_SIZE * (4 + 2) + 2 * (DECODE_WARPS + 1) * 4)
        instance = _attending("attention_integers_decode", shape, blocks, halves, places)
        yield KernelForm("integers_decode.cu", instance, DECODE_WARPS * blocks, PAIRS, shared)


def takes_warpgroups(shape: AttentionShape) -> bool:
    """Whether integers_warpgroups.cu has an instance."""
    return (
        shape.cache_type.value_bits in (16, 8)
        and shape.head_dim in (128, 256)  # of more, a warp has no registers for its pairs' columns
        and shape.group_size <= GROUP_PAIRS
    )


def warpgroup_forms(shape: AttentionShape, trees: bool, groups: int) -> Iterator[KernelForm]:
    """Of integers_warpgroups.cu, for devices that have warpgroups; there are none for trees."""
    if trees:
        return
    tile_bytes = BLOCK_SIZE * shape.cache_type.num_planes * shape.head_dim
    num_pairs = GROUP_PAIRS * groups
    # Queries; staged keys and values; values as they arrive; scales of both, two barriers and a note a stage;
    # which pairs there are.
    shared = num_pairs * 2 * shape.head_dim + (2 * GROUP_STAGES + 1) * tile_bytes
    shared += GROUP_STAGES * (2 * BLOCK_SIZE * 4 + 16 + NOTE_BYTES) + num_pairs * 8
    instance = _attending("attention_integers_warpgroups", shape, groups)
    yield KernelForm(WARPGROUPS, instance, GROUP_WARPS * (groups + 1), num_pairs, shared)


MIDDLE_WARPS = 4
MIDDLE_PAIRS = PAIRS * MIDDLE_WARPS
GROUPS = {"group": 1, "groups": 2}
DECODE = ("decode_half", "decode")
CHAINS = (*DECODE, *GROUPS)  # kinds that take rows as those of chains
FORMS: dict[str, Callable[[AttentionShape, bool], Iterator[KernelForm]]] = {
    "decode_half": partial(decode_forms, halves=1),
    "decode": partial(decode_forms, halves=2),
    "prefill_small": partial(prefill_forms, most_warps=MIDDLE_WARPS),
    "prefill": prefill_forms,
    **{kind: partial(warpgroup_forms, groups=count) for kind, count in GROUPS.items()},
}


def _instance(kernel: str, shape: AttentionShape, *parameters: int) -> str:
    numbers = (shape.cache_type.value_bits, shape.head_dim, *parameters)
    return f"coldstream::{kernel}<{', '.join(str(number).lower() for number in numbers)}>"


def _attending(kernel: str, shape: AttentionShape, *parameters: int) -> str:
    """The same for kernels that know of a choice."""
    return _instance(kernel, shape, *parameters, *([True] if shape.has_choice else []))


@functools.cache
def integer_kernels(shape: AttentionShape, device: DeviceLimits) -> IntegerKernels:
    """The same for all models: what is loaded stays loaded, as the kernels of other operations do."""
    return IntegerKernels(shape, device)


def attention_cuda(
    shape: AttentionShape,
    inputs: AttentionInputs,
    heads: AttentionHeads,
    caches: Caches,
    rows: Rows,
    queries: IntegerQueries,
    workspace: DecodeWorkspace,
    out: Activations,
) -> None:
    """`Ops.attention` on the current device, with memory for what is between its launches.

    As many rows are computed together as the workspace has.
    """
    kernels = integer_kernels(shape, device_limits())
    kernels.prepare(inputs, heads, caches, rows, queries)
    gates = gates_of(inputs, heads)
    attend_in_parts(kernels, gates, heads, caches, rows, queries, workspace, out)


def attend_in_parts(
    kernels: IntegerKernels,
    gates: DeviceArray | None,
    heads: AttentionHeads,
    caches: Caches,
    rows: Rows,
    queries: IntegerQueries,
    workspace: DecodeWorkspace,
    out: Activations,
) -> None:
    """`attend` and `merge` of as many rows at a time as the workspace has; all have been prepared.

    gates: see `gates_of`.
    """
    num_rows, at_once = len(rows.positions), len(workspace.values)
    for first in range(0, num_rows, at_once):
        part = slice(first, min(num_rows, first + at_once))
        own, result = _part_of(rows, part), out.rows(first, part.stop - first)
        own_queries = queries.part(part)
        kernels.attend(own_queries, heads.window, caches, own, workspace)
        of_part = None if gates is None else gates[part]
        kernels.merge(
            of_part, heads, own, workspace, own_queries.chosen, out=result.values, quantised=result.quantised
        )


def _part_of(rows: Rows, part: slice) -> Rows:
    """Some of the rows, none of which is of a tree unless all are taken."""
    batch = rows.batch
    assert batch is not None
    columns = {name: getattr(batch, name)[part] for name in ("segments", "indices", "parents", "kept")}
    return Rows(rows.positions[part], rows.state_ids[part], replace(batch, **columns))


def _strides_of(caches: Caches) -> CacheStrides:
    """ValueError unless heads of a position are adjacent, and keys and values laid out alike."""
    for cache in (caches.k, caches.v):
        check_array("caches", cache, "int8", is_contiguous=False)
        if cache.stride() != caches.k.stride():
            raise ValueError(f"{tuple(cache.shape)} is no cache like its other")
        if cache.stride()[2:] != (cache.shape[3], 1):
            raise ValueError("heads of a position must be adjacent")
    return CacheStrides(block_bytes=caches.k.stride(0), position_bytes=caches.k.stride(1))
