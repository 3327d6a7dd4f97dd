"""Rows of the embedding table, from its quantised blocks."""

from coldstream.kernels.cuda.array import DeviceArray
from coldstream.kernels.dequantize.cuda import dequantize_cuda
from coldstream.kernels.quant_tensor import QuantTensor


def embed_cuda(
    table: QuantTensor, token_ids: DeviceArray, out: DeviceArray, codes: DeviceArray | None
) -> None:
    """Writes the values of the rows `token_ids` (int32 [T]) of `table` [vocab, E] to float32 `out` [T, E].

    The ids must be rows of the table, which the kernel does not check; `codes` is the table's `code_table`.
    """
    dequantize_cuda(table, out, codes, token_ids)
