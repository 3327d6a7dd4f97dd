"""Tensors of PyTorch, which tests compare with, from and to arrays of the device."""

from collections.abc import Callable

import numpy as np
import torch

from coldstream.kernels.cuda import contents
from coldstream.kernels.cuda.array import DeviceArray, HostArray, name_of


class SharedArray(contents.CudaArray, HostArray):
    """An array of a device whose memory is the host's."""


def tensor_of(array: DeviceArray) -> torch.Tensor:
    """A copy on the host of contiguous values, once what is queued has run."""
    if isinstance(array, torch.Tensor):
        return array.cpu()
    values = torch.from_numpy(contents.read(array))
    return values.view(torch.bfloat16) if name_of(array.dtype) == "bfloat16" else values


def view_of(array: DeviceArray) -> np.ndarray:
    """The memory of contiguous values itself, of a device whose memory is the host's."""
    return HostArray(array.data_ptr(), tuple(array.shape), name_of(array.dtype), array).numpy()


def fill(array: DeviceArray, values: torch.Tensor) -> None:
    """Writes values of the same shape and type."""
    contents.write(array, _on_host(values))


def array_of(values: torch.Tensor) -> contents.CudaArray:
    """A copy on the device."""
    array = contents.new(tuple(values.shape), name_of(values.dtype))
    fill(array, values)
    return array


def change(array: DeviceArray | np.ndarray, write: Callable[[np.ndarray], object]) -> None:
    """Has `write` change contiguous values: those of the host where they lie, those of a device in a copy."""
    if isinstance(array, np.ndarray):
        write(array)
        return
    values = contents.read(array)
    write(values)
    contents.write(array, values)


def _on_host(values: torch.Tensor) -> np.ndarray:
    values = values.detach().cpu().contiguous()
    return (values.view(torch.uint16) if values.dtype == torch.bfloat16 else values).numpy()
