"""GGUF files byte by byte, for tests of what a writer would never write."""

import struct
from collections.abc import Sequence

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def string(text: str | bytes, length: int | None = None) -> bytes:
    """A string record, whose length field may lie."""
    raw = text.encode() if isinstance(text, str) else text
    return u64(len(raw) if length is None else length) + raw


def pair(key: str | bytes, value_type: int, payload: bytes) -> bytes:
    return string(key) + u32(value_type) + payload


def array(key: str, item_type: int, count: int, items: bytes) -> bytes:
    return pair(key, ARRAY, u32(item_type) + u64(count) + items)


def tensor(
    name: str | bytes = "a",
    dims: Sequence[int] = (32, 2),
    type_id: int = 0,
    offset: int = 0,
    num_dims: int | None = None,
) -> bytes:
    """A tensor record; `dims` in file order, the row length first. Default: 256 bytes of F32."""
    count = len(dims) if num_dims is None else num_dims
    return string(name) + u32(count) + b"".join(u64(dim) for dim in dims) + u32(type_id) + u64(offset)


def gguf_bytes(
    pairs: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    num_tensors: int | None = None,
    num_pairs: int | None = None,
    alignment: int = 32,
) -> bytes:
    """A file of these records; the counts may lie. `data` follows at the next multiple of `alignment`."""
    counts = u64(len(tensors) if num_tensors is None else num_tensors)
    counts += u64(len(pairs) if num_pairs is None else num_pairs)
    header = magic + u32(version) + counts + b"".join(pairs) + b"".join(tensors)
    return header + bytes(-len(header) % alignment) + data
