"""The beginning of a GGUF file as a cursor of little-endian values.

Knows the encoding of integers, strings and arrays, and nothing of what they mean. The bytes are read with
pread in growing chunks, so a file may change or shrink meanwhile and the worst outcome is an exception. Every
length is compared with what is left of the file before anything is allocated for it, however small it
seems.
"""

import os
from pathlib import Path
from struct import Struct
from typing import Any, Final, TypeVar

import numpy as np

from coldstream.errors import (
    InconsistentError,
    LimitError,
    ModelFormatError,
    ModelNotFoundError,
    TruncatedError,
)
from coldstream.gguf.messages import DAMAGED, INCOMPLETE, describe, shorten

MAX_HEADER_BYTES: Final = 64 << 20  # the largest vocabularies in use need about 20 MB
MAX_STRING_BYTES: Final = 32 << 20  # a whole tokenizer.json may be one string
MAX_NAME_BYTES: Final = 1024
MAX_ARRAY_ITEMS: Final = 1 << 20  # four times the largest vocabularies

E = TypeVar("E", bound=ModelFormatError)


class UnreadableError(InconsistentError):
    """A value of known extent that means nothing: text that is not UTF-8 or holds NUL, a bool of 2."""


_FIRST_CHUNK_BYTES: Final = 1 << 20
_U32: Final = Struct("<I")
_U64: Final = Struct("<Q")
_LOOKED_AT: Final = 4096  # strings that are gone through one by one before a run of short ones is looked for
_WINDOW_BYTES: Final = 1 << 20  # in which it is looked for, so that a file without any costs little

Offsets = np.ndarray[Any, np.dtype[np.int64]]


class HeaderBytes:
    """Reads values one after another from an open file of `size` bytes; `position` is the next one's offset.

    Every method names the field that it reads, for its errors. TruncatedError: the file ends first.
    LimitError: the value is beyond anything sensible. UnreadableError: text that is not UTF-8 or holds NUL.
    After an UnreadableError `position` is behind the value, so that reading can go on.
    """

    def __init__(self, descriptor: int, size: int, path: Path) -> None:
        self.path = path
        self.size = size
        self.position = 0
        self._descriptor = descriptor
        self._buffer = b""

    def error(self, kind: type[E], field: str, problem: str, offset: int | None = None) -> E:
        """An exception of `kind` that names the file, the field and its offset (by default `position`)."""
        return kind(describe(self.path, field, self.position if offset is None else offset, problem))

    def consumed(self) -> bytes:
        """Everything before `position`."""
        return self._buffer[: self.position]

    def take(self, num_bytes: int, field: str) -> bytes:
        self.need(num_bytes, field)
        start = self.position
        self.position += num_bytes
        return self._buffer[start : self.position]

    def scalar(self, layout: Struct, field: str) -> int | float:
        self.need(layout.size, field)
        (value,) = layout.unpack_from(self._buffer, self.position)
        self.position += layout.size
        assert isinstance(value, int | float)
        return value

    def u32(self, field: str) -> int:
        return int(self.scalar(_U32, field))

    def u64(self, field: str) -> int:
        return int(self.scalar(_U64, field))

    def string(self, field: str, max_bytes: int = MAX_STRING_BYTES) -> str:
        start = self.position
        raw = self.string_bytes(field, max_bytes)
        try:
            text = raw.decode()
        except UnicodeDecodeError:
            raise self.error(UnreadableError, field, f"not UTF-8: {DAMAGED}", start) from None
        if "\0" in text:
            raise self.error(UnreadableError, field, f"holds a NUL byte: {DAMAGED}", start)
        return text

    def string_bytes(self, field: str, max_bytes: int = MAX_STRING_BYTES) -> bytes:
        """A string in whatever encoding it has."""
        start = self.position
        length = self.u64(field)
        self._check_length(length, max_bytes, field, start)
        return self.take(length, field)

    def strings(self, count: int, field: str) -> list[str]:
        """`count` strings: half a million in a large vocabulary, and most of the time of opening a file."""
        parts: list[Offsets] = []
        first, done = self.position, 0
        while done < count:
            parts.append(self._skip_buffered_strings(count - done))
            done += len(parts[-1])
            if done < count:
                self._buffer_next_string(f"{field}[{done}]")
        starts = np.concatenate(parts) if parts else np.empty(0, np.int64)
        # With each length replaced by a NUL, one decode checks all strings and one split finds any stray NUL.
        raw = np.frombuffer(self._buffer, np.uint8)[first : self.position].copy()
        prefixes = starts - first
        raw[prefixes] = 0
        keep = np.ones(len(raw), np.bool_)
        for i in range(1, 8):
            keep[prefixes + i] = False
        try:
            items = raw[keep].tobytes().decode().split("\0")[1:]
        except UnicodeDecodeError:
            items = []
        if len(items) != count:
            self._raise_first_bad_string(starts.tolist(), field)
        return items

    def numbers(self, dtype: np.dtype[np.generic], count: int, field: str) -> np.ndarray:
        """`count` numbers as a read-only array [count] of `dtype`."""
        return np.frombuffer(self.take(count * dtype.itemsize, field), dtype)

    def need(self, num_bytes: int, field: str) -> None:
        """Makes sure that `num_bytes` from `position` on exist and are buffered."""
        end = self.position + num_bytes
        if end <= len(self._buffer):
            return
        if end > self.size:
            left = self.size - self.position
            problem = f"needs {num_bytes} bytes, the file has {left} left: {INCOMPLETE}"
            raise self.error(TruncatedError, field, problem)
        if end > MAX_HEADER_BYTES:
            problem = f"the header would exceed {MAX_HEADER_BYTES >> 20} MiB: {DAMAGED}"
            raise self.error(LimitError, field, problem)
        self._fill(end)

    def _fill(self, end: int) -> None:
        target = min(self.size, MAX_HEADER_BYTES, max(end, 2 * len(self._buffer), _FIRST_CHUNK_BYTES))
        chunks = [self._buffer]
        have = len(self._buffer)
        while have < target:
            try:
                chunk = os.pread(self._descriptor, target - have, have)
            except OSError as error:
                raise ModelNotFoundError(f"{shorten(self.path)} cannot be read: {error.strerror}") from error
            if not chunk:
                raise self.error(TruncatedError, "header", "the file shrank while it was read", have)
            chunks.append(chunk)
            have += len(chunk)
        self._buffer = b"".join(chunks)

    def _skip_buffered_strings(self, count: int) -> Offsets:
        """The offsets of up to `count` strings that lie whole in the buffer; moves behind them."""
        short = self._skip_short_strings(count)
        starts: list[int] = []
        buffer, position = self._buffer, self.position
        last_start = len(buffer) - 8
        unpack, append = _U64.unpack_from, starts.append
        # A run of short strings ends at one that is not, or at the end of the buffer.
        for _ in range(min(count - len(short), _LOOKED_AT)):
            if position > last_start:
                break
            append(position)
            position += 8 + unpack(buffer, position)[0]
        if position > len(buffer):
            position = starts.pop()
        self.position = position
        return np.concatenate((short, np.array(starts, np.int64)))

    def _skip_short_strings(self, count: int) -> Offsets:
        """The offsets of a run of up to `count` strings of 1 to 255 bytes; moves behind them.

        Such a string begins where a byte that is not 0 comes before seven that are. Text rarely has that, and
        where it does the run ends: each string must begin where the one before it ends.
        """
        raw = np.frombuffer(self._buffer, np.uint8)[self.position : self.position + _WINDOW_BYTES]
        is_zero = raw == 0
        num = len(raw) - 7
        if num <= 0 or count <= _LOOKED_AT:
            return np.empty(0, np.int64)
        begins = ~is_zero[:num]
        for i in range(1, 8):
            begins &= is_zero[i : num + i]
        starts = np.flatnonzero(begins)[:count]
        ends = starts + 8 + raw[starts]
        follows = np.concatenate((starts[:1] == 0, starts[1:] == ends[:-1])) & (ends <= len(raw))
        length = len(starts) if follows.all() else int(np.argmin(follows))
        if length:
            self.position, first = self.position + int(ends[length - 1]), self.position
            return starts[:length] + first
        return starts[:0]

    def _buffer_next_string(self, field: str) -> None:
        self.need(8, field)
        (length,) = _U64.unpack_from(self._buffer, self.position)
        self._check_length(length, MAX_STRING_BYTES, field, self.position)
        self.need(8 + length, field)

    def _check_length(self, length: int, max_bytes: int, field: str, offset: int) -> None:
        if length > max_bytes:
            problem = f"a string of {length} bytes, the limit is {max_bytes}: {DAMAGED}"
            raise self.error(LimitError, field, problem, offset)

    def _raise_first_bad_string(self, starts: list[int], field: str) -> None:
        end = self.position
        try:
            for index, start in enumerate(starts):
                self.position = start
                self.string(f"{field}[{index}]")
        finally:
            self.position = end
