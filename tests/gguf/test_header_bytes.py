"""Headers of GGUF files that are written: read back by this package and by the official one."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gguf
from coldstream.gguf.header_bytes import MetaValue, NewTensor, header_bytes
from coldstream.gguf.quant_types import QuantType
from coldstream.gguf.reader import GGUFFile

VALUES: dict[str, MetaValue] = {
    "general.architecture": "dflash",
    "a.text": "Ünïcode, and a longer one " * 9,
    "a.flag": True,
    "a.no": False,
    "a.integer": 2**32 - 1,
    "a.single": 0.5,
    "a.double": 0.1,
    "a.integers": [1, -2, 2**31 - 1],
    "a.flags": [True, False, True],
}
FLOATS = (QuantType.F32, QuantType.F16, QuantType.BF16)
TENSORS = st.lists(
    st.tuples(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.sampled_from(FLOATS)), max_size=6
)


def write(path: Path, tensors: list[NewTensor]) -> list[bytes]:
    """A file with `VALUES` and random data; the data of each tensor."""
    header, places = header_bytes(VALUES, tensors)
    rng = np.random.default_rng(len(tensors))
    contents = [rng.bytes(tensor.num_bytes) for tensor in tensors]
    with open(path, "wb") as file:
        file.write(header)
        for place, content in zip(places, contents, strict=True):
            file.write(bytes(place.offset - file.tell()))
            file.write(content)
    return contents


@given(TENSORS)
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, shapes: Any) -> None:
    path = tmp_path_factory.mktemp("header") / "f.gguf"
    tensors = [NewTensor(f"t{i}", tuple(shape), kind) for i, (shape, kind) in enumerate(shapes)]
    contents = write(path, tensors)
    with GGUFFile.open(path) as file:
        assert list(file.tensors) == [tensor.name for tensor in tensors]
        for tensor, content in zip(tensors, contents, strict=True):
            info = file.tensors[tensor.name]
            assert (info.shape, info.quant_type) == (tensor.shape, tensor.quant_type)
            assert file.read(info).tobytes() == content
        for key, value in VALUES.items():
            found = file.metadata[key]
            assert found.tolist() == value if isinstance(found, np.ndarray) else found == value


def test_the_official_reader_reads_it_too(tmp_path: Path) -> None:
    tensors = [NewTensor("a", (2, 3), QuantType.F32), NewTensor("b", (2, 1, 5), QuantType.F16)]
    contents = write(tmp_path / "f.gguf", tensors)
    reader = gguf.GGUFReader(tmp_path / "f.gguf")
    for key, value in VALUES.items():
        field = reader.get_field(key)
        assert field is not None
        assert field.contents() == value
    types = {key: reader.fields[key].types[0].name for key in ("a.single", "a.double", "a.integer")}
    assert types == {"a.single": "FLOAT32", "a.double": "FLOAT64", "a.integer": "UINT32"}
    for tensor, read, content in zip(tensors, reader.tensors, contents, strict=True):
        assert (read.name, tuple(read.shape.tolist())) == (tensor.name, tensor.shape[::-1])
        assert read.data.tobytes() == content


@pytest.mark.parametrize("value", [-1, 2**32, [2**31]])
def test_integers_without_a_place_are_errors(value: MetaValue) -> None:
    with pytest.raises(struct.error):
        header_bytes({"a": value}, [])
