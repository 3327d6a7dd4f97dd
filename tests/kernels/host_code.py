"""The GPU's scalar device code compiled for the host, so that its bits are compared without a GPU."""

import ctypes
import subprocess
from pathlib import Path

import torch
from guarded import Guarded

from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.dequantize.reference import FLOAT_DTYPES
from coldstream.kernels.quant_tensor import QuantTensor
from host_device import HOST, OPTIONS, generated_headers

CPU = torch.device("cpu")


class HostCode:
    """`host/scalar_code.cpp` with the unpackers of one type."""

    def __init__(self, quant_type: QuantType, directory: Path) -> None:
        """Compiled into `directory`; an earlier one of the type there is used again."""
        library = directory / f"{quant_type.name}.so"
        is_float = quant_type in FLOAT_DTYPES
        source = f"Floats<{quant_type.name.lower()}>" if is_float else quant_type.name
        if not library.exists():
            options = [generated_headers(directory), "-shared", f"-DSOURCE={source}"]
            command = ["c++", *OPTIONS, *options, HOST / "scalar_code.cpp", "-o", library]
            subprocess.run(command, check=True)
        self._library = ctypes.CDLL(str(library))

    def dequantize(self, weight: QuantTensor) -> torch.Tensor:
        """float32 values of a contiguous matrix."""
        out = Guarded(*weight.shape, device=CPU)
        count = out.tensor.numel() // weight.quant_type.block_elements
        self._library.dequantize_blocks(_address(weight.blocks), count, _address(out.tensor))
        return out.checked()

    def of_floats(self, function: str, *inputs: torch.Tensor, each: int = 1) -> torch.Tensor:
        """float32 results, one of every `each` elements of the contiguous inputs."""
        out = Guarded(inputs[0].numel() // each, device=CPU)
        arguments = (*map(_address, inputs), len(out.tensor), _address(out.tensor))
        getattr(self._library, function)(*arguments)
        return out.checked()


def _address(tensor: torch.Tensor) -> ctypes.c_void_p:
    assert tensor.is_contiguous()
    return ctypes.c_void_p(tensor.data_ptr())
