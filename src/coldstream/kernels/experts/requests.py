"""The loop of a card that computes experts for another: it answers a mailbox as the CPU's server does.

`csrc/hybrid/expert_server.h` has the protocol. A loop is launched for each step of the other card, and ends
with it. For each layer that may ask there is one launch that waits, and behind it those of the experts:

    next_request_cuda   answers the layer before, waits, and fetches the rows of this one
    experts_gemv_cuda   writes its results to the mailbox, at their ranks
    …
    last_request_cuda   waits for the end of the step

Nothing is asked of most layers that have all their experts elsewhere. A launch that finds the request of a
later layer leaves it there, and the experts behind it compute nothing. So a step's last request, for the
layer behind its last one, always comes: the other card queues `end_requests_cuda` for it.
"""

import ctypes
from dataclasses import dataclass
from pathlib import Path

from coldstream.errors import GenerationFault
from coldstream.kernels.cuda.activations import Activations
from coldstream.kernels.cuda.array import DeviceArray, HostArray, check_array
from coldstream.kernels.cuda.program import CudaProgram
from coldstream.kernels.cuda.structs import declared_in
from coldstream.kernels.experts.mailbox import ROWS_SHIFT, Mailbox
from coldstream.kernels.experts.partition import mailbox_of

PROGRAM = CudaProgram(
    Path(__file__).with_name("requests.cu"), ("next_request", "last_request", "end_requests")
)
THREADS = 1024
FAILURES = {
    1: "it got no request within ten minutes",
    2: "requests came in another order than that of the layers",
}


@declared_in("experts/requests.cu", "Server")
class ServerFields(ctypes.Structure): ...


@declared_in("experts/requests.cu", "RequestedRows")
class _RequestedRows(ctypes.Structure): ...


@dataclass(frozen=True)
class Server:
    """The card that computes, and the mailbox that it answers.

    state: int32 [2] in its memory, 0 before the first step: whether it owes an answer, and whether it has
    given up. failure: int32 [1] in page-locked memory.
    """

    box: Mailbox
    state: DeviceArray
    failure: HostArray

    def as_c(self) -> ServerFields:
        return ServerFields(
            is_computing=self.state.data_ptr(),
            is_late=self.state[1:].data_ptr(),
            failure=self.failure.data_ptr(),
        )

    def check(self) -> None:
        """Raises GenerationFault if an answer of the card was undefined."""
        if (failure := int(self.failure.numpy()[0])) != 0:
            raise GenerationFault(
                f"a further card computed no experts, as {FAILURES[failure]}, and what followed is lost: "
                "load the model again"
            )


@dataclass(frozen=True)
class RequestedRows:
    """A request in memory of the card that computes: its inputs, and int32 ids [T, K], `num_experts` for
    pairs that are computed elsewhere."""

    x: Activations
    ids: DeviceArray
    num_experts: int

    def as_c(self) -> _RequestedRows:
        rows, cols = self.x.shape
        quantised = self.x.quantised
        return _RequestedRows(
            x=self.x.values.data_ptr(),
            q=quantised.q.data_ptr(),
            scales=quantised.scales.data_ptr(),
            sums=quantised.sums.data_ptr(),
            ids=self.ids.data_ptr(),
            count=rows,
            num_ranks=self.ids.shape[1],
            cols=cols,
            padded=quantised.q.shape[1],
            num_experts=self.num_experts,
        )


def next_request_cuda(server: Server, layer: int, rows: RequestedRows) -> None:
    """Answers the request before, and waits for that of `layer` with as many rows as `rows` has.

    Behind it the rows are there that any pair is asked of. ValueError for rows that the mailbox has not.
    """
    check_array("ids", rows.ids, "int32")
    count, ranks = rows.ids.shape
    if count != rows.x.shape[0] or tuple(server.box.ids.shape[1:]) != (ranks,) or count > len(server.box.ids):
        raise ValueError(
            f"{count} rows of {ranks} ranks do not fit the mailbox {tuple(server.box.ids.shape)}"
        )
    if rows.x.shape[1] != server.box.x.shape[1] or rows.x.shape[1] % 8:
        raise ValueError(f"rows of {rows.x.shape[1]} values, {server.box.x.shape[1]} in the mailbox")
    args = (mailbox_of(server.box), server.as_c(), request_of(layer, count), rows.as_c())
    PROGRAM.kernel("next_request").launch((1, 1, 1), THREADS, args)


def last_request_cuda(server: Server, num_layers: int) -> None:
    """Answers the last request of a step, and waits for the end of the step."""
    args = (mailbox_of(server.box), server.as_c(), request_of(num_layers, 1))
    PROGRAM.kernel("last_request").launch((1, 1, 1), 32, args)


def end_requests_cuda(box: Mailbox, num_layers: int) -> None:
    """On the card that asks, behind all layers of a step: says that no more requests come."""
    PROGRAM.kernel("end_requests").launch((1, 1, 1), 32, (mailbox_of(box), request_of(num_layers, 1)))


def request_of(layer: int, rows: int) -> int:
    """The word of a request."""
    return (layer + 1) | rows << ROWS_SHIFT
