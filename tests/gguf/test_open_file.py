"""Which changes of an open file may have changed its bytes."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from coldstream.gguf.open_file import FileState, OpenFile
from file_changes import await_tick, overwrite

STATUS = range(100, 110)  # mode, inode, device, names, user, group, size, and times in seconds


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(8192))
    return path


@pytest.fixture
def file(path: Path) -> Iterator[OpenFile]:
    with path.open("rb") as stream:
        yield OpenFile(path, stream.fileno(), os.fstat(stream.fileno()))


def append(path: Path) -> None:
    with path.open("ab") as stream:
        stream.write(b"x")


CONTENT: dict[str, Callable[[Path], None]] = {
    "written": lambda path: overwrite(path, 100),
    "written, the time put back": lambda path: overwrite(path, 100, keeps_time=True),
    "longer": append,
    "shorter": lambda path: os.truncate(path, 8191),
    "empty": lambda path: os.truncate(path, 0),
    "touched": lambda path: os.utime(path),
}
NAMES: dict[str, Callable[[Path], object]] = {
    "linked": lambda path: path.with_name("link").hardlink_to(path),
    "renamed": lambda path: path.rename(path.with_name("other")),
    "deleted": lambda path: path.unlink(),
    "mode": lambda path: path.chmod(0o640),
    "replaced": lambda path: path.with_name("new").rename(path),
    "read": lambda path: path.read_bytes(),
}


@pytest.mark.parametrize("change", CONTENT)
def test_fl03_bytes_that_may_be_others(change: str, path: Path, file: OpenFile) -> None:
    assert not file.is_rewritten()
    await_tick(path)
    CONTENT[change](path)
    assert file.is_rewritten()
    path.chmod(0o600)
    assert file.is_rewritten(), "what explains a change does not undo one before it"


@pytest.mark.parametrize("change", NAMES)
def test_fl02_bytes_that_are_the_same(change: str, path: Path, file: OpenFile) -> None:
    path.with_name("new").write_bytes(bytes(8192))
    path.with_name("kept").hardlink_to(path)
    assert not file.is_rewritten()
    await_tick(path)
    NAMES[change](path)
    assert not file.is_rewritten()
    assert not file.is_rewritten()
    overwrite(path.with_name("kept"), 100, keeps_time=True)
    assert file.is_rewritten(), "one explanation serves one change"


def test_a_relative_path_is_the_same_file_from_another_directory(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(path.parent)
    with open(path.name, "rb") as stream:
        file = OpenFile(Path(path.name), stream.fileno(), os.fstat(stream.fileno()))
        monkeypatch.chdir("/")
        overwrite(path, 100, keeps_time=True)
        assert file.is_rewritten()


@pytest.mark.parametrize(
    ("index", "part"),
    [(0, "others"), (1, "content"), (2, "content"), (3, "others"), (4, "others"), (5, "others")],
)
def test_device_and_inode_say_which_file_it_is(index: int, part: str) -> None:
    other = [value + (place == index) for place, value in enumerate(STATUS)]
    before, after = FileState.of(os.stat_result(STATUS)), FileState.of(os.stat_result(other))
    changed = {name for name in vars(before) if getattr(before, name) != getattr(after, name)}
    assert changed == {part}
