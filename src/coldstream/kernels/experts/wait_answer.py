"""Waits on the device for the CPU's experts before a kernel whose blocks need them: one launch.

If every block of that kernel polled the host's memory, this would take bus bandwidth from the copies of
experts (docs/notes/streaming.md).
"""

import ctypes
from pathlib import Path

from coldstream.kernels.cuda.array import DeviceArray
from coldstream.kernels.cuda.program import CudaProgram
from coldstream.kernels.cuda.structs import declared_in

PROGRAM = CudaProgram(Path(__file__).with_name("wait_answer.cu"), ("wait_answer",))


@declared_in("cuda/answer.cuh")
class Answer(ctypes.Structure): ...


def wait_answer_cuda(done: DeviceArray) -> None:
    """Has what is queued next wait until the CPU has answered or a time-out, see `Mailbox.done`."""
    answer = Answer(done=done.data_ptr(), late=done[1:].data_ptr())
    PROGRAM.kernel("wait_answer").launch((1, 1, 1), 32, (answer,))
