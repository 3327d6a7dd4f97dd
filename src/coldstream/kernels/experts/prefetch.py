"""What guesses at a later layer's experts are for: they are copied from the host's memory to places on the
device, or the CPU reads them into its caches. A launch each.
"""

import ctypes
from collections.abc import Sequence
from pathlib import Path

from coldstream.kernels.cuda.array import DeviceArray
from coldstream.kernels.cuda.program import CudaProgram
from coldstream.kernels.cuda.structs import declared_in
from coldstream.kernels.experts.mailbox import Mailbox
from coldstream.kernels.experts.partition import Prefetched, Stack, stack_of
from coldstream.kernels.experts.shapes import MATRICES
from coldstream.kernels.experts.split import BY_FETCHES, BY_SHARED_FETCHES
from coldstream.kernels.experts.table import ExpertTable

PROGRAM = CudaProgram(Path(__file__).with_name("prefetch.cu"), ("prefetch_experts", "expect_experts"))
THREADS = 32
TALLIES = ("fetched", "used", "given_up")  # experts of a layer
BLOCKS = 32  # enough to saturate the bus, and few, as other kernels run beside them


@declared_in("experts/prefetch.cu")
class Target(ctypes.Structure):
    """arrays: what `target_of` took the addresses of, and keeps as long as they are here."""

    arrays: tuple[object, ...] = ()


def target_of(
    guesses: DeviceArray,
    layer: int,
    stacks: Sequence[ExpertTable],
    places: Prefetched,
    reached: DeviceArray,
    arrivals: DeviceArray,
    tallies: DeviceArray,
    times: DeviceArray,
) -> Target:
    """Guesses at the experts of `layer`, for the launches below.

    guesses: int32 [T, K], the likeliest of each token first; stacks: gate, up and down of the layer, which
    the device reads over the bus; reached: int32 [1], number of the step's layers that have been shared out;
    arrivals: int32 [places], 0 before and after; tallies: int32 [layers, TALLIES]; times: int32 [NUM_WORDS],
    see `sharing_of`, which say how many experts are copied.
    """
    fetches = BY_FETCHES if len(guesses) == 1 else BY_SHARED_FETCHES
    target = Target(
        guesses=guesses.data_ptr(),
        num_guesses=guesses.numel(),
        num_ranks=guesses.shape[1],
        num_experts=len(stacks[0].addresses),
        layer=layer,
        matrix=(Stack * MATRICES)(*map(stack_of, stacks)),
        bytes=(ctypes.c_int64 * MATRICES)(*(stack.matrix_bytes for stack in stacks)),
        places=places,
        fetched=times[fetches].data_ptr(),
        reached=reached.data_ptr(),
        arrivals=arrivals.data_ptr(),
        tallies=tallies.data_ptr(),
    )
    target.arrays = (guesses, *stacks, reached, arrivals, tallies, times)
    return target


def prefetch_experts_cuda(target: Target) -> None:
    """Copies experts without a slot to the target's places, first those named most often in its guesses.

    Writes keys and bytes of places, and adds to the layer's tallies. The stream must have no other work at
    the same time.
    """
    PROGRAM.kernel("prefetch_experts").launch((BLOCKS, 1, 1), THREADS, (target,))


def expect_experts_cuda(target: Target, times: DeviceArray, mailbox: Mailbox) -> None:
    """Tells the CPU which experts of the target's layer it will probably compute for several tokens.

    times: see `target_of`. Writes `mailbox.ahead`, unless the layer has been shared out.
    """
    arguments = (target, times, mailbox.ahead)
    PROGRAM.kernel("expect_experts").launch((1, 1, 1), THREADS, arguments)
