"""Rows of the embedding table, from its quantised blocks."""

import torch

from coldstream.kernels.dequantize.triton import dequantize
from coldstream.kernels.quant_tensor import QuantTensor


def embed(table: QuantTensor, token_ids: torch.Tensor, out: torch.Tensor, codes: torch.Tensor | None) -> None:
    """Writes the values of the rows `token_ids` (int32 [T]) of `table` [vocab, E] to float32 `out` [T, E].

    The ids must name rows of the table, which a kernel cannot refuse; `codes` is
    `code_table(table.quant_type, device)`.
    """
    dequantize(table, out, codes, token_ids)
