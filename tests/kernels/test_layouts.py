"""Structs read from CUDA sources have the compiler's layouts, and numbers on both sides are equal.

CUDA's own compiler compares: a file of kernels is compiled with an assertion for every field and number.
"""

import ctypes
import struct
from collections.abc import Mapping, Sequence
from importlib import import_module
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.arithmetic.quantised import BLOCK_SIZE, GROUP_SIZE
from coldstream.kernels.arithmetic.reference import LARGEST_CODE
from coldstream.kernels.attention import cuda as integers
from coldstream.kernels.attention import merge_cuda as merge
from coldstream.kernels.attention import move_rows
from coldstream.kernels.attention.arguments import AttentionShape
from coldstream.kernels.attention.cache_layout import CACHE_LAYOUTS, INTEGER_CACHE_TYPES
from coldstream.kernels.attention.cache_types import CACHE_TYPES, LARGEST_NIBBLE
from coldstream.kernels.attention.chunks import BLOCK_SIZE as BLOCK_POSITIONS_OF_A_SUM
from coldstream.kernels.attention.levels import LARGEST_LEVEL, LEVELS
from coldstream.kernels.attention.planes import LARGEST_TWO_PLANE_CODE, LOW_UNIT
from coldstream.kernels.cuda import gemm_tiles, skinny_shapes
from coldstream.kernels.cuda.compiler import KERNELS, CompileError, compile_uncached
from coldstream.kernels.cuda.structs import declared_structs
from coldstream.kernels.draft_block import HEAD_SIZES, MAX_CANDIDATES
from coldstream.kernels.draft_block import cuda as draft_block
from coldstream.kernels.experts import cuda as experts_gemv
from coldstream.kernels.experts import cuda_gemm as experts_gemm
from coldstream.kernels.experts import cuda_grouped as experts_grouped
from coldstream.kernels.experts import (
    partition,
    place_group,
    prefetch,
    shapes,
    split,
    stage,
    stamps,
)
from coldstream.kernels.fused.reference import NUM_COLUMNS
from coldstream.kernels.gated_delta_net import cuda as delta_net
from coldstream.kernels.linear import cuda as linear_skinny
from coldstream.kernels.linear import cuda_float_gemm, skinny_layouts
from coldstream.kernels.linear import cuda_gemm as linear_gemm
from coldstream.kernels.linear.integer_types import BLOCK_TYPES, INTEGER_TYPES, MINIMUM_TYPES
from coldstream.kernels.linear.skinny_layouts import Walk
from coldstream.kernels.ops import BLOCK_POSITIONS, GATINGS, MAX_TREE_ROWS
from coldstream.kernels.router import cuda as router
from coldstream.kernels.router.reference import SUM_EPSILON
from coldstream.kernels.sample import cuda as sample

for path in KERNELS.rglob("*.py"):
    if "\n@declared_in(" in path.read_text():
        import_module(".".join(path.relative_to(KERNELS.parents[1]).with_suffix("").parts))

Layout = type[ctypes.Structure] | np.dtype  # type: ignore[type-arg]
FLOAT_VALUES = {QuantType.F32: "float", QuantType.F16: "Half", QuantType.BF16: "Bfloat16"}
TILING = "coldstream::gemm::{}"
NUMBERS_OF = {gating: number for number, gating in GATINGS.items()}
ENUMERATORS = {
    "softmax": "softmax",
    "sigmoid": "sigmoid",
    "softmax of the chosen": "softmax_of_chosen",
    "square root of softplus": "root_of_softplus",
}


def bits_of(cache_name: str) -> int:
    return CACHE_LAYOUTS[cache_name].value_bits


def attention_shape(cache_name: str, head_dim: int) -> AttentionShape:
    return AttentionShape(2, 2, head_dim, CACHE_TYPES[cache_name])


# Also read and written by NumPy, or alike in every instance of a template.
OTHERS: Mapping[tuple[str, str], Layout] = {
    ("experts/gemm.cu", "ExpertsJob<false>"): experts_gemm.ExpertsJob,
    ("experts/write_addresses.cu", "Entry"): np.dtype([("where", np.int64), ("value", np.int64)]),
    ("sample/rows.cuh", "SampledToken"): np.dtype([("token", np.int32), ("fault", np.int32)]),
    ("cuda/stamps.cuh", "LayerStamps"): stamps.LAYER_STAMPS,
    ("draft_block/values.cuh", "DraftContext"): draft_block.CONTEXT_TYPE,
}
NUMBERS: Mapping[str, Mapping[str, float]] = {
    "attention/integers_prepare.cu": {
        "chunk_positions": BLOCK_POSITIONS,
        "max_tree_rows": MAX_TREE_ROWS,
        "prepare_threads": integers.PREPARE_THREADS,
        "heads_per_block": integers.PREPARE_HEADS,
        "low_unit": LOW_UNIT,
        "code_limit<16>": LARGEST_TWO_PLANE_CODE,
        "code_limit<8>": LARGEST_CODE,
        "code_limit<4>": LARGEST_NIBBLE,
        "code_limit<3>": LARGEST_LEVEL,
        "positive_levels": int.from_bytes(struct.pack("4b", *LEVELS[:4]), "little"),
        "negative_levels": int.from_bytes(struct.pack("4b", *LEVELS[4:]), "little"),
        **{
            f"(CacheRow<{layout.value_bits}, {head_dim}>::bytes)": layout.row_bytes(head_dim)
            for layout in map(CACHE_LAYOUTS.__getitem__, INTEGER_CACHE_TYPES)
            for head_dim in (64, 96, 256)
        },
    },
    "attention/integers.cu": {
        "pairs": integers.PAIRS,
        "block_positions": BLOCK_POSITIONS_OF_A_SUM,
        **{
            f"(IntegerAttention<{bits_of(name)}, {head_dim}, 4, true, 2, 1, 1, false>::Block::tile_bytes)": (
                integers._tile_bytes(attention_shape(name, head_dim))
            )
            for name in INTEGER_CACHE_TYPES
            for head_dim in (64, 256)
        },
    },
    "attention/integers_decode.cu": {
        "decode_warps": integers.DECODE_WARPS,
        **{
            f"(DecodeMemory<{bits_of(name)}, {head_dim}, {blocks}, {places}>::bytes)": (form.shared_bytes)
            for name in INTEGER_CACHE_TYPES
            for head_dim in (32, 96, 256)
            for (places, blocks), form in zip(
                product(integers.PLACES, integers.DECODE_BLOCKS),
                integers.decode_forms(attention_shape(name, head_dim), False, 2),
                strict=True,
            )
        },
    },
    "attention/integers_warpgroups.cu": {
        "group_pairs": integers.GROUP_PAIRS,
        "stages": integers.GROUP_STAGES,
        "sizeof(TileNote)": integers.NOTE_BYTES,
        **{
            f"(MultiplyingGroup<{bits}, {head_dim}, {groups}, false>::shared_bytes)": next(
                integers.warpgroup_forms(attention_shape(f"i{bits}", head_dim), False, groups)
            ).shared_bytes
            for bits in (16, 8)
            for head_dim in (128, 256)
            for groups in (1, 2)
        },
    },
    "attention/merge.cu": {
        "merge_batch": merge.MERGE_BATCH,
    },
    "attention/finish.cu": {"finish_warps": merge.FINISH_WARPS},
    "experts/gemm.cu": {
        "copying_threads": 32 * gemm_tiles.COPYING_WARPS,
        **{
            f"{TILING.format(tiling.name)}::{number}": getattr(tiling, number)
            for tiling in experts_gemm.ALL_TILINGS
            for number in ("rows", "tokens", "threads", "shared_bytes")
        },
    },
    "experts/group.cu": {
        "group_threads": experts_gemm.GROUP_THREADS,
        "plan_threads": experts_gemm.PLAN_THREADS,
    },
    "draft_block/rows.cu": {
        "block_threads": draft_block.THREADS,
        "warp_size": draft_block.WARP_SIZE,
        "max_candidates": MAX_CANDIDATES,
    },
    "draft_block/attend.cu": {
        "warp_queries": draft_block.WARP_QUERIES,
        **{f"part_positions<{dim}>": draft_block._part_positions(dim) for dim in HEAD_SIZES},
        **{
            f"sizeof(PartMemory<{dim}, {warps}>)": draft_block.part_bytes(dim, warps)
            for dim in HEAD_SIZES
            for warps in draft_block.WARPS
        },
    },
    "experts/stage.cu": {"warp_size": stage.THREADS},
    "experts/partition.cu": {
        "num_matrices": shapes.MATRICES,
        "num_tallies": len(prefetch.TALLIES),
        "partition_threads": partition.THREADS,
        "sizeof(LayerStamps) / 8": stamps.WORDS,
        "num_sums": len(stamps.SUMS),
        "most_rows": shapes.MAX_MAILBOX_ROWS,
        "most_shared_rows": shapes.MAX_SHARED_ROWS,
        "ask_warps": partition.ASK_WARPS,
        "most_ranks": shapes.MAX_RANKS,
        "most_experts": shapes.MAX_EXPERTS,
        "sizeof(MissTimes) / 4": split.NUM_WORDS,
    },
    "experts/place_group.cu": {"max_group": shapes.MAX_GROUP, "place_threads": place_group.THREADS},
    "experts/prefetch.cu": {
        "warp_size": prefetch.THREADS,
        "most_guesses": skinny_shapes.MAX_GEMV_ROWS * shapes.MAX_RANKS,
    },
    "gated_delta_net/decode.cu": {
        "max_tree_rows": MAX_TREE_ROWS,
        "delta_threads": delta_net.THREADS,
        "block_columns": delta_net.COLUMNS_PER_BLOCK,
        "group_blocks": delta_net.BLOCKS_PER_GROUP,
    },
    "gated_delta_net/replay.cu": {"most_layers": delta_net.MOST_REPLAYED},
    "attention/move_rows.cu": {"most_caches": move_rows.MOST_CACHES},
    "gated_delta_net/prefill.cu": {
        "walk_threads": delta_net.WALK_THREADS,
        "tile_rows": delta_net.TILE_ROWS,
        "output_warps": delta_net.OUTPUT_WARPS,
    },
    "linear/gemm.cu": {
        f"{TILING.format(tiling.name)}::{number}": getattr(tiling, number)
        for tilings in linear_gemm.TILINGS.values()
        for tiling in tilings
        for number in ("rows", "tokens", "threads", "shared_bytes")
    },
    "linear/float_gemm.cu": {
        "threads": cuda_float_gemm.THREADS,
        "depth": cuda_float_gemm.DEPTH,
        "max_tile_columns": cuda_float_gemm.MAX_TILE_COLUMNS,
        **{
            f"FloatTiling<Float32, {tiling.thread_side}, true>::{number}": getattr(tiling, number)
            for tiling in cuda_float_gemm.TILINGS
            for number in ("tile_tokens", "tile_rows")
        },
        **{
            f"2 * sizeof(Stage<FloatTiling<Float32, {tiling.thread_side}, true>>)": tiling.shared_bytes
            for tiling in cuda_float_gemm.TILINGS
        },
    },
    "experts/grouped.cu": {
        "expert_warps": experts_gemv.WARPS,
        "first_bits": experts_grouped.FIRST_BITS,
        **{
            f"grouped_blocks({1 << int(kind)}u)": experts_grouped.blocks_per_processor([kind])
            for kind in INTEGER_TYPES
        },
    },
    "linear/skinny.cu": {
        "linear_max_matrices": linear_skinny.MAX_MATRICES,
        "slice_rows": skinny_layouts.SLICE_ROWS,
        "float_tile_threads": skinny_layouts.WARPS * 32,
        **{
            f"float_tile_tokens({slices})": tokens
            for slices, tokens in skinny_layouts.FLOAT_TILE_TOKENS.items()
        },
        **{f"float_tile_rows({slices})": rows for slices, rows in skinny_layouts.FLOAT_TILE_ROWS.items()},
        **{
            f"float_stages<{value}>({slices}) * sizeof(FloatStage<{value}, {slices}>)": (
                skinny_layouts.float_tile_bytes([quant_type], slices)
            )
            for quant_type, value in FLOAT_VALUES.items()
            for slices in skinny_layouts.SLICES
        },
        **{
            f"tile_blocks({slices // sets}, {sets})": skinny_layouts.tile_blocks(
                slices, skinny_layouts.Walk.TILES
            )
            for slices, sets in skinny_layouts.SETS[Walk.TILES].items()
        },
        "block_row_bytes": skinny_shapes.BLOCK_GROUP_BYTES,
        **{
            f"LoneRowOf<type_bit({kind.name}::type)>::group_bytes": skinny_shapes.lone_group_bytes([kind])
            for kind in BLOCK_TYPES
        },
        **{
            f"(grid_bytes<type_bit({kind.name}::type), {room}>)": skinny_shapes.grid_bytes([kind], room)
            for kind in skinny_shapes.GRID_ENTRIES
            for room in (8 << 10, 16 << 10, 32 << 10)
        },
        "block_types": sum(1 << int(quant_type) for quant_type in BLOCK_TYPES),
        **{f"int({each.name.lower()})": int(each) for each in QuantType},
        **{f"{each.name}::type": int(each) for each in INTEGER_TYPES},
        **{f"{each.name}::bytes": each.block_bytes for each in INTEGER_TYPES},
        **{f"{each.name}::elements": each.block_elements for each in INTEGER_TYPES},
        **{f"{each.name}::has_mins": int(each in MINIMUM_TYPES) for each in INTEGER_TYPES},
    },
    "linear/parts.cu": {
        "part_unit_rows": skinny_shapes.PART_UNIT_ROWS,
        "part_groups * group_elements": skinny_shapes.PART_COLS,
        "part_row_bytes": skinny_shapes.PART_ROW_BYTES,
        "slice_rows": skinny_layouts.SLICE_ROWS,
        **{
            f"part_blocks({slices // sets}, {sets})": skinny_layouts.tile_blocks(
                slices, skinny_layouts.Walk.PARTS
            )
            for slices, sets in skinny_layouts.SETS[Walk.PARTS].items()
        },
    },
    "quantize/quantize.cu": {"block_elements": BLOCK_SIZE},
    "rms_norm/rms_norm.cu": {"group_elements": GROUP_SIZE},
    "fused/fused.cu": {
        "num_columns": NUM_COLUMNS,
        "sizeof(RowSettings) / 4": sample.SETTINGS_WORDS,
    },
    "router/router.cu": {
        "most_chosen": shapes.MAX_RANKS,
        "block_threads": router.THREADS,
        "choose_threads": router.CHOOSE_THREADS,
        "row_padding": router.ROW_PADDING,
        "column_multiple": router.COLUMN_MULTIPLE,
        "double(sum_epsilon)": float(np.float32(SUM_EPSILON)),
        **{f"int({enumerator})": NUMBERS_OF[gating] for gating, enumerator in ENUMERATORS.items()},
        "max_normed_tokens": router.MAX_TOKENS,
        "sizeof(uint64_t) * scratch_numbers<8>": router._scratch_bytes(1, 8),
    },
    "sample/sample.cu": {
        "sizeof(SamplerRow)": sample.ROW_BYTES,
        "sizeof(RowSettings) / 4": sample.SETTINGS_WORDS,
        "block_threads": sample.THREADS,
        "block_items": sample.BLOCK_TOKENS,
        "int64_t(block_items) * block_items": sample.MAX_VOCAB,
    },
}


def fields_of(layout: Layout) -> list[tuple[str, int, int]]:
    """Name, offset and bytes of each."""
    if isinstance(layout, np.dtype):
        assert layout.fields is not None
        return [(name, offset, dtype.itemsize) for name, (dtype, offset, *_) in layout.fields.items()]
    names = [name for name, *_ in layout._fields_]
    return [(name, getattr(layout, name).offset, getattr(layout, name).size) for name in names]


def size_of(layout: Layout) -> int:
    return layout.itemsize if isinstance(layout, np.dtype) else ctypes.sizeof(layout)


def assertions(structures: Mapping[str, Layout], numbers: Mapping[str, float]) -> list[str]:
    lines = []
    for name, layout in structures.items():
        lines.append(f'static_assert(sizeof({name}) == {size_of(layout)}, "the size of {name}");')
        for field, offset, num_bytes in fields_of(layout):
            lines.append(
                # What `offsetof` is to this compiler.
                f"static_assert(__INTADDR__(&(({name}*)0)->{field}) == {offset} && "
                f'sizeof({name}::{field}) == {num_bytes}, "{field} of {name}");'
            )
    return [
        *lines,
        *(f'static_assert({text} == {value}, "{text} is {value}");' for text, value in numbers.items()),
    ]


def compile_with(file: str, lines: Sequence[str], directory: Path) -> None:
    """CompileError with the assertions that do not hold."""
    opened = ("using namespace coldstream;", "using namespace coldstream::gemm;")
    namespaces = opened if "gemm" in file and "float" not in file else opened[:1]
    source = directory / "layouts.cu"
    source.write_text(
        "\n".join([f'#include "{file}"', *namespaces, *lines, "template <int> __global__ void none() {}"])
    )
    compile_uncached(source, ("none<0>",), "compute_90")


@pytest.mark.parametrize("file", sorted({source for source, _ in (*declared_structs(), *OTHERS)}))
def test_structs(file: str, tmp_path: Path) -> None:
    """CUDA's compiler lays them out as they were read."""
    lines = []
    for layouts in (declared_structs(), OTHERS):
        of_file = {name: layout for (source, name), layout in layouts.items() if source == file}
        lines += assertions(of_file, {})
    compile_with(file, lines, tmp_path)


@pytest.mark.parametrize("file", sorted(NUMBERS))
def test_numbers(file: str, tmp_path: Path) -> None:
    compile_with(file, assertions({}, NUMBERS[file]), tmp_path)


def test_every_structure_is_declared_in_a_source() -> None:
    known = set(declared_structs().values())
    made = {each for each in ctypes.Structure.__subclasses__() if each.__module__.startswith("coldstream.")}
    assert made
    assert made <= known


def swapped(layout: type[ctypes.Structure]) -> type[ctypes.Structure]:
    """With the first two fields in the other order."""
    first, second, *others = layout._fields_
    return type(layout.__name__, (ctypes.Structure,), {"_fields_": [second, first, *others]})


@pytest.mark.parametrize(
    ("name", "layout"), [("Mailbox", partition.MailboxFields), ("Stack", partition.Stack)]
)
def test_fields_in_another_order_are_refused(
    name: str, layout: type[ctypes.Structure], tmp_path: Path
) -> None:
    with pytest.raises(CompileError, match=f"{layout._fields_[0][0]} of {name}"):
        compile_with("experts/partition.cu", assertions({name: swapped(layout)}, {}), tmp_path)


def test_another_number_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match="max_group is 65"):
        compile_with("experts/place_group.cu", assertions({}, {"max_group": 65}), tmp_path)
