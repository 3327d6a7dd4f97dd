"""What a valid file gives: every value, every byte, and a file that can change meanwhile."""

import os
import string as alphabet
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import gguf
import raw_gguf as raw
from builders import SMALL, write_gguf
from coldstream.errors import InconsistentError, LimitError, ModelChangedError
from coldstream.gguf import GGUFFile, Metadata, QuantType, wire

pytestmark = pytest.mark.usefixtures("no_descriptor_leaks")


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf", dims=SMALL, tokenizer=False)[0]


def write(path: Path, *pairs: bytes) -> Path:
    path.write_bytes(raw.gguf_bytes(pairs))
    return path


def test_every_scalar_type(tmp_path: Path) -> None:
    values: list[tuple[int, str, Any]] = [
        (raw.U8, "<B", 255),
        (raw.I8, "<b", -128),
        (raw.U16, "<H", 65535),
        (raw.I16, "<h", -32768),
        (raw.U32, "<I", 2**32 - 1),
        (raw.I32, "<i", -(2**31)),
        (raw.F32, "<f", 0.5),
        (raw.BOOL, "<?", True),
        (raw.U64, "<Q", 2**64 - 1),
        (raw.I64, "<q", -(2**63)),
        (raw.F64, "<d", 1e300),
    ]
    pairs = [raw.pair(f"key {kind}", kind, struct.pack(layout, value)) for kind, layout, value in values]
    pairs.append(raw.pair("text", raw.STRING, raw.string("schön 漢字 \U0001f9ca")))
    with GGUFFile.open(write(tmp_path / "scalars.gguf", *pairs)) as file:
        for kind, _, value in values:
            assert file.metadata[f"key {kind}"] == value
            assert type(file.metadata[f"key {kind}"]) is type(value)
        assert file.metadata["text"] == "schön 漢字 \U0001f9ca"


@pytest.mark.parametrize("first_chunk", [1, 1 << 20])
def test_arrays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first_chunk: int) -> None:
    """Also when the header arrives in small pieces, so that strings and numbers straddle them."""
    monkeypatch.setattr(wire, "_FIRST_CHUNK_BYTES", first_chunk)
    strings = ["", "a", "é" * 300, "x" * 5000, "", "漢", *(f"token {i}" for i in range(2000)), ""]
    pairs = [
        raw.array("u16", raw.U16, 3, struct.pack("<3H", 1, 2, 65535)),
        raw.array("strings", raw.STRING, len(strings), b"".join(map(raw.string, strings))),
        raw.array("bools", raw.BOOL, 2, b"\1\0"),
        raw.array("f64", raw.F64, 2, struct.pack("<2d", 0.1, -1e300)),
        raw.array("no strings", raw.STRING, 0, b""),
        raw.array("no numbers", raw.I32, 0, b""),
        raw.pair("last", raw.U8, b"\7"),
    ]
    with GGUFFile.open(write(tmp_path / "arrays.gguf", *pairs)) as file:
        metadata = file.metadata
    assert metadata["strings"] == strings
    assert metadata["no strings"] == []
    expected = {"u16": np.uint16, "bools": np.bool_, "f64": np.float64, "no numbers": np.int32}
    for key, dtype in expected.items():
        array = metadata[key]
        assert isinstance(array, np.ndarray)
        assert array.dtype == dtype
        assert (array.ndim, array.flags.writeable) == (1, False)
    assert np.array_equal(metadata["u16"], [1, 2, 65535])
    assert np.array_equal(metadata["bools"], [True, False])
    assert np.array_equal(metadata["f64"], [0.1, -1e300])
    assert list(metadata) == ["u16", "strings", "bools", "f64", "no strings", "no numbers", "last"]


def test_tensors(tmp_path: Path) -> None:
    data = bytes(range(256)) * 8
    records = [
        raw.tensor("scalars", (3,), 0, 0),
        raw.tensor("matrix", (64, 5), 8, 64),
        raw.tensor("experts", (32, 2, 3), 2, 448),
        raw.tensor("four", (2, 1, 3, 1), 1, 576),
    ]
    pairs = [raw.pair("general.alignment", raw.U32, raw.u32(64))]
    path = tmp_path / "tensors.gguf"
    path.write_bytes(raw.gguf_bytes(pairs, records, data, alignment=64))
    expected = {
        "scalars": ((3,), QuantType.F32, 0, 12),
        "matrix": ((5, 64), QuantType.Q8_0, 64, 340),
        "experts": ((3, 2, 32), QuantType.Q4_0, 448, 108),
        "four": ((1, 3, 1, 2), QuantType.F16, 576, 12),
    }
    with GGUFFile.open(path) as file:
        assert list(file.tensors) == list(expected)
        start = file.tensors["scalars"].offset
        assert start % 64 == 0
        for name, (shape, quant_type, offset, num_bytes) in expected.items():
            info = file.tensors[name]
            assert (info.name, info.shape, info.quant_type, info.shard) == (name, shape, quant_type, 0)
            assert (info.offset, info.num_bytes) == (start + offset, num_bytes)
            assert file.read(info).tobytes() == data[offset : offset + num_bytes]
            assert os.pread(file.descriptor(0), num_bytes, info.offset) == data[offset : offset + num_bytes]


def test_a_read_that_brings_less_than_asked_for_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = np.random.default_rng(0).bytes(64 * 34)
    path = tmp_path / "a.gguf"
    path.write_bytes(raw.gguf_bytes([], [raw.tensor("a", (32, 64), 8, 0)], data))
    read, calls = os.preadv, []

    def short(descriptor: int, views: list[memoryview], offset: int) -> int:
        calls.append(offset)
        return read(descriptor, [views[0][:999]], offset)

    monkeypatch.setattr(os, "preadv", short)
    with GGUFFile.open(path) as file:
        assert file.read(file.tensors["a"]).tobytes() == data
    assert len(calls) == 3


def test_version_2_and_bytes_behind_the_last_tensor(tmp_path: Path) -> None:
    path = tmp_path / "old.gguf"
    path.write_bytes(raw.gguf_bytes([], [raw.tensor()], bytes(1000), version=2))
    with GGUFFile.open(path) as file:
        assert file.tensors["a"].num_bytes == 256
        assert file.num_bytes == path.stat().st_size


def test_a_link_to_a_model_opens(tiny: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.gguf"
    link.symlink_to(tiny)
    with GGUFFile.open(str(link)) as file:
        assert file.paths == (link,)


def test_close(tiny: Path) -> None:
    file = GGUFFile.open(tiny)
    info = file.tensors["token_embd.weight"]
    data = file.read(info)
    file.close()
    file.close()
    assert data.any()
    for use in (lambda: file.read(info), lambda: file.descriptor(0)):
        with pytest.raises(ValueError, match="is closed"):
            use()


def test_a_file_that_shrinks_in_use(tiny: Path) -> None:
    with GGUFFile.open(tiny) as file:
        info = list(file.tensors.values())[-1]
        os.truncate(tiny, info.offset + info.num_bytes - 1)
        with pytest.raises(ModelChangedError, match=f"{info.name} at byte .*: the file ends 1 bytes early"):
            file.read(info)
        assert file.read(file.tensors["token_embd.weight"]).any()


def test_what_is_kept_is_read_once(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And cannot be written, as the next one gets the same array."""
    with GGUFFile.open(tiny) as file:
        info = file.tensors["output_norm.weight"]
        expected = file.read(info)
        kept = file.read_kept(info)
        monkeypatch.delattr(os, "preadv")
        assert file.read_kept(info) is kept
        assert np.array_equal(kept, expected)
        with pytest.raises(ValueError, match="read-only"):
            kept[0] = 1
    with pytest.raises(ValueError, match="is closed"):
        file.read_kept(info)


def test_a_file_that_is_deleted_in_use_stays_readable(tiny: Path) -> None:
    with GGUFFile.open(tiny) as file:
        tiny.unlink()
        assert file.changed() == (tiny,)
        assert file.read(file.tensors["token_embd.weight"]).any()


def test_changed(tmp_path: Path) -> None:
    parts = write_gguf(tmp_path / "tiny.gguf", dims=SMALL, tokenizer=False, num_shards=2)
    with GGUFFile.open(parts[0]) as file:
        assert file.changed() == ()
        before = parts[1].stat()
        while parts[1].stat().st_ctime_ns == before.st_ctime_ns:  # until the file system's clock has ticked
            with parts[1].open("r+b") as stream:
                stream.seek(-1, os.SEEK_END)
                stream.write(b"!")
            os.utime(parts[1], ns=(before.st_atime_ns, before.st_mtime_ns))
        assert file.changed() == (parts[1],)
        os.utime(parts[0], ns=(0, 0))
        assert file.changed() == tuple(parts)


def test_fl03_a_part_that_was_written_to_is_named_for_ever(tmp_path: Path) -> None:
    parts = write_gguf(tmp_path / "tiny.gguf", dims=SMALL, tokenizer=False, num_shards=2)
    with GGUFFile.open(parts[0]) as file:
        file.check_unchanged()
        content, times = parts[1].read_bytes(), parts[1].stat()
        with parts[1].open("ab") as stream:
            stream.write(b"x")
        for _ in range(2):
            assert file.rewritten() == (parts[1],)
            with pytest.raises(
                ModelChangedError, match=f"{parts[1].name} was written to.* load the model again"
            ):
                file.check_unchanged()
            parts[1].write_bytes(content)
            os.utime(parts[1], ns=(times.st_atime_ns, times.st_mtime_ns))


def test_fingerprint(tmp_path: Path) -> None:
    def fingerprint(name: str, **options: Any) -> str:
        with GGUFFile.open(write_gguf(tmp_path / name, dims=SMALL, tokenizer=False, **options)[0]) as file:
            return file.fingerprint

    first = fingerprint("a.gguf")
    assert len(first) == 32
    assert fingerprint("b.gguf") == first
    assert fingerprint("c.gguf", quant="F16") != first
    assert fingerprint("d.gguf", num_shards=2) != first


def test_metadata_getters(tmp_path: Path) -> None:
    pairs = [
        raw.pair("count", raw.U32, raw.u32(7)),
        raw.pair("eps", raw.F32, struct.pack("<f", float("nan"))),
        raw.pair("flag", raw.BOOL, b"\1"),
        raw.array("counts", raw.I32, 2, struct.pack("<2i", 3, -4)),
        raw.array("flags", raw.BOOL, 2, b"\1\0"),
    ]
    with GGUFFile.open(write(tmp_path / "keys.gguf", *pairs)) as file:
        metadata = file.metadata
    assert metadata.integer("count", 0, 7) == 7
    assert metadata.flag("flag")
    assert metadata.flags("flags") == (True, False)
    assert metadata.integers("counts", -4, 3) == (3, -4)
    assert metadata.integers("count", 0, 9) == (7,)
    offset = (tmp_path / "keys.gguf").read_bytes().index(raw.u32(7))
    with pytest.raises(LimitError, match=rf"keys\.gguf: count at byte {offset}: 7, expected 0 to 6"):
        metadata.integer("count", 0, 6)
    with pytest.raises(InconsistentError, match=r"count at byte .*: 7, expected 8 to 9"):
        metadata.integer("count", 8, 9)
    with pytest.raises(InconsistentError, match=r"eps at byte .*: nan, expected 0 to 1"):
        metadata.number("eps", 0, 1)
    with pytest.raises(InconsistentError, match="absent: missing, expected a string"):
        metadata.text("absent")
    with pytest.raises(InconsistentError, match=r"flag at byte .*: a bool, expected an integer"):
        metadata.integer("flag", 0, 1)
    with pytest.raises(InconsistentError, match=r"counts at byte .*: -4, expected 0 to 9"):
        metadata.integers("counts", 0, 9)
    with pytest.raises(InconsistentError, match=r"flags at byte .*: an array of bool, expected integers"):
        metadata.integers("flags", 0, 9)
    with pytest.raises(InconsistentError, match=r"counts at byte .*, expected an array of bools"):
        metadata.flags("counts")


NAMES = st.text(alphabet.ascii_letters + "._é漢", max_size=20).map(
    "x.{}".format
)  # never a key with a meaning
SCALARS = st.one_of(
    st.tuples(st.just("uint8"), st.integers(0, 2**8 - 1)),
    st.tuples(st.just("int16"), st.integers(-(2**15), 2**15 - 1)),
    st.tuples(st.just("uint32"), st.integers(0, 2**32 - 1)),
    st.tuples(st.just("int64"), st.integers(-(2**63), 2**63 - 1)),
    st.tuples(st.just("uint64"), st.integers(0, 2**64 - 1)),
    st.tuples(st.just("float32"), st.floats(width=32)),
    st.tuples(st.just("float64"), st.floats()),
    st.tuples(st.just("bool"), st.booleans()),
    st.tuples(st.just("string"), st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))),
)
ARRAYS = st.tuples(
    st.just("array"),
    st.one_of(
        st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1),
        st.lists(st.floats(width=32), min_size=1),
        st.lists(st.booleans(), min_size=1),
        st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])), min_size=1),
    ),
)
TENSORS = st.tuples(
    st.sampled_from(["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_K", "Q6_K", "IQ2_XXS", "MXFP4"]),
    st.lists(st.integers(1, 3), min_size=1, max_size=4),
)


@given(
    values=st.dictionaries(NAMES, st.one_of(SCALARS, ARRAYS), max_size=8),
    tensors=st.dictionaries(NAMES, TENSORS, max_size=6),
    alignment=st.sampled_from([8, 32, 256]),
    seed=st.integers(0, 2**32 - 1),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_gg18_differential(
    tmp_path: Path,
    values: dict[str, tuple[str, Any]],
    tensors: dict[str, tuple[str, list[int]]],
    alignment: int,
    seed: int,
) -> None:
    """Random valid files of the `gguf` writer: its reader and ours see the same."""
    path = tmp_path / "random.gguf"
    writer = gguf.GGUFWriter(path, "random")
    writer.add_custom_alignment(alignment)
    for key, (kind, value) in values.items():
        getattr(writer, f"add_{kind}")(key, value)
    rng = np.random.default_rng(seed)
    for name, (type_name, shape) in tensors.items():
        raw_type = gguf.GGMLQuantizationType[type_name]
        row_bytes = shape[-1] * gguf.GGML_QUANT_SIZES[raw_type][1]
        writer.add_tensor(name, rng.integers(0, 256, (*shape[:-1], row_bytes), np.uint8), raw_dtype=raw_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    theirs = gguf.GGUFReader(path)
    with GGUFFile.open(path) as ours:
        keys = [key for key in theirs.fields if not key.startswith("GGUF.")]
        assert list(ours.metadata) == keys
        for key in keys:
            np.testing.assert_equal(as_plain(ours.metadata[key]), theirs.fields[key].contents())
        assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
        for tensor in theirs.tensors:
            info = ours.tensors[tensor.name]
            assert info.shape == tuple(int(size) for size in reversed(tensor.shape))
            assert int(info.quant_type) == int(tensor.tensor_type)
            assert (info.offset, info.num_bytes) == (tensor.data_offset, tensor.n_bytes)
            assert ours.read(info).tobytes() == tensor.data.tobytes()


def as_plain(value: object) -> object:
    return value.tolist() if isinstance(value, np.ndarray) else value


def test_metadata_without_a_file() -> None:
    metadata = Metadata({"a": 1}, {})
    assert dict(metadata) == {"a": 1}
    with pytest.raises(LimitError, match="metadata: a: 1, expected -1 to 0"):
        metadata.integer("a", -1, 0)
