"""Copies guessed experts from the host's memory to places on the device: one launch."""

import ctypes
from collections.abc import Sequence
from pathlib import Path

from coldstream.kernels.cuda.array import DeviceArray
from coldstream.kernels.cuda.program import CudaProgram
from coldstream.kernels.cuda.structs import declared_in
from coldstream.kernels.experts.partition import Prefetched, Stack, stack_of
from coldstream.kernels.experts.shapes import MATRICES
from coldstream.kernels.experts.table import ExpertTable

PROGRAM = CudaProgram(Path(__file__).with_name("prefetch.cu"), ("prefetch_experts",))
THREADS = 32
TALLIES = ("fetched", "used", "given_up")  # experts of a layer
BLOCKS = 32  # enough to saturate the bus, and few, as other kernels run beside them


@declared_in("experts/prefetch.cu")
class _Target(ctypes.Structure): ...


def prefetch_experts_cuda(
    guesses: DeviceArray,
    layer: int,
    stacks: Sequence[ExpertTable],
    places: Prefetched,
    reached: DeviceArray,
    arrivals: DeviceArray,
    tallies: DeviceArray,
    times: DeviceArray,
) -> None:
    """Copies experts of `layer` without a slot to `places`, first those named most often in guesses.

    guesses: int32 [T, K]; stacks: gate, up and down of the layer, which the device reads over the bus;
    reached: int32 [1], number of the step's layers that have been shared out; arrivals: int32 [places], 0
    before and after; tallies: int32 [layers, TALLIES]; times: int32 [NUM_WORDS], see `sharing_of`, which say
    how many experts of a single token are copied. Writes keys and bytes of places, and adds to the
    layer's tallies. The stream must have no other work at the same time.
    """
    target = _Target(
        guesses=guesses.data_ptr(),
        num_guesses=guesses.numel(),
        num_experts=len(stacks[0].addresses),
        layer=layer,
        matrix=(Stack * MATRICES)(*map(stack_of, stacks)),
        bytes=(ctypes.c_int64 * MATRICES)(*(stack.matrix_bytes for stack in stacks)),
        places=places,
        times=times.data_ptr() if len(guesses) == 1 else None,
        reached=reached.data_ptr(),
        arrivals=arrivals.data_ptr(),
        tallies=tallies.data_ptr(),
    )
    PROGRAM.kernel("prefetch_experts").launch((BLOCKS, 1, 1), THREADS, (target,))
