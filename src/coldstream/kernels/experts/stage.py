"""Copies the experts that a step of several rows reads over the bus to places on the device: one launch.

Kernels of several rows read weights in pieces of a few hundred bytes, for which the bus has a third of its
rate, and some of them read an expert more than once. Whole experts are copied nearly as fast as by the copy
engines, which cannot take addresses that the device has chosen (docs/notes/offloaded-experts.md).
"""

import ctypes
from collections.abc import Sequence
from pathlib import Path

from coldstream.kernels.cuda.program import CudaProgram
from coldstream.kernels.cuda.structs import declared_in
from coldstream.kernels.experts.partition import Stack, Staging, stack_of
from coldstream.kernels.experts.shapes import MATRICES
from coldstream.kernels.experts.table import ExpertTable

PROGRAM = CudaProgram(Path(__file__).with_name("stage.cu"), ("stage_experts",))
THREADS = 32
BLOCKS = 64


@declared_in("experts/stage.cu")
class _StagedLayer(ctypes.Structure): ...


def stage_experts_cuda(stacks: Sequence[ExpertTable], staging: Staging) -> None:
    """Copies the experts that `partition_experts_cuda` listed to their places.

    stacks: gate, up and down of the layer, which the device reads over the bus.
    """
    staged = _StagedLayer(
        matrix=(Stack * MATRICES)(*map(stack_of, stacks)),
        bytes=(ctypes.c_int64 * MATRICES)(*(stack.matrix_bytes for stack in stacks)),
        staging=staging.as_c(),
    )
    PROGRAM.kernel("stage_experts").launch((BLOCKS, 1, 1), THREADS, (staged,), overlap=True)
