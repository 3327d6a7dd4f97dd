"""Strings of a header at the limits of their length, in one buffer and across several."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from struct import pack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldstream.errors import LimitError
from coldstream.gguf import wire
from coldstream.gguf.wire import HeaderBytes

LIMIT = 100


@contextmanager
def header(path: Path, content: bytes) -> Iterator[HeaderBytes]:
    path.write_bytes(content)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield HeaderBytes(descriptor, len(content), path)
    finally:
        os.close(descriptor)


def encoded(*lengths: int) -> bytes:
    return b"".join(pack("<Q", length) + b"x" * length for length in lengths)


@given(length=st.integers(LIMIT - 2, LIMIT + 2))
def test_a_string_may_be_as_long_as_the_limit_and_no_longer(tmp_path: Path, length: int) -> None:
    with header(tmp_path / "header", encoded(length)) as read:
        if length <= LIMIT:
            assert read.string("name", LIMIT) == "x" * length
        else:
            with pytest.raises(LimitError, match=f"name .*a string of {length} bytes, the limit is {LIMIT}"):
                read.string("name", LIMIT)


@given(length=st.integers(LIMIT - 2, LIMIT + 2), num_before=st.integers(0, 3))
def test_so_may_one_of_many_that_does_not_lie_in_the_buffer_yet(
    tmp_path: Path, length: int, num_before: int
) -> None:
    with (
        pytest.MonkeyPatch.context() as patch,
        header(tmp_path / "header", encoded(*[3] * num_before, length, 1)) as read,
    ):
        patch.setattr(wire, "MAX_STRING_BYTES", LIMIT)
        patch.setattr(wire, "_FIRST_CHUNK_BYTES", 16)
        if length <= LIMIT:
            assert read.strings(num_before + 2, "names") == ["xxx"] * num_before + ["x" * length, "x"]
        else:
            with pytest.raises(LimitError, match=rf"names\[{num_before}\] .*a string of {length} bytes"):
                read.strings(num_before + 2, "names")


@pytest.mark.parametrize("more", [0, 1])
def test_a_header_may_be_as_long_as_the_limit_and_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: int
) -> None:
    monkeypatch.setattr(wire, "MAX_HEADER_BYTES", LIMIT)
    with header(tmp_path / "header", bytes(LIMIT + 50)) as read:
        if not more:
            assert len(read.take(LIMIT, "all")) == LIMIT
        else:
            with pytest.raises(LimitError, match="the header would exceed"):
                read.take(LIMIT + 1, "all")
