"""Rows of the embedding table, from its quantised blocks."""

from coldstream.kernels.cuda.array import DeviceArray
from coldstream.kernels.dequantize.cuda import dequantize_cuda
from coldstream.kernels.quant_tensor import QuantTensor


def embed_cuda(table: QuantTensor, token_ids: DeviceArray, out: DeviceArray) -> None:
    """Writes the values of the rows `token_ids` (int32 [T]) of `table` [vocab, E] to float32 `out` [T, E].

    The ids must be rows of the table, which the kernel does not check.
    """
    dequantize_cuda(table, out, token_ids)
