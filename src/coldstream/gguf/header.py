"""Parses and checks the header of one GGUF file (version 2 or 3): metadata and the tensor table.

Unit of work: one shard. Nothing here reads weights or knows architectures. What is returned has been checked
in full. Keys and tensor names are unique. Every tensor has a known type and a shape whose rows are whole
blocks. It lies inside the file, aligned, directly behind the tensor before it. A value of metadata that
cannot be decoded is kept as its error, which is raised when something reads the key. Layout: the GGUF
specification.
"""

import hashlib
from dataclasses import dataclass, replace
from struct import Struct
from typing import Final

import numpy as np

from coldstream.errors import (
    DuplicateError,
    InconsistentError,
    LimitError,
    OverflowedError,
    TruncatedError,
    UnsupportedError,
)
from coldstream.gguf.foreign_types import refusal
from coldstream.gguf.messages import DAMAGED, INCOMPLETE, RECONVERT
from coldstream.gguf.metadata import Metadata, Value
from coldstream.gguf.quant_types import QuantType
from coldstream.gguf.wire import MAX_ARRAY_ITEMS, MAX_NAME_BYTES, HeaderBytes, UnreadableError

MAX_KEYS: Final = 1 << 16
MAX_TENSORS: Final = 1 << 16
MAX_DIMS: Final = 4
MAX_ALIGNMENT: Final = 1 << 16
DEFAULT_ALIGNMENT: Final = 32
INT63_LIMIT: Final = 1 << 63

_FIXED_BYTES: Final = 24  # magic, version, two counts
_MIN_KEY_BYTES: Final = 14  # length, one character, type, a one-byte value
_MIN_TENSOR_BYTES: Final = 33  # length, one character, dimension count, one dimension, type, offset
_BOOL, _STRING, _ARRAY = 7, 8, 9
_SCALARS: Final = {
    0: Struct("<B"),
    1: Struct("<b"),
    2: Struct("<H"),
    3: Struct("<h"),
    4: Struct("<I"),
    5: Struct("<i"),
    6: Struct("<f"),
    10: Struct("<Q"),
    11: Struct("<q"),
    12: Struct("<d"),
}
# What files hold under a type's id besides the type, and what to take instead.
_OTHER_LAYOUTS: Final = {
    QuantType.Q2_0: "early files have this id for blocks of 128, download a Q2_0 file with groups of 64",
}
_QUANT_TYPES: Final = {int(quant_type): quant_type for quant_type in QuantType}


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies. `shape` is in numpy order: a weight is [out, in], experts [experts, out, in]."""

    name: str
    shape: tuple[int, ...]
    quant_type: QuantType
    shard: int
    offset: int  # absolute, in that shard's file
    num_bytes: int


@dataclass(frozen=True)
class Header:
    """A checked header. `digest` is a hash of its bytes."""

    metadata: Metadata
    tensors: dict[str, TensorInfo]
    digest: bytes


def read_header(source: HeaderBytes, shard: int) -> Header:
    """Parses the header at the beginning of `source`; `shard` is copied into each TensorInfo.

    Raises the subclasses of ModelFormatError; each names the file, the field, its byte offset and what was
    expected.
    """
    num_tensors, num_keys = _read_counts(source)
    metadata = _read_metadata(source, num_keys)
    alignment = _alignment(metadata)
    tensors = _read_tensors(source, num_tensors, alignment, shard)
    digest = hashlib.blake2b(source.consumed(), digest_size=16).digest()
    return Header(metadata, tensors, digest)


def _read_counts(source: HeaderBytes) -> tuple[int, int]:
    magic = source.take(4, "magic")
    if magic != b"GGUF":
        raise source.error(UnsupportedError, "magic", f"{magic!r}, not b'GGUF': this is not a GGUF file", 0)
    source.need(_FIXED_BYTES - 4, "header")
    version = source.u32("version")
    if version not in (2, 3):
        big_endian = version.to_bytes(4, "little") in (b"\0\0\0\2", b"\0\0\0\3")
        what = "a big-endian file" if big_endian else f"version {version}"
        raise source.error(UnsupportedError, "version", f"{what}, expected 2 or 3, little-endian", 4)
    num_tensors = source.u64("tensor count")
    num_keys = source.u64("key count")
    for field, offset, count, limit in (
        ("tensor count", 8, num_tensors, MAX_TENSORS),
        ("key count", 16, num_keys, MAX_KEYS),
    ):
        if count > limit:
            raise source.error(LimitError, field, f"{count}, the limit is {limit}: {DAMAGED}", offset)
    wanted = num_keys * _MIN_KEY_BYTES + num_tensors * _MIN_TENSOR_BYTES
    if wanted > source.size - _FIXED_BYTES:
        problem = f"{num_keys} keys and {num_tensors} tensors need {wanted} bytes or more: {INCOMPLETE}"
        raise source.error(TruncatedError, "counts", problem, 8)
    return num_tensors, num_keys


def _read_metadata(source: HeaderBytes, num_keys: int) -> Metadata:
    values: dict[str, Value | UnreadableError] = {}
    offsets: dict[str, int] = {}
    for index in range(num_keys):
        start = source.position
        key, bad_key = _read_key(source, index)
        if not key:
            raise source.error(InconsistentError, f"key {index}", f"an empty key: {DAMAGED}", start)
        if key in values:
            problem = f"the key appears twice, first at byte {offsets[key]}: {RECONVERT}"
            raise source.error(DuplicateError, key, problem, start)
        value_type = source.u32(f"type of {key}")
        offsets[key] = source.position
        try:
            value: Value | UnreadableError = _read_value(source, value_type, key)
        except UnreadableError as error:  # matters only if something reads the key
            value = error
        values[key] = bad_key or value
    return Metadata(values, offsets, source.path)


def _read_key(source: HeaderBytes, index: int) -> tuple[str, UnreadableError | None]:
    """A key, and the error about it if it is none that anything reads: not UTF-8, or with a NUL."""
    start = source.position
    try:
        return source.string(f"key {index}", MAX_NAME_BYTES), None
    except UnreadableError as error:
        source.position = start
        raw = source.string_bytes(f"key {index}", MAX_NAME_BYTES)
        return raw.decode(errors="backslashreplace"), error


def _read_value(source: HeaderBytes, value_type: int, key: str) -> Value:
    if value_type == _STRING:
        return source.string(key)
    if value_type == _ARRAY:
        return _read_array(source, key)
    if value_type == _BOOL:
        return bool(_read_bools(source, 1, key)[0])
    if value_type in _SCALARS:
        return source.scalar(_SCALARS[value_type], key)
    problem = f"unknown value type {value_type}, known are 0 to 12: {DAMAGED}"
    raise source.error(UnsupportedError, key, problem, source.position - 4)


def _read_array(source: HeaderBytes, key: str) -> Value:
    start = source.position
    item_type = source.u32(f"item type of {key}")
    if item_type == _ARRAY:
        raise source.error(LimitError, key, "an array of arrays: one level is the limit", start)
    if item_type not in _SCALARS and item_type not in (_BOOL, _STRING):
        problem = f"unknown item type {item_type}, known are 0 to 12: {DAMAGED}"
        raise source.error(UnsupportedError, key, problem, start)
    count = source.u64(f"length of {key}")
    if count > MAX_ARRAY_ITEMS:
        problem = f"an array of {count} items, the limit is {MAX_ARRAY_ITEMS}: {DAMAGED}"
        raise source.error(LimitError, key, problem, start)
    item_bytes = 8 if item_type == _STRING else 1 if item_type == _BOOL else _SCALARS[item_type].size
    if count * item_bytes > source.size - source.position:
        problem = f"an array of {count} items does not fit the rest of the file: {INCOMPLETE}"
        raise source.error(TruncatedError, key, problem, start)
    if item_type == _STRING:
        return source.strings(count, key)
    if item_type == _BOOL:
        return _read_bools(source, count, key)
    return source.numbers(np.dtype(_SCALARS[item_type].format), count, key)


def _read_bools(source: HeaderBytes, count: int, key: str) -> np.ndarray:
    start = source.position
    raw = source.numbers(np.dtype(np.uint8), count, key)
    if count and raw.max() > 1:
        raise source.error(UnreadableError, key, f"a bool that is neither 0 nor 1: {DAMAGED}", start)
    return raw.view(np.bool_)


def _alignment(metadata: Metadata) -> int:
    value = metadata.integer("general.alignment", 0, INT63_LIMIT - 1, DEFAULT_ALIGNMENT)
    if value % 8 or value.bit_count() != 1 or value > MAX_ALIGNMENT:
        problem = f"{value}, expected a power of two from 8 to {MAX_ALIGNMENT}"
        raise metadata.error(InconsistentError, "general.alignment", problem)
    return value


def _read_tensors(source: HeaderBytes, count: int, alignment: int, shard: int) -> dict[str, TensorInfo]:
    """Reads the tensor table. Its offsets count from the end of the header, rounded up to `alignment`."""
    entries: dict[str, tuple[TensorInfo, int]] = {}
    for index in range(count):
        start = source.position
        info = _read_tensor(source, index, shard)
        if info.name in entries:
            problem = f"the tensor is listed twice, first at byte {entries[info.name][1]}: {RECONVERT}"
            raise source.error(DuplicateError, info.name, problem, start)
        entries[info.name] = info, start

    data_start = _round_up(source.position, alignment)
    tensors: dict[str, TensorInfo] = {}
    before: TensorInfo | None = None
    for name, (info, start) in entries.items():
        _check_place(source, info, start, data_start, alignment, before)
        tensors[name] = replace(info, offset=data_start + info.offset)
        before = info
    return tensors


def _check_place(
    source: HeaderBytes,
    info: TensorInfo,
    start: int,
    data_start: int,
    alignment: int,
    before: TensorInfo | None,
) -> None:
    """Tensors lie one behind the other in table order, as all writers put them: no overlap, no hole."""
    end = data_start + info.offset + info.num_bytes
    if end >= INT63_LIMIT:
        problem = f"offset {info.offset} plus {info.num_bytes} bytes does not fit 63 bits: {DAMAGED}"
        raise source.error(OverflowedError, info.name, problem, start)
    if info.offset % alignment:
        problem = f"offset {info.offset} is not a multiple of the alignment {alignment}: {RECONVERT}"
        raise source.error(InconsistentError, info.name, problem, start)
    expected = 0 if before is None else _round_up(before.offset + before.num_bytes, alignment)
    if info.offset != expected:
        problem = _misplaced(info, before, expected)
        raise source.error(InconsistentError, info.name, problem, start)
    if end > source.size:
        problem = f"its data ends at byte {end}, the file at {source.size}: {INCOMPLETE}"
        raise source.error(TruncatedError, info.name, problem, start)


def _misplaced(info: TensorInfo, before: TensorInfo | None, expected: int) -> str:
    """What is wrong with a tensor that does not start where the one before it ends."""
    what = "overlaps the tensor before it" if info.offset < expected else "leaves a hole before it"
    problem = f"offset {info.offset} {what}, expected {expected}"
    if before is None or before.quant_type.block_elements == 1:
        return f"{problem}: {RECONVERT}"
    kind = before.quant_type
    layout = (
        f"whose type {int(kind)} ({kind.name}) has {kind.block_elements} values in {kind.block_bytes} bytes"
    )
    return f"{problem} after one {layout}: {_OTHER_LAYOUTS.get(kind, RECONVERT)}"


def _read_tensor(source: HeaderBytes, index: int, shard: int) -> TensorInfo:
    """One entry of the table, with `offset` as the file gives it."""
    start = source.position
    name = source.string(f"name of tensor {index}", MAX_NAME_BYTES)
    if not name:
        raise source.error(InconsistentError, f"name of tensor {index}", f"empty: {DAMAGED}", start)
    num_dims = source.u32(name)
    if not 1 <= num_dims <= MAX_DIMS:
        kind = LimitError if num_dims > MAX_DIMS else InconsistentError
        raise source.error(kind, name, f"{num_dims} dimensions, expected 1 to {MAX_DIMS}: {DAMAGED}", start)
    shape = tuple(source.u64(name) for _ in range(num_dims))[::-1]
    type_id = source.u32(name)
    offset = source.u64(name)

    if 0 in shape:
        raise source.error(InconsistentError, name, f"shape {list(shape)} holds a zero: {RECONVERT}", start)
    if type_id not in _QUANT_TYPES:
        raise source.error(UnsupportedError, name, refusal(type_id), start)
    quant_type = _QUANT_TYPES[type_id]
    num_elements = 1
    for size in shape:
        num_elements *= size
        if num_elements >= INT63_LIMIT:
            problem = f"shape {list(shape)} has 2^63 elements or more: {DAMAGED}"
            raise source.error(OverflowedError, name, problem, start)
    if shape[-1] % quant_type.block_elements:
        blocks = f"{quant_type.name} blocks of {quant_type.block_elements}"
        problem = f"rows of {shape[-1]} values are not whole {blocks}: {RECONVERT}"
        raise source.error(InconsistentError, name, problem, start)
    num_bytes = num_elements // quant_type.block_elements * quant_type.block_bytes
    return TensorInfo(name, shape, quant_type, shard, offset, num_bytes)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
