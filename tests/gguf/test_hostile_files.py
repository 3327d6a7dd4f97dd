"""Files that lie: each gets one typed error that says what, where and what to do, and costs little."""

import errno
import os
import re
import stat
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import gguf
from coldstream.errors import (
    MAX_MESSAGE_CHARS,
    DuplicateError,
    InconsistentError,
    LimitError,
    ModelFormatError,
    ModelNotFoundError,
    OutOfMemoryError,
    OverflowedError,
    TruncatedError,
    UnsupportedError,
)
from coldstream.gguf import GGUFFile
from coldstream.gguf.foreign_types import FOREIGN_TYPES
from coldstream.gguf.quant_types import QuantType
from coldstream.gguf.wire import MAX_ARRAY_ITEMS, MAX_HEADER_BYTES, UnreadableError
from raw_gguf import (
    ARRAY,
    BOOL,
    F32,
    I32,
    STRING,
    U8,
    U32,
    U64,
    array,
    gguf_bytes,
    pair,
    string,
    tensor,
    u32,
    u64,
)

pytestmark = pytest.mark.usefixtures("no_descriptor_leaks")

MEBIBYTE = 1 << 20
VALUE = pair("some.key", U32, u32(1))
BLOCK = bytes(256)  # the data of raw_gguf.tensor's default

Refuse = Callable[[bytes, type[ModelFormatError]], str]


@contextmanager
def memory_limit(limit: int) -> Iterator[None]:
    """Fails when the block has ever held more than `limit` bytes of Python memory, numpy's included."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < limit
    finally:
        tracemalloc.stop()


@pytest.fixture
def refuse(tmp_path: Path) -> Refuse:
    """Opens a file of these bytes, which must raise exactly this error; returns its message."""

    def check(content: bytes, kind: type[ModelFormatError]) -> str:
        path = tmp_path / "hostile.gguf"
        path.write_bytes(content)
        with pytest.raises(ModelFormatError) as caught:
            GGUFFile.open(path)
        message = str(caught.value)
        assert type(caught.value) is kind, message
        assert str(path) in message
        assert re.search(r" at byte \d+: ", message), message
        assert len(message) <= MAX_MESSAGE_CHARS
        assert message.isprintable()
        return message

    return check


def test_the_smallest_valid_file_opens(tmp_path: Path) -> None:
    path = tmp_path / "valid.gguf"
    path.write_bytes(gguf_bytes([VALUE], [tensor()], BLOCK))
    with GGUFFile.open(path) as file:
        assert dict(file.metadata) == {"some.key": 1}
        assert file.tensors["a"].shape == (2, 32)


def test_gg01_every_prefix_is_truncated(tmp_path: Path) -> None:
    strings = array("tokens", STRING, 200, b"".join(string(f"token {i}") for i in range(200)))
    floats = array("scores", F32, 500, bytes(2000))
    content = gguf_bytes([VALUE, strings, floats], [tensor("a"), tensor("b", offset=256)], 2 * BLOCK)
    assert len(content) > 6000
    path = tmp_path / "prefix.gguf"
    path.write_bytes(content)
    for length in reversed(range(len(content))):
        os.truncate(path, length)
        with pytest.raises(TruncatedError, match=r"prefix\.gguf: .* at byte \d+: "):
            GGUFFile.open(path)


@pytest.mark.parametrize("magic", [b"FUGG", b"GGML", b"\0\0\0\0", b"\x1b[2J"])
def test_gg02_wrong_magic(refuse: Refuse, magic: bytes) -> None:
    assert "not a GGUF file" in refuse(gguf_bytes([VALUE], magic=magic), UnsupportedError)


@pytest.mark.parametrize("version", [0, 1, 4, 1 << 31, 3 << 24])
def test_gg02_wrong_version(refuse: Refuse, version: int) -> None:
    message = refuse(gguf_bytes([VALUE], version=version), UnsupportedError)
    assert ("big-endian" in message) == (version == 3 << 24)


@pytest.mark.parametrize("count", [1 << 17, 1 << 31, 1 << 32, 1 << 63, (1 << 64) - 1])
def test_gg03_counts_beyond_any_limit(refuse: Refuse, count: int) -> None:
    with memory_limit(MEBIBYTE):
        message = refuse(gguf_bytes([VALUE], num_pairs=count), LimitError)
        assert f"key count at byte 16: {count}" in message
        message = refuse(gguf_bytes([VALUE], [tensor()], BLOCK, num_tensors=count), LimitError)
        assert f"tensor count at byte 8: {count}" in message


def test_gg03_counts_that_do_not_fit_the_file(refuse: Refuse) -> None:
    refuse(gguf_bytes([VALUE], num_pairs=1000), TruncatedError)
    refuse(gguf_bytes([VALUE], [tensor()], BLOCK, num_tensors=1000), TruncatedError)


def test_gg03_one_record_more_than_present(refuse: Refuse) -> None:
    refuse(gguf_bytes([VALUE], num_pairs=2, alignment=1), TruncatedError)
    refuse(gguf_bytes([VALUE], [tensor()], num_tensors=2, alignment=1), TruncatedError)
    # With data behind the table, the data are taken for a record, whose name is empty.
    refuse(gguf_bytes([VALUE], [tensor()], BLOCK, num_tensors=2), InconsistentError)


def test_gg03_no_records_at_all(refuse: Refuse, tmp_path: Path) -> None:
    # Without tensors a file is well-formed: a vocabulary, or the first part of a split model.
    empty = tmp_path / "empty.gguf"
    empty.write_bytes(gguf_bytes())
    with GGUFFile.open(empty) as file:
        assert (len(file.metadata), len(file.tensors)) == (0, 0)
    # Hidden keys are taken for tensors; here a value type for a count of dimensions.
    refuse(gguf_bytes([pair("x", STRING, string("y"))], [tensor()], BLOCK, num_pairs=0), LimitError)


@pytest.mark.parametrize("length", [1 << 62, (1 << 64) - 1, (1 << 64) - 8, 33 << 20])
def test_gg04_string_lengths(refuse: Refuse, length: int) -> None:
    with memory_limit(MEBIBYTE):
        assert "name" in refuse(gguf_bytes([pair("name", STRING, string("x", length))]), LimitError)
        refuse(gguf_bytes([array("tokens", STRING, 1, string("x", length))]), LimitError)
        refuse(gguf_bytes([string("key", length) + u32(U32) + u32(1)]), LimitError)
        refuse(gguf_bytes([], [string("name", length) + bytes(24)]), LimitError)


def test_gg04_string_one_byte_too_long(refuse: Refuse) -> None:
    refuse(gguf_bytes([pair("name", STRING, string("x", 2))], alignment=1), TruncatedError)
    refuse(gguf_bytes([array("tokens", STRING, 1, string("x", 2))], alignment=1), TruncatedError)


def test_gg04_keys(refuse: Refuse) -> None:
    refuse(gguf_bytes([pair("", U32, u32(1))]), InconsistentError)
    refuse(gguf_bytes([pair("k" * (65 << 10), U32, u32(1))]), LimitError)
    refuse(gguf_bytes([], [tensor("")], BLOCK), InconsistentError)
    refuse(gguf_bytes([], [tensor("n" * (65 << 10))], BLOCK), LimitError)


@pytest.mark.parametrize("bad", [b"\xff", b"\xed\xa0\x80", b"\xc0\x80", b"a\0b", b"\xe6\xbc"])
def test_gg04_text_that_is_not_text(tmp_path: Path, bad: bytes) -> None:
    """What nothing reads may be in any encoding; reading it is an error, and what follows is read right."""
    items = [string("fine"), string(bad), string(b"\xa2 fine")]  # the last completes the last of `bad`
    path = tmp_path / "text.gguf"
    path.write_bytes(
        gguf_bytes(
            [
                pair("name", STRING, string(bad)),
                array("tokens", STRING, 3, b"".join(items)),
                pair(b"key" + bad, U32, u32(1)),
                VALUE,
            ]
        )
    )
    with GGUFFile.open(path) as file:
        metadata = file.metadata
    *unreadable, last = metadata
    assert dict(metadata.readable) == {last: 1} == {"some.key": 1}
    assert len(metadata.warnings) == 3
    for key, place, warning in zip(
        unreadable,
        ("name at byte 40", "tokens[1] at byte ", "key 2 at byte "),
        metadata.warnings,
        strict=True,
    ):
        assert str(path) in warning
        assert place in warning
        assert key in metadata
        with pytest.raises(InconsistentError) as caught:
            metadata[key]
        assert str(caught.value) == warning
        with pytest.raises(InconsistentError):
            metadata.text(key, "default")
        with pytest.raises(InconsistentError):
            metadata.integers(key, 0, 9)


def test_gg04_tensor_names_that_are_not_text(refuse: Refuse) -> None:
    refuse(gguf_bytes([], [tensor(b"\xff")], BLOCK), UnreadableError)
    refuse(gguf_bytes([], [tensor("a\0b")], BLOCK), UnreadableError)


def test_gg04_many_keys_that_are_not_text(tmp_path: Path) -> None:
    path = tmp_path / "text.gguf"
    path.write_bytes(gguf_bytes([pair(f"k{i}", STRING, string(b"\xff")) for i in range(1000)]))
    with GGUFFile.open(path) as file:
        assert len(file.metadata.warnings) == 9
        assert file.metadata.warnings[-1] == f"992 more keys of {path} cannot be read"


@pytest.mark.parametrize("item_type", [U8, U32, U64, STRING, BOOL])
def test_gg05_array_lengths(refuse: Refuse, item_type: int) -> None:
    for count in (1 << 40, (1 << 64) - 1):
        with memory_limit(MEBIBYTE):
            assert f"{count} items" in refuse(gguf_bytes([array("x", item_type, count, b"")]), LimitError)
    with memory_limit(MEBIBYTE):
        refuse(gguf_bytes([array("x", item_type, 1 << 20, b"")]), TruncatedError)


def test_gg05_nested_arrays(refuse: Refuse) -> None:
    refuse(gguf_bytes([array("x", ARRAY, 1, u32(U8) + u64(1) + b"\1")]), LimitError)
    refuse(gguf_bytes([pair("x", ARRAY, (u32(ARRAY) + u64(1)) * 2000)]), LimitError)


@pytest.mark.parametrize("value_type", [13, 250, (1 << 32) - 1])
def test_gg06_unknown_value_types(refuse: Refuse, value_type: int) -> None:
    refuse(gguf_bytes([pair("x", value_type, bytes(8))]), UnsupportedError)
    refuse(gguf_bytes([array("x", value_type, 1, bytes(8))]), UnsupportedError)


def test_gg06_duplicate_keys(refuse: Refuse) -> None:
    assert "some.key" in refuse(gguf_bytes([VALUE, VALUE]), DuplicateError)


@pytest.mark.parametrize("byte", [2, 255])
def test_gg06_bools(tmp_path: Path, byte: int) -> None:
    path = tmp_path / "bools.gguf"
    pairs = [pair("x", BOOL, bytes([byte])), array("y", BOOL, 2, bytes([1, byte])), VALUE]
    path.write_bytes(gguf_bytes(pairs))
    with GGUFFile.open(path) as file:
        metadata = file.metadata
    assert len(metadata.warnings) == 2
    assert metadata["some.key"] == 1
    with pytest.raises(InconsistentError, match=r"x at byte .*neither 0 nor 1"):
        metadata.flag("x", default=True)
    with pytest.raises(InconsistentError, match=r"y at byte .*neither 0 nor 1"):
        metadata.flags("y")


@pytest.mark.parametrize("alignment", [0, 1, 3, 4, 13, 24, 1 << 17, 1 << 31])
def test_gg07_alignment_values(refuse: Refuse, alignment: int) -> None:
    content = gguf_bytes([pair("general.alignment", U32, u32(alignment))], [tensor()], BLOCK)
    assert "general.alignment at byte" in refuse(content, InconsistentError)


@pytest.mark.parametrize(
    ("value_type", "payload"),
    [
        (F32, bytes(4)),
        (STRING, string("32")),
        (BOOL, b"\1"),
        (ARRAY, u32(U32) + u64(1) + u32(32)),
        (I32, u32(1 << 31)),
    ],
)
def test_gg07_alignment_types(refuse: Refuse, value_type: int, payload: bytes) -> None:
    content = gguf_bytes([pair("general.alignment", value_type, payload)], [tensor()], BLOCK)
    assert "general.alignment at byte" in refuse(content, InconsistentError)


@pytest.mark.parametrize("num_dims", [0, 5, 1 << 31, (1 << 32) - 1])
def test_gg08_dimension_counts(refuse: Refuse, num_dims: int) -> None:
    kind = LimitError if num_dims else InconsistentError
    refuse(gguf_bytes([], [tensor(dims=(32, 1, 1, 1, 1), num_dims=num_dims)], BLOCK), kind)


@pytest.mark.parametrize(
    ("dims", "kind"),
    [
        ((0,), InconsistentError),
        ((32, 0, 2), InconsistentError),
        ((1 << 63,), OverflowedError),
        (((1 << 64) - 32, 1), OverflowedError),
        ((1 << 32, 1 << 32), OverflowedError),  # wraps to 0 in 64 bits
        ((1 << 33, 1 << 31, 1 << 31, 1 << 33), OverflowedError),
        ((1 << 62,), OverflowedError),  # the elements fit 63 bits, their bytes do not
        (((1 << 61) - 1,), OverflowedError),  # the bytes fit, rounded up to the alignment they do not
        ((1 << 60,), TruncatedError),
    ],
)
def test_gg08_dimensions(refuse: Refuse, dims: tuple[int, ...], kind: type[ModelFormatError]) -> None:
    assert "a at byte 24" in refuse(gguf_bytes([], [tensor(dims=dims)], BLOCK), kind)


@pytest.mark.parametrize(
    ("offset", "kind"),
    [
        (1, InconsistentError),
        (16, InconsistentError),
        (32, InconsistentError),  # a hole before the first tensor
        (1 << 40, InconsistentError),
        ((1 << 63) - 256, OverflowedError),
        ((1 << 64) - 32, OverflowedError),  # wraps back into the header
    ],
)
def test_gg09_first_offset(refuse: Refuse, offset: int, kind: type[ModelFormatError]) -> None:
    refuse(gguf_bytes([], [tensor(offset=offset)], 4 * BLOCK), kind)


@pytest.mark.parametrize("offset", [0, 128, 224, 264, 288, 1 << 40])
def test_gg09_overlap_misalignment_and_holes(refuse: Refuse, offset: int) -> None:
    content = gguf_bytes([], [tensor("a"), tensor("b", offset=offset)], 8 * BLOCK)
    assert ": b at byte " in refuse(content, InconsistentError)


def test_gg09_unsorted(refuse: Refuse) -> None:
    refuse(gguf_bytes([], [tensor("a", offset=256), tensor("b", offset=0)], 2 * BLOCK), InconsistentError)


def test_gg09_data_one_byte_short(refuse: Refuse) -> None:
    refuse(gguf_bytes([], [tensor("a"), tensor("b", offset=256)], (2 * BLOCK)[:-1]), TruncatedError)
    refuse(gguf_bytes([], [tensor()], b""), TruncatedError)


@pytest.mark.parametrize("type_id", [*FOREIGN_TYPES, 33, 44, 250, (1 << 32) - 1])
def test_gg10_type_ids(refuse: Refuse, type_id: int) -> None:
    message = refuse(gguf_bytes([], [tensor(type_id=type_id)], BLOCK), UnsupportedError)
    assert f"tensor type {type_id}" in message
    assert re.search(r": download an? .* file of this model$", message)


@pytest.mark.parametrize(
    ("type_id", "name", "instead"),
    [
        (40, "NVFP4", "MXFP4"),
        (41, "Q1_0", "Q2_0"),
        (142, "PQ2_0", "Q2_0"),
        (143, "PTQ1_0", "Q2_0"),
        (139, "IQ4_K", "IQ4_XS"),
        (31, "Q4_0_4_4", "Q4_0 file"),
        (250, "unknown", "Q4_K_M"),
    ],
)
def test_gg10_a_refused_type_has_its_name_and_an_alternative(
    refuse: Refuse, type_id: int, name: str, instead: str
) -> None:
    message = refuse(gguf_bytes([], [tensor(type_id=type_id)], BLOCK), UnsupportedError)
    assert name in message
    assert instead in message.partition(": download ")[2]


def test_gg10_a_type_is_read_or_refused() -> None:
    assert not {int(kind) for kind in QuantType} & set(FOREIGN_TYPES)
    known = {int(kind) for kind in gguf.GGMLQuantizationType}
    assert known <= {int(kind) for kind in QuantType} | set(FOREIGN_TYPES)


@pytest.mark.parametrize("order", [("a", "b"), ("b", "a")])
def test_gg10_blocks_of_another_layout_are_refused_by_name(refuse: Refuse, order: tuple[str, str]) -> None:
    """Q2_0 with one scale for 128 values has 34 bytes for them, not 36."""
    num_bytes = {"a": 34 * 32, "b": 34 * 64}
    first, second = order
    tensors = [
        tensor(first, (num_bytes[first] // 34 * 128, 1), type_id=42),
        tensor(second, (num_bytes[second] // 34 * 128, 1), type_id=42, offset=num_bytes[first]),
    ]
    message = refuse(gguf_bytes([], tensors, bytes(34 * 96)), InconsistentError)
    assert f": {second} at byte " in message
    assert "type 42 (Q2_0) has 64 values in 18 bytes" in message
    assert message.endswith("download a Q2_0 file with groups of 64")


@pytest.mark.parametrize(("type_id", "row"), [(2, 48), (8, 1), (12, 128), (14, 32), (23, 255)])
def test_gg10_rows_that_are_not_whole_blocks(refuse: Refuse, type_id: int, row: int) -> None:
    refuse(gguf_bytes([], [tensor(dims=(row, 256), type_id=type_id)], 1024 * BLOCK), InconsistentError)


def test_gg10_a_type_with_another_byte_count(refuse: Refuse) -> None:
    """The type tells the size of a tensor, so a wrong one moves the next tensor or the end of the file."""
    small, large = 8, 0  # Q8_0 and F32
    rows = [tensor("a", type_id=small, offset=0), tensor("b", offset=256)]
    message = refuse(gguf_bytes([], rows, 2 * BLOCK), InconsistentError)
    assert "after one whose type 8 (Q8_0) has 32 values in 34 bytes" in message
    refuse(gguf_bytes([], [tensor("a", (32, 3), type_id=large)], BLOCK), TruncatedError)


def test_gg11_duplicate_tensor(refuse: Refuse) -> None:
    refuse(gguf_bytes([], [tensor("a"), tensor("a", offset=256)], 2 * BLOCK), DuplicateError)


def test_hostile_names_reach_no_terminal(refuse: Refuse) -> None:
    assert "\\x1b" in refuse(gguf_bytes([], [tensor("\x1b[31m" * 20, type_id=99)], BLOCK), UnsupportedError)


def test_gg15_paths_that_are_no_files(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo.gguf"
    os.mkfifo(fifo)
    device = tmp_path / "device.gguf"
    device.symlink_to("/dev/zero")
    for path in (tmp_path, fifo, device, Path("/dev/null")):
        with pytest.raises(UnsupportedError, match=r"give the path of a \.gguf file"):
            GGUFFile.open(path)


def test_gg15_paths_that_lead_nowhere(tmp_path: Path) -> None:
    loop = tmp_path / "loop.gguf"
    loop.symlink_to(loop)
    dangling = tmp_path / "dangling.gguf"
    dangling.symlink_to(tmp_path / "absent.gguf")
    for path in (tmp_path / "absent.gguf", loop, dangling, tmp_path / ("n" * 300), Path("nul\0byte")):
        with pytest.raises(ModelNotFoundError, match=r"Give the path of a \.gguf file"):
            GGUFFile.open(path)


def test_gg15_permission_denied(tmp_path: Path) -> None:
    path = tmp_path / "secret.gguf"
    path.write_bytes(gguf_bytes())
    path.chmod(stat.S_IWUSR)
    user = os.geteuid()
    try:
        if user == 0:
            os.seteuid(65534)  # root may read everything
        with pytest.raises(ModelNotFoundError, match="Permission denied"):
            GGUFFile.open(path)
    finally:
        os.seteuid(user)


def test_a_limit_on_open_files_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"GGUF")

    def refused(*_: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))

    monkeypatch.setattr(os, "open", refused)
    with pytest.raises(OutOfMemoryError, match=r"raise the limit \(ulimit -n\)"):
        GGUFFile.open(path)


@pytest.mark.parametrize("head", [b"", gguf_bytes(num_pairs=1000), gguf_bytes(num_tensors=1000)])
def test_gg15_sparse_terabyte(tmp_path: Path, head: bytes) -> None:
    path = tmp_path / "sparse.gguf"
    path.write_bytes(head)
    os.truncate(path, 1 << 40)
    with memory_limit(16 * MEBIBYTE), pytest.raises(ModelFormatError):
        GGUFFile.open(path)


def test_gg15_sparse_terabyte_of_zeros(tmp_path: Path) -> None:
    """An array of the largest length is valid, and read; the zeros behind it are no key."""
    path = tmp_path / "sparse.gguf"
    path.write_bytes(gguf_bytes([array("x", STRING, MAX_ARRAY_ITEMS, b"")], num_pairs=2))
    os.truncate(path, 1 << 40)
    with memory_limit(256 * MEBIBYTE), pytest.raises(InconsistentError, match="empty key"):
        GGUFFile.open(path)


def test_the_header_has_a_limit(tmp_path: Path) -> None:
    path = tmp_path / "large.gguf"
    array_bytes = 8 * MAX_ARRAY_ITEMS
    count = MAX_HEADER_BYTES // array_bytes + 1
    with path.open("wb") as file:
        file.write(gguf_bytes(num_pairs=count, alignment=1))
        for i in range(count):
            file.write(array(f"x{i}", U64, MAX_ARRAY_ITEMS, b""))
            file.seek(array_bytes, os.SEEK_CUR)
        file.truncate()
    with pytest.raises(LimitError, match="the header would exceed 64 MiB"):
        GGUFFile.open(path)
