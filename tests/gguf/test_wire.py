"""Strings of a header at the limits of their length, in one buffer and across several."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from struct import pack

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from coldstream.errors import LimitError
from coldstream.gguf import wire
from coldstream.gguf.wire import HeaderBytes, UnreadableError

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


PIECES = st.sampled_from(
    [b"", b"a", b"\0", b"a" + bytes(7), bytes(8), b"bc", b"x" * 255, b"y" * 256, "é".encode()]
)


@given(
    texts=st.lists(st.lists(PIECES, max_size=3).map(b"".join), max_size=40),
    looked_at=st.integers(1, 3),
    window=st.sampled_from([8, 64, 1 << 20]),
    chunk=st.sampled_from([16, 1 << 20]),
)
@example(texts=[b"a", b"", b"x" * 255, b""], looked_at=1, window=1 << 20, chunk=1 << 20)
def test_strings_begin_where_their_lengths_say(
    tmp_path: Path, texts: list[bytes], looked_at: int, window: int, chunk: int
) -> None:
    """Whether they are gone through one by one or in runs, and whatever they hold.

    The last byte of a text before an empty one looks like a length.
    """
    content = b"".join(pack("<Q", len(text)) + text for text in texts)
    with (
        pytest.MonkeyPatch.context() as patch,
        header(tmp_path / "header", content + b"a" + bytes(7)) as read,
    ):
        patch.setattr(wire, "_LOOKED_AT", looked_at)
        patch.setattr(wire, "_WINDOW_BYTES", window)
        patch.setattr(wire, "_FIRST_CHUNK_BYTES", chunk)
        bad = next((index for index, text in enumerate(texts) if b"\0" in text), None)
        if bad is None:
            assert read.strings(len(texts), "names") == [text.decode() for text in texts]
        else:
            with pytest.raises(UnreadableError, match=rf"names\[{bad}\]"):
                read.strings(len(texts), "names")
        assert read.position == len(content)


def test_a_run_of_short_strings_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "_LOOKED_AT", 4)
    with header(tmp_path / "header", encoded(*[3] * 50, 0, *[5] * 20)) as read:
        read.need(1, "names")
        assert len(read._skip_short_strings(60)) == 50
        assert read.position == 50 * 11
        assert not len(read._skip_short_strings(21)), "an empty one comes first"


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
