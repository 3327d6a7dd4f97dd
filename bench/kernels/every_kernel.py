"""Every kernel that the product compiles for an architecture, and the shared memory that it is launched with.

Kernels of several types of weights in one launch are many: some mixtures stand for them, as do some sizes of
heads for those of attention.
"""

import importlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path

from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.attention.arguments import AttentionShape
from coldstream.kernels.attention.cache_types import CACHE_TYPES
from coldstream.kernels.attention.cuda import IntegerKernels
from coldstream.kernels.cuda.compiler import KERNELS
from coldstream.kernels.cuda.features import features_for
from coldstream.kernels.cuda.gemm_tiles import Tiling, least_tilings
from coldstream.kernels.cuda.limits import DeviceLimits
from coldstream.kernels.cuda.program import CudaProgram
from coldstream.kernels.cuda.skinny_shapes import instance_for
from coldstream.kernels.draft_block import HEAD_SIZES
from coldstream.kernels.draft_block import cuda as draft_block
from coldstream.kernels.experts import cuda as experts_gemv
from coldstream.kernels.experts import cuda_gemm as experts_gemm
from coldstream.kernels.experts import cuda_grouped as experts_grouped
from coldstream.kernels.linear import cuda as linear_skinny
from coldstream.kernels.linear import cuda_gemm as linear_gemm
from coldstream.kernels.linear.skinny_layouts import Walk
from coldstream.kernels.ops import GATED_UNITS
from coldstream.kernels.persistent import cuda as persistent

KIB = 1024
# By architecture: multiprocessors of a common card, KiB of shared memory for a block and for all, and what
# the system takes of it for each.
DEVICES = {
    arch: DeviceLimits(
        processors,
        block_kib * KIB,
        all_kib * KIB,
        has_warpgroups=features_for(arch).has_warpgroups,
        reserved_per_block=reserved_kib * KIB,
    )
    for arch, processors, block_kib, all_kib, reserved_kib in (
        ("sm_75", 68, 64, 64, 0),
        ("sm_80", 108, 163, 164, 1),
        ("sm_86", 82, 99, 100, 1),
        ("sm_89", 128, 99, 100, 1),
        ("sm_90a", 132, 227, 228, 1),
        ("sm_120", 170, 99, 100, 1),
    )
}
HEADS = (
    (512, "i16"),
    (512, "i4"),
    (256, "i16"),
    (256, "i8"),
    (128, "i16"),
    (128, "i4"),
    (96, "i3"),
    (64, "i8"),
)
CHOSEN_HEADS = ((256, CACHE_TYPES["i16"]), (128, CACHE_TYPES["i8"]))  # of rows that an indexer chooses for
MIXED_TYPES = (
    frozenset({QuantType.Q4_K, QuantType.Q6_K}),
    frozenset({QuantType.Q8_0, QuantType.Q5_K}),
    frozenset({QuantType.IQ3_S, QuantType.IQ4_XS}),
)
MIXED_KERNELS = (
    (linear_skinny.PROGRAM, linear_skinny.ONE, ()),
    (linear_skinny.PROGRAM, linear_skinny.ROWS, ()),
    *((linear_skinny.PROGRAM, linear_skinny.SKINNY, n) for n in linear_skinny.INSTANCES[Walk.TILES]),
    *((linear_skinny.PARTS_PROGRAM, linear_skinny.PARTS, n) for n in linear_skinny.INSTANCES[Walk.PARTS]),
    *((experts_gemv.PROGRAM, name, ()) for name in (experts_gemv.GATE_UP, experts_gemv.DOWN)),
    *((experts_grouped.PROGRAM, name, ()) for name in (experts_grouped.GATE_UP, experts_grouped.DOWN)),
)
# With other gated units than SwiGLU, whose instances have no number.
GATED_KERNELS = tuple(
    (*kernel, (unit,))
    for kernel in (
        (experts_gemv.PROGRAM, experts_gemv.GATE_UP),
        (experts_grouped.PROGRAM, experts_grouped.GATE_UP),
    )
    for unit in range(1, len(GATED_UNITS))
)
GATED_TYPES = (*MIXED_TYPES, frozenset({QuantType.MXFP4}), frozenset({QuantType.Q8_0}))


@dataclass(frozen=True)
class ListedKernel:
    """An instance of a source. dynamic_bytes: its shared memory at launch, where a kernel has one number."""

    source: Path
    instance: str
    dynamic_bytes: int = 0

    @property
    def name(self) -> str:
        """The file below the kernels' folder, and the instance."""
        return f"{self.source.relative_to(KERNELS)} {self.instance}"


def every_kernel(arch: str) -> list[ListedKernel]:
    """All for one of DEVICES, in the order of their names."""
    device = DEVICES[arch]
    found = [*_attention(device), *_tiles(device), *_drafts(device), *_mixed()]
    special = {linear_gemm.PROGRAM.source, experts_gemm.PROGRAM.source}
    if not features_for(arch).has_clusters:  # copies of whole pieces came with them
        special.add(persistent.PROGRAM.source)
    for program in _programs():
        if program.source not in special:
            those = (ListedKernel(program.source, instance) for instance in program.instances)
            found += (each for each in those if not each.instance.startswith("attend_draft"))
    return sorted({each.name: each for each in found}.values(), key=lambda each: each.name)


@cache
def _programs() -> tuple[CudaProgram, ...]:
    """Those that modules have for all models."""
    root = KERNELS.parents[1]
    modules = [path for path in sorted(KERNELS.rglob("*.py")) if "CudaProgram(" in path.read_text()]
    names = [".".join(path.relative_to(root).with_suffix("").parts) for path in modules]
    values = [value for name in names for value in vars(importlib.import_module(name)).values()]
    return tuple(dict.fromkeys(value for value in values if isinstance(value, CudaProgram)))


def _mixed() -> Iterator[ListedKernel]:
    for kernels, mixtures in ((MIXED_KERNELS, MIXED_TYPES), (GATED_KERNELS, GATED_TYPES)):
        for (program, name, numbers), types in product(kernels, mixtures):
            yield ListedKernel(program.source, instance_for(name, types, *numbers))


def _attention(device: DeviceLimits) -> Iterator[ListedKernel]:
    plain = [AttentionShape(16, 2, head_dim, CACHE_TYPES[cache_name]) for head_dim, cache_name in HEADS]
    chosen = [AttentionShape(24, 2, *heads, has_choice=True) for heads in CHOSEN_HEADS]
    for shape in (*plain, *chosen):
        kernels = IntegerKernels(shape, device)
        forms = {form.instance: form.shared_bytes for form in kernels.forms}
        for program in kernels.programs.values():
            for instance in program.instances:
                yield ListedKernel(program.source, instance, forms.get(instance, 0))


def _tiles(device: DeviceLimits) -> Iterator[ListedKernel]:
    """Those of GEMM that run on the device."""
    for tilings in linear_gemm.TILINGS.values():
        for tiling in _running((*tilings, *least_tilings(tilings[0].quant_type)), device):
            name = linear_gemm.instance(tiling)
            yield ListedKernel(linear_gemm.PROGRAM.source, name, tiling.shared_bytes)
    for tiling in _running(experts_gemm.ALL_TILINGS, device):
        for gated in (True, False):
            name = experts_gemm.instance(tiling, gated)
            yield ListedKernel(experts_gemm.PROGRAM.source, name, tiling.shared_bytes)


def _running(tilings: Iterable[Tiling], device: DeviceLimits) -> Iterator[Tiling]:
    for tiling in dict.fromkeys(tilings):
        can_run = device.has_warpgroups or not tiling.by_warpgroups
        if can_run and tiling.shared_bytes <= device.shared_per_block:
            yield tiling


def _drafts(device: DeviceLimits) -> Iterator[ListedKernel]:
    for size in HEAD_SIZES:
        warps = draft_block.attending_warps(size, device.shared_per_block)
        name = draft_block.ATTEND.format(size, warps)
        yield ListedKernel(draft_block.ATTENTION.source, name, draft_block.part_bytes(size, warps))
