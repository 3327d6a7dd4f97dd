"""Copies of a model file with other weights: all as float32, or matrices quantised to one type."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from gguf.constants import Keys

import gguf
from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.dequantize.reference import dequantize
from coldstream.kernels.quant_tensor import QuantTensor


class Tensor(NamedTuple):
    """Values [..., columns], and whether the model's products are with them quantised."""

    values: np.ndarray
    is_matrix: bool


class Blocks(NamedTuple):
    """Matrices by name, quantised to one type: uint8 [..., row_bytes]."""

    quant_type: QuantType
    matrices: Mapping[str, np.ndarray]

    def values(self, name: str) -> np.ndarray:
        """The values of the blocks, float32."""
        values: np.ndarray = dequantize(self.tensor(name)).numpy()
        return values

    def tensor(self, name: str) -> QuantTensor:
        """A matrix with its shape."""
        blocks = self.matrices[name]
        columns = blocks.shape[-1] // self.quant_type.block_bytes * self.quant_type.block_elements
        return QuantTensor(torch.from_numpy(blocks), self.quant_type, (*blocks.shape[:-1], columns))


def read_tensors(reader: gguf.GGUFReader) -> dict[str, Tensor]:
    """All of a file, dequantised; embeddings are no product."""
    found = {}
    for tensor in reader.tensors:
        is_float = tensor.tensor_type in (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16)
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        found[tensor.name] = Tensor(values, not is_float and tensor.name != "token_embd.weight")
    return found


def twin_of(tensors: Mapping[str, Tensor], blocks: Blocks) -> dict[str, Tensor]:
    """The same with the values that the blocks stand for."""
    return {
        name: tensor._replace(values=blocks.values(name)) if name in blocks.matrices else tensor
        for name, tensor in tensors.items()
    }


def write_file(
    path: Path, reader: gguf.GGUFReader, tensors: Mapping[str, Tensor], blocks: Blocks | None = None
) -> None:
    """The model of `reader` with these blocks and, where there are none, these values as float32."""
    arch = reader.fields[Keys.General.ARCHITECTURE].contents()
    out = gguf.GGUFWriter(path, arch)
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != Keys.General.ARCHITECTURE:
            kind, inner = field.types[0], field.types[-1] if len(field.types) > 1 else None
            out.add_key_value(name, field.contents(), kind, inner)
    for name, tensor in tensors.items():
        if blocks and name in blocks.matrices:
            # As signed bytes, whose geometry the writer doesn't look up: it does not know all types.
            shape = blocks.tensor(name).shape
            out.add_tensor(name, blocks.matrices[name].view(np.int8), shape, blocks.quant_type)
        else:
            out.add_tensor(name, tensor.values)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
