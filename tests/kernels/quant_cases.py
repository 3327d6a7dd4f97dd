"""Shared by tests of the C++ quantised products."""

import ctypes
import mmap
from collections.abc import Sequence

import numpy as np
import torch
from cpu_cases import Output

from coldstream.kernels import _csrc
from coldstream.kernels.quant_tensor import QuantTensor

VECTOR_TIERS = tuple(tier for tier in _csrc.supported_tiers() if tier != "generic")


def load(tensor: QuantTensor) -> _csrc.Weight:
    """A matrix, or a stack of them, for the extension; shares memory."""
    *leading, rows, cols = tensor.shape
    data = tensor.blocks.reshape(-1)
    return _csrc.Weight.from_array(data, int(tensor.quant_type), rows, cols, *leading)


def linear(runtime: _csrc.Runtime, x: torch.Tensor, weights: Sequence[_csrc.Weight]) -> list[torch.Tensor]:
    """The finite products of x [T, K] with each weight, which must write their outputs and nothing else."""
    outs = [Output(x.shape[0], weight.num_rows) for weight in weights]
    _csrc.linear(runtime, x, list(weights), [out.rows for out in outs])
    return [out.checked() for out in outs]


def linear_any(runtime: _csrc.Runtime, x: torch.Tensor, weight: _csrc.Weight) -> torch.Tensor:
    """x [T, K] times one weight, where any result may be NaN."""
    out = torch.full((x.shape[0], weight.num_rows), 1234.5)
    _csrc.linear(runtime, x, [weight], [out])
    return out


def same_numbers(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal float32 bits, where any NaN equals any other."""
    nan = expected.isnan()
    bits = torch.equal(actual[~nan].view(torch.int32), expected[~nan].view(torch.int32))
    return actual.shape == expected.shape and torch.equal(actual.isnan(), nan) and bits


def before_a_hole(values: torch.Tensor) -> torch.Tensor:
    """A copy whose last byte is the last of a page, and the next page cannot be read. Never unmapped."""
    num_bytes = values.numel() * values.element_size()
    pages = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    begin = libc.mmap(None, pages + mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    assert begin not in (None, ctypes.c_void_p(-1).value)
    assert libc.mprotect(begin + pages, mmap.PAGESIZE, 0) == 0
    raw = (ctypes.c_uint8 * num_bytes).from_address(begin + pages - num_bytes)
    copy = torch.from_numpy(np.ctypeslib.as_array(raw)).view(values.dtype).reshape(values.shape)
    return copy.copy_(values)
