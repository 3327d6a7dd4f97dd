"""A GPU on the host: queued work runs at once, so that whole models run, with their kernels' bits.

Streams and events order nothing here; `device_model.py` is for that. Kernels are those of
`host_device.py`, and memory is the host's.
"""

import ctypes
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from coldstream.kernels import _csrc
from coldstream.kernels.cuda.array import RawArray
from coldstream.models.cuda import dflash as cuda_dflash
from coldstream.models.cuda import runner as cuda_runner
from host_device import HostDevice
from host_driver import TOTAL_BYTES, HostStream

ALIGNMENT = 256


class Servers:
    """Servers of experts that look for requests only when there is one.

    The product's look for them as long as a step takes. That is a hundred times longer here, and would take a
    core from the device and from other tests.
    """

    def __init__(self) -> None:
        self._all: weakref.WeakSet[ServerOnDemand] = weakref.WeakSet()

    def make(self, *arguments: Any, **options: Any) -> "ServerOnDemand":
        server = ServerOnDemand(*arguments, **options)
        self._all.add(server)
        return server

    def look(self) -> None:
        for server in list(self._all):
            server.look()


class ServerOnDemand:
    """Whatever it lacks is the server's."""

    _make = _csrc.ExpertServer

    def __init__(self, runtime: _csrc.Runtime, request: Any, done: Any, *memory: Any, **options: Any) -> None:
        self._server = self._make(runtime, request, done, *memory, **options)
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
    servers = Servers()
    properties = SimpleNamespace(name="the host", major=8, minor=0, multi_processor_count=3)

    with device.installed(), pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "empty_cache": lambda: None,
            "is_available": lambda: True,
            "mem_get_info": lambda: (TOTAL_BYTES, TOTAL_BYTES),
            "get_device_properties": lambda: properties,
        }.items():
            patch.setattr(torch.cuda, name, value)
        for name in ("empty", "zeros"):
            patch.setattr(torch, name, _on_host(getattr(torch, name)))
        patch.setattr(torch, "as_tensor", _at_address(torch.as_tensor))
        patch.setattr(torch.Tensor, "cuda", lambda tensor: tensor)
        # Threads of the host compute what kernels wait for.
        patch.setattr(device, "keeps_time", True)
        patch.setattr(_csrc, "ExpertServer", servers.make)
        patch.setattr(device, "before_launch", servers.look)
        # Kernels are compiled when they are first launched.
        for each in (cuda_runner, cuda_dflash):
            patch.setattr(each, "kernels_of", lambda *_: frozenset())
            patch.setattr(each, "loading_kernels", lambda *_: nullcontext())
        yield device.driver.current


def _on_host(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def made(*size: Any, pin_memory: bool = False, device: Any = None, **options: Any) -> torch.Tensor:
        if device != "cuda":
            return make(*size, device=device, **options)
        if options.get("dtype") != torch.uint8:
            return make(*size, **options)
        (num_bytes,) = size
        data = make(num_bytes + ALIGNMENT, **options)
        begin = -data.data_ptr() % ALIGNMENT
        return data[begin : begin + num_bytes]

    return made


def _at_address(as_tensor: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Tensors over memory at an address, the host's here."""

    def made(data: Any, **options: Any) -> torch.Tensor:
        if not isinstance(data, RawArray):
            return as_tensor(data, **options)
        dtype = getattr(torch, data.dtype)
        num_bytes = data.numel() * dtype.itemsize
        memory_of = (ctypes.c_uint8 * max(1, num_bytes)).from_address(data.address)
        values = torch.frombuffer(memory_of, dtype=torch.uint8)
        return values[:num_bytes].view(dtype).view(data.shape)

    return made
