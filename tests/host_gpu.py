"""A GPU on the host: queued work runs at once, so that whole models run, with their kernels' bits.

Streams and events order nothing here; `device_model.py` is for that. Kernels are those of
`host_device.py`, and memory is the host's.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest

from coldstream.engine import opened_model
from coldstream.kernels import _csrc
from coldstream.kernels.cuda import device as cuda_device
from coldstream.kernels.cuda.driver import MIN_CUDA, Driver, DriverDevice
from coldstream.models.cuda import dflash as cuda_dflash
from coldstream.models.cuda import kept_counts
from coldstream.models.cuda import runner as cuda_runner
from coldstream.models.cuda.memory_plan import NeededKernels
from coldstream.placement.hardware import GpuHardware, Hardware
from coldstream.planning import gather
from host_device import HostDevice
from host_driver import CAPABILITY, TOTAL_BYTES, HostStream

_GPU = GpuHardware("a GPU", "0", TOTAL_BYTES, TOTAL_BYTES)
MACHINE = Hardware("a CPU", ("avx2",), 4, 4, 2**35, 2**33, read_bytes_per_s=1e10, gpu=_GPU)


# The product's own, also where one of these devices is inside another.
SERVERS = {name: getattr(_csrc, name) for name in ("ExpertServer", "NgramServer")}


class Servers:
    """Servers of a kind that look for requests only when there is one.

    The product's look for them as long as a step takes. That is a hundred times longer here, and would take a
    core from the device and from other tests.
    """

    def __init__(self, kind: Any) -> None:
        self._kind = kind
        self._all: weakref.WeakSet[ServerOnDemand] = weakref.WeakSet()

    def make(self, *arguments: Any, **options: Any) -> "ServerOnDemand":
        server = ServerOnDemand(self._kind(*arguments, **options), *arguments[1:3])
        self._all.add(server)
        return server

    def look(self) -> None:
        for server in list(self._all):
            server.look()


class ServerOnDemand:
    """Whatever it lacks is the server's."""

    def __init__(self, server: Any, request: Any, done: Any) -> None:
        self._server = server
        self._request, self._done = request, done
        self._is_looking = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._server, name)

    def begin(self) -> None:
        """Nothing has been asked yet."""

    def look(self) -> None:
        if self._request[0]:
            self._server.begin()
            self._is_looking = True
        elif self._is_looking and self._done[0]:
            self._server.end()
            self._is_looking = False

    def end(self) -> None:
        self.look()


@contextmanager
def gpu_on(device: HostDevice) -> Iterator[HostStream]:
    """Inside, `CudaRunner` finds a GPU: the host, with the kernels of `device`, and this stream."""
    servers = [(name, Servers(kind)) for name, kind in SERVERS.items()]

    def look() -> None:
        for _, of_kind in servers:
            of_kind.look()

    found = Driver(MIN_CUDA, 0, (DriverDevice("the host", CAPABILITY, TOTAL_BYTES),))

    with device.installed(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_device, "find_driver", lambda: found)
        # Threads of the host compute what kernels wait for.
        patch.setattr(device, "keeps_time", True)
        for name, of_kind in servers:
            patch.setattr(_csrc, name, of_kind.make)
        patch.setattr(device, "before_launch", look)
        # Counts of another test's model may not be kept for this one's.
        patch.setattr(kept_counts, "directory_of", lambda kept: None)
        # Kernels are compiled when they are first launched.
        patch.setattr(cuda_runner, "kernels_of", lambda *_: NeededKernels((set(),)))
        patch.setattr(cuda_dflash, "kernels_of", lambda *_: set())
        yield device.driver.current


@contextmanager
def opened_on(device: HostDevice) -> Iterator[HostStream]:
    """`gpu_on`, and `open_model` finds MACHINE, of which it measures nothing."""
    with gpu_on(device) as stream, pytest.MonkeyPatch.context() as patch:
        patch.setattr(opened_model, "hardware_of", lambda gpu: MACHINE)
        patch.setattr(opened_model, "with_rates", lambda *_, **__: MACHINE)
        patch.setattr(opened_model, "why_unusable", lambda _: ())
        patch.setattr(opened_model, "compiling_for_rates", lambda _: nullcontext())
        patch.setattr(gather, "measured_hardware", lambda *_, **__: MACHINE)
        yield stream
