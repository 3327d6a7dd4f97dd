"""Waiting on the device for the CPU's experts before a kernel of many blocks: one launch.

Every block of such a kernel would look at the host's memory until the answer is there, which takes bandwidth
from the experts on their way (docs/log.md).
"""

import ctypes
from pathlib import Path

from coldstream.kernels.cuda.program import CudaProgram
from coldstream.kernels.experts.mailbox import Mailbox

PROGRAM = CudaProgram(Path(__file__).with_name("wait_answer.cu"), ("wait_answer",))


class _Answer(ctypes.Structure):
    """As in cuda/answer.cuh."""

    _fields_ = (("done", ctypes.c_void_p), ("late", ctypes.c_void_p))


def wait_answer_cuda(mailbox: Mailbox) -> None:
    """What is queued next runs when the CPU has answered, or has been waited for in vain: see `check`."""
    done = mailbox.done
    answer = _Answer(done.data_ptr(), done[1:].data_ptr())
    PROGRAM.kernel("wait_answer").launch((1, 1, 1), 32, (answer,))
