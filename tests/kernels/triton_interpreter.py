"""Runs Triton kernels in tests: compiled where there is a GPU, otherwise in Triton's interpreter.

A test body is the same for both: it makes its tensors on `guarded.DEVICE` and calls the kernel's launcher.
tests/conftest.py asks for the interpreter before anything imports Triton, because a kernel is bound to it
where it is defined. The interpreter's own `fma` rounds twice; here it becomes that of docs/arithmetic.md,
so that results can be compared bit for bit.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from guarded import DEVICE
from triton.runtime import interpreter

from coldstream.kernels.arithmetic import reference as exact_arithmetic
from coldstream.kernels.arithmetic.reference import QuantActivations, quantize_activations
from coldstream.kernels.quant_tensor import QuantTensor


def exact_fma(_builder: Any, x: Any, y: Any, z: Any) -> Any:
    """`create_fma` of the interpreter's builder for float32, rounding once."""
    if z.data.dtype != np.float32:
        raise TypeError(f"fma of {z.data.dtype} is not part of the arithmetic")
    x_data, y_data, z_data = (torch.tensor(operand.data) for operand in (x, y, z))
    return interpreter.TensorHandle(exact_arithmetic.fma(x_data, y_data, z_data).numpy(), z.dtype.scalar)


def exact_inline_asm(
    _builder: Any, asm: str, _constraints: str, values: list[Any], types: list[Any], _pure: bool, pack: int
) -> Any:
    """`create_inline_asm` of the interpreter's builder for the one instruction that kernels write: dp4a."""
    if not asm.startswith("dp4a.s32.s32 ") or pack != 1:
        raise NotImplementedError(asm)
    a, b, c = np.broadcast_arrays(*(value.data for value in values))
    bytes_a, bytes_b = (np.ascontiguousarray(word)[..., np.newaxis].view(np.int8) for word in (a, b))
    products = bytes_a.astype(np.int32) * bytes_b.astype(np.int32)
    result = interpreter.TensorHandle(products.sum(axis=-1, dtype=np.int32) + c, types[0].scalar)
    return SimpleNamespace(get_result=lambda _index: result)


def patch_tensor(tensor: Any, scope: Any) -> None:
    """Scalars that count loops are arrays of one element, which NumPy no longer takes for an integer."""
    interpreted_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


def quiet_call(self: Any, *args: Any, **kwargs: Any) -> None:
    """Overflow and NaN are results like others: a GPU warns of neither."""
    with np.errstate(all="ignore"):
        interpreted_call(self, *args, **kwargs)


interpreted_tensor = interpreter._patch_lang_tensor
interpreter._patch_lang_tensor = patch_tensor
interpreted_call = interpreter.GridExecutor.__call__
interpreter.GridExecutor.__call__ = quiet_call
interpreter.InterpreterBuilder.create_fma = exact_fma
interpreter.InterpreterBuilder.create_inline_asm = exact_inline_asm


def on_device(tensor: QuantTensor, device: torch.device = DEVICE) -> QuantTensor:
    """A copy of a weight on the test's device, in memory rounded up to 16 bytes as everywhere there."""
    num_bytes = tensor.blocks.numel()
    blocks = torch.zeros(-(-num_bytes // 16) * 16, dtype=torch.uint8, device=device)[:num_bytes]
    blocks.copy_(tensor.blocks.reshape(-1))
    return QuantTensor(blocks.view(tensor.blocks.shape), tensor.quant_type, tensor.shape)


def device_activations(x: torch.Tensor, device: torch.device = DEVICE) -> QuantActivations:
    """x [T, K] quantised by the reference and padded with zeros to whole groups, as GPU kernels read it."""
    group = exact_arithmetic.GROUP_SIZE
    padded = torch.nn.functional.pad(x, (0, -x.shape[-1] % group))
    quantized = quantize_activations(padded)
    return QuantActivations(*(part.contiguous().to(device) for part in vars(quantized).values()))


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal shapes, types and bits, except that any NaN equals any other."""
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    actual, expected = actual.cpu(), expected.cpu()
    if expected.dtype.is_floating_point:
        nan = expected.isnan()
        assert torch.equal(actual.isnan(), nan), "NaN elsewhere than expected"
        actual, expected = actual[~nan].view(torch.uint8), expected[~nan].view(torch.uint8)
    assert torch.equal(actual, expected), f"{int((actual != expected).sum())} bytes differ"
