"""The kernels for a few rows compile for every supported architecture, and keep their state in registers."""

import ctypes
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from bench.kernels.machine_code import stack_bytes
from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.cuda.compiler import KERNELS, compile_instance
from coldstream.kernels.cuda.skinny_shapes import (
    GROUP_TYPES,
    PASS_COLS,
    SKINNY_TYPES,
    MatrixShape,
    instance_for,
    matrix_shape,
    part_shape,
    tile_shape,
)
from coldstream.kernels.linear.cuda import INSTANCES as LINEAR_INSTANCES
from coldstream.kernels.linear.cuda import LinearMatrix, share_blocks
from coldstream.kernels.linear.integer_types import INTEGER_TYPES
from coldstream.kernels.linear.skinny_layouts import Walk

MAX_STACK_BYTES = 56  # a few registers set aside; an array in local memory is more
ARCHS = ("sm_80", "sm_90", "sm_120")
SKINNY_KERNELS = (
    ("linear/skinny.cu", "linear_one"),
    ("linear/skinny.cu", "linear_rows"),
    *(("linear/skinny.cu", "linear_skinny", *numbers) for numbers in LINEAR_INSTANCES[Walk.TILES]),
    ("experts/gemv.cu", "expert_gate_up"),
    ("experts/gemv.cu", "expert_down"),
)
PARTS_KERNELS = tuple(
    ("linear/parts.cu", "linear_parts", *numbers) for numbers in LINEAR_INSTANCES[Walk.PARTS]
)
FLOAT_KERNELS = (("linear/skinny.cu", "linear_floats"),)
WIDE_KERNELS = (("linear/skinny.cu", "linear_wide"),)
GROUPED_KERNELS = (("experts/grouped.cu", "grouped_gate_up"), ("experts/grouped.cu", "grouped_down"))
EACH_TYPE = tuple({kind} for kind in sorted(SKINNY_TYPES))
EACH_INTEGER_TYPE = tuple({kind} for kind in sorted(INTEGER_TYPES))
# For each kernel every type that it can read alone, and then some together, as models have.
TYPES = {
    SKINNY_KERNELS: (
        *EACH_TYPE,
        {QuantType.Q4_K, QuantType.Q5_K, QuantType.Q6_K, QuantType.Q8_0},
        {QuantType.Q6_K, QuantType.F32},
        {QuantType.IQ3_S, QuantType.IQ4_XS},
    ),
    FLOAT_KERNELS: (*({kind} for kind in sorted(PASS_COLS)), {QuantType.F32, QuantType.BF16}),
    WIDE_KERNELS: (*({kind} for kind in sorted(GROUP_TYPES)), {QuantType.Q5_K, QuantType.Q6_K}),
    PARTS_KERNELS: (*EACH_TYPE, {QuantType.Q8_0, QuantType.Q5_K}, {QuantType.Q2_K, QuantType.MXFP4}),
    GROUPED_KERNELS: (
        *EACH_INTEGER_TYPE,
        {QuantType.Q5_K, QuantType.Q6_K},
        {QuantType.Q4_K, QuantType.Q8_0},
        {QuantType.Q2_K, QuantType.Q3_K},
    ),
}


def _cases() -> Iterator[tuple[str, str, str]]:
    """Source, instance and architecture: each kernel for each set of types, for one of the architectures."""
    yield from (
        ("quantize/quantize.cu", f"coldstream::quantize<{size}>", arch)
        for size in (256, 32)
        for arch in ARCHS
    )
    for kernels, sets in TYPES.items():
        for (k, (source, name, *numbers)), (s, types) in product(enumerate(kernels), enumerate(sets)):
            instance = instance_for(f"coldstream::{name}", types, *numbers)
            yield source, instance, ARCHS[(k + s) % len(ARCHS)]


@pytest.mark.sharded(36)
@pytest.mark.parametrize(("source", "instance", "arch"), [*_cases()])
def test_kernels_compile_and_stay_in_registers(source: str, instance: str, arch: str, tmp_path: Path) -> None:
    code = compile_instance(KERNELS / source, instance, arch, tmp_path)
    assert stack_bytes(code) <= MAX_STACK_BYTES


def test_structures_have_the_sizes_that_device_code_sees() -> None:
    assert ctypes.sizeof(MatrixShape) == 9 * 4
    assert ctypes.sizeof(LinearMatrix) == 2 * 8 + 3 * 4 + 9 * 4


@pytest.mark.parametrize("quant_type", sorted(SKINNY_TYPES), ids=lambda t: t.name)
def test_a_unit_fits_its_slot_wherever_it_begins(quant_type: QuantType) -> None:
    step = 1 if quant_type not in INTEGER_TYPES else quant_type.block_elements
    for cols in range(step, 8192, 7 * step):
        walks = [matrix_shape(quant_type, 100, cols)]
        if quant_type in INTEGER_TYPES:
            walks += [walk(quant_type, 100, cols) for walk in (tile_shape, part_shape)]
        for shape in walks:
            is_whole = shape.num_passes == 1
            last = (shape.unit_rows - 1) * shape.stage_stride
            assert last + (shape.row_bytes if is_whole else shape.pass_bytes) + 14 <= shape.stage_bytes
            assert (
                (shape.num_passes - 1) * shape.pass_bytes
                < shape.row_bytes
                <= shape.num_passes * shape.pass_bytes
            )


def test_every_matrix_gets_blocks_and_none_more_than_its_units() -> None:
    sizes = [(QuantType.Q4_K, 8192), (QuantType.Q4_K, 4096), (QuantType.F32, 32), (QuantType.F32, 3)]
    shapes = [matrix_shape(quant_type, rows, 2048) for quant_type, rows in sizes]
    for max_blocks in (1, 100, 132, 264, 100000):
        blocks = share_blocks(shapes, max_blocks)
        assert all(1 <= count <= shape.num_units for count, shape in zip(blocks, shapes, strict=True))
        assert sum(blocks) <= max(max_blocks, len(shapes)) + len(shapes)
