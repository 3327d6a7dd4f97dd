"""Models in several files: found by name, checked to belong together, and never read from elsewhere."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from builders import SMALL, make_model, write_gguf, write_model
from coldstream.errors import (
    DuplicateError,
    InconsistentError,
    LimitError,
    ModelFormatError,
    ModelNotFoundError,
)
from coldstream.gguf import GGUFFile
from raw_gguf import STRING, U16, U32, gguf_bytes, pair, string, tensor, u32

pytestmark = pytest.mark.usefixtures("no_descriptor_leaks")


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    """A model in three parts, in its own directory."""
    home = tmp_path / "model"
    home.mkdir()
    return write_gguf(home / "tiny.gguf", dims=SMALL, tokenizer=False, num_shards=3)


def part(number: int, count: int, total: int, name: str, *more: bytes) -> bytes:
    """A part of a split model that holds one tensor."""
    pairs = [
        pair("split.no", U16, number.to_bytes(2, "little")),
        pair("split.count", U16, count.to_bytes(2, "little")),
        pair("split.tensors.count", U32, u32(total)),
        *more,
    ]
    return gguf_bytes(pairs, [tensor(name)], bytes(256))


def write_parts(directory: Path, *contents: bytes) -> Path:
    """Writes `contents` under the names of a split model and returns the first path."""
    paths = [directory / f"m-{i + 1:05}-of-{len(contents):05}.gguf" for i in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    return paths[0]


def test_any_part_opens_the_whole_model(parts: list[Path], tmp_path: Path) -> None:
    whole = make_model(dims=SMALL, tokenizer=False)
    with GGUFFile.open(write_model(tmp_path / "whole.gguf", whole)[0]) as single:
        expected = {name: single.read(info) for name, info in single.tensors.items()}
    fingerprints = set()
    for path in parts:
        with GGUFFile.open(path) as file:
            assert file.paths == tuple(parts)
            assert list(file.tensors) == list(expected)
            assert {info.shard for info in file.tensors.values()} == {0, 1, 2}
            assert file.num_bytes == sum(file.shard_bytes) == sum(p.stat().st_size for p in parts)
            assert file.metadata["general.architecture"] == "qwen35moe"
            for name, info in file.tensors.items():
                assert np.array_equal(file.read(info), expected[name])
            fingerprints.add(file.fingerprint)
    assert len(fingerprints) == 1


def test_a_first_part_without_tensors(tmp_path: Path) -> None:
    pairs = [
        pair("general.architecture", STRING, string("qwen35")),
        pair("split.no", U16, b"\0\0"),
        pair("split.count", U16, b"\2\0"),
        pair("split.tensors.count", U32, u32(1)),
    ]
    with GGUFFile.open(write_parts(tmp_path, gguf_bytes(pairs), part(1, 2, 1, "a"))) as file:
        assert file.tensors["a"].shard == 1


def test_gg14_missing_part(parts: list[Path]) -> None:
    parts[1].unlink()
    with pytest.raises(ModelNotFoundError, match=r"tiny-00002-of-00003\.gguf: No such file"):
        GGUFFile.open(parts[0])


def test_gg14_one_part_twice(parts: list[Path]) -> None:
    shutil.copy(parts[0], parts[1])
    with pytest.raises(InconsistentError, match=r"split\.no at byte \d+: 0, expected 1"):
        GGUFFile.open(parts[2])


@pytest.mark.parametrize(
    ("second", "kind"),
    [
        (part(1, 3, 2, "b"), InconsistentError),  # part of a model in three files
        (part(1, 1, 2, "b"), InconsistentError),
        (part(1, 2, 3, "b"), InconsistentError),  # of one with more tensors
        (part(0, 2, 2, "b"), InconsistentError),
        (part(7, 2, 2, "b"), InconsistentError),
        (part(1, 2, 2, "a"), DuplicateError),
        (part(1, 2, 2, "b", pair("general.architecture", STRING, string("llama"))), InconsistentError),
        (gguf_bytes([], [tensor("b")], bytes(256)), InconsistentError),  # not split at all
    ],
)
def test_gg14_foreign_part(tmp_path: Path, second: bytes, kind: type[ModelFormatError]) -> None:
    first = part(0, 2, 2, "a", pair("general.architecture", STRING, string("qwen35")))
    with pytest.raises(kind):
        GGUFFile.open(write_parts(tmp_path, first, second))


@pytest.mark.parametrize(
    "name",
    ["m.gguf", "m-00001-of-00003.gguf", "m-00000-of-00002.gguf", "m-00003-of-00002.gguf", "m-1-of-2.gguf"],
)
def test_gg14_name_and_metadata_disagree(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(part(0, 2, 2, "a"))
    with pytest.raises(InconsistentError, match=r"split\.count at byte"):
        GGUFFile.open(path)


def test_gg14_a_split_name_without_split_metadata(tmp_path: Path) -> None:
    path = tmp_path / "m-00001-of-00002.gguf"
    path.write_bytes(gguf_bytes([], [tensor()], bytes(256)))
    with pytest.raises(InconsistentError, match=r"split\.count: 1, but the file is named m-00001-of-00002"):
        GGUFFile.open(path)
    single = path.rename(tmp_path / "m-00001-of-00001.gguf")
    with GGUFFile.open(single) as file:
        assert file.paths == (single,)


def test_gg14_too_many_parts(tmp_path: Path) -> None:
    path = tmp_path / "m-00001-of-60000.gguf"
    path.write_bytes(part(0, 60000, 1, "a"))
    with pytest.raises(LimitError, match=r"split\.count at byte \d+: 60000"):
        GGUFFile.open(path)


def outside(parts: list[Path], tmp_path: Path) -> Path:
    """Moves the second part to another directory and returns its new path."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    return parts[1].rename(elsewhere / parts[1].name)


@pytest.mark.parametrize("make_target", [lambda path: path, lambda path: Path("..", *path.parts[-2:])])
def test_gg14_a_link_out_of_the_directory(
    parts: list[Path], tmp_path: Path, make_target: Callable[[Path], Path]
) -> None:
    """An absolute link and one with `../`: valid parts both, but not where the model is."""
    parts[1].symlink_to(make_target(outside(parts, tmp_path)))
    assert parts[1].exists()
    for path in (parts[0], parts[2]):
        with pytest.raises(InconsistentError, match="links to another directory"):
            GGUFFile.open(path)


def test_gg14_a_link_to_a_linked_directory(parts: list[Path], tmp_path: Path) -> None:
    """The directory itself may be a link; a part may not reach out of it through another one."""
    alias = tmp_path / "alias"
    alias.symlink_to(parts[0].parent)
    with GGUFFile.open(alias / parts[0].name) as file:
        assert len(file.paths) == 3
    target = outside(parts, tmp_path)
    (parts[0].parent / "sub").symlink_to(target.parent)
    parts[1].symlink_to(Path("sub") / target.name)
    with pytest.raises(InconsistentError, match="links to another directory"):
        GGUFFile.open(alias / parts[0].name)


def test_gg14_link_loop(parts: list[Path]) -> None:
    parts[1].unlink()
    parts[1].symlink_to(parts[1].name)
    with pytest.raises(ModelNotFoundError):
        GGUFFile.open(parts[0])


def test_gg14_the_name_never_comes_from_the_file(tmp_path: Path) -> None:
    """Nothing that a file says, only the name it was opened by, leads to another file."""
    secret = tmp_path / "secret-00002-of-00002.gguf"
    secret.write_bytes(part(1, 2, 2, "b"))
    home = tmp_path / "home"
    home.mkdir()
    name = pair("general.name", STRING, string("../secret"))
    (home / "m-00001-of-00002.gguf").write_bytes(part(0, 2, 2, "a", name))
    with pytest.raises(ModelNotFoundError, match=r"home/m-00002-of-00002\.gguf"):
        GGUFFile.open(home / "m-00001-of-00002.gguf")


def test_hub_cache_layout(parts: list[Path], tmp_path: Path) -> None:
    """Hub caches keep bytes in blobs/ under hashes, and snapshots/REVISION/ full of relative links."""
    blobs = tmp_path / "models--org--repo" / "blobs"
    snapshot = tmp_path / "models--org--repo" / "snapshots" / "0123abcd" / "Q8_0"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    links = []
    for index, path in enumerate(parts):
        blob = path.rename(blobs / f"{index:064x}")
        links.append(snapshot / path.name)
        links[-1].symlink_to(os.path.relpath(blob, snapshot))
    for link in links:
        with GGUFFile.open(link) as file:
            assert file.paths == tuple(links)

    foreign = tmp_path / "models--other--repo" / "blobs"
    foreign.mkdir(parents=True)
    moved = Path(os.path.realpath(links[1])).rename(foreign / "blob")
    links[1].unlink()
    links[1].symlink_to(os.path.relpath(moved, snapshot))
    with pytest.raises(InconsistentError, match="links to another directory"):
        GGUFFile.open(links[0])
