"""Writes the header of a GGUF file (version 3): metadata and the tensor table. Pure.

The reader is `header.py`. Layout: the GGUF specification.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from struct import pack, unpack

from coldstream.gguf.header import DEFAULT_ALIGNMENT, TensorInfo
from coldstream.gguf.quant_types import QuantType

VERSION = 3
MetaValue = bool | int | float | str | Sequence[bool] | Sequence[int]
_BOOL, _STRING, _ARRAY, _UINT32, _INT32, _FLOAT32, _FLOAT64 = 7, 8, 9, 4, 5, 6, 12


@dataclass(frozen=True)
class NewTensor:
    """A tensor to be written; shape in numpy order."""

    name: str
    shape: tuple[int, ...]
    quant_type: QuantType

    @property
    def num_bytes(self) -> int:
        rows = 1
        for size in self.shape[:-1]:
            rows *= size
        return rows * self.quant_type.row_bytes(self.shape[-1])


def header_bytes(
    metadata: Mapping[str, MetaValue], tensors: Sequence[NewTensor]
) -> tuple[bytes, tuple[TensorInfo, ...]]:
    """The header, and where each tensor's data has to be written; bytes between them are 0.

    A float that single precision does not hold exactly is written in double precision, integers have 32 bits.
    Raises struct.error for an integer that has no place in them.
    """
    parts = [b"GGUF", pack("<IQQ", VERSION, len(tensors), len(metadata))]
    for key, value in metadata.items():
        parts += [_text(key), _value(value)]
    offsets, end = [], 0
    for tensor in tensors:
        offsets.append(end)
        dims = tensor.shape[::-1]
        parts += [_text(tensor.name), pack(f"<I{len(dims)}Q", len(dims), *dims)]
        parts.append(pack("<IQ", tensor.quant_type, end))
        end = _aligned(end + tensor.num_bytes)
    size = sum(map(len, parts))
    data_start = _aligned(size)
    parts.append(bytes(data_start - size))
    places = (
        TensorInfo(each.name, each.shape, each.quant_type, 0, data_start + offset, each.num_bytes)
        for each, offset in zip(tensors, offsets, strict=True)
    )
    return b"".join(parts), tuple(places)


def _aligned(position: int) -> int:
    return -(-position // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT


def _text(text: str) -> bytes:
    raw = text.encode()
    return pack("<Q", len(raw)) + raw


def _value(value: MetaValue) -> bytes:
    """A value behind its type."""
    if isinstance(value, bool):
        return pack("<I?", _BOOL, value)
    if isinstance(value, int):
        return pack("<II", _UINT32, value)
    if isinstance(value, float):
        single = pack("<f", value)
        is_exact = unpack("<f", single) == (value,)
        return pack("<I", _FLOAT32) + single if is_exact else pack("<Id", _FLOAT64, value)
    if isinstance(value, str):
        return pack("<I", _STRING) + _text(value)
    if all(isinstance(item, bool) for item in value):
        return pack(f"<IIQ{len(value)}?", _ARRAY, _BOOL, len(value), *value)
    return pack(f"<IIQ{len(value)}i", _ARRAY, _INT32, len(value), *value)
