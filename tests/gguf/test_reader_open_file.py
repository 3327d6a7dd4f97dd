"""Which changes of an open file may have changed its bytes."""

import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from coldstream.gguf.reader import FileState, OpenFile
from coldstream.gguf.write_watch import MODIFY, OVERFLOW, WriteWatch
from file_changes import await_tick, overwrite

STATUS = range(100, 110)  # mode, inode, device, names, user, group, size, and times in seconds
LARGE = 40 << 20  # more bytes than the samples are


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(8192))
    return path


@pytest.fixture(params=["heard", "unheard"])
def watch(request: pytest.FixtureRequest) -> Iterator[WriteWatch]:
    """One that hears, and one of a system that does not tell."""
    watch = WriteWatch()
    if request.param == "unheard":
        watch.close()
    yield watch
    watch.close()


@pytest.fixture
def file(path: Path, watch: WriteWatch) -> Iterator[OpenFile]:
    with path.open("rb") as stream:
        yield OpenFile(path, stream.fileno(), os.fstat(stream.fileno()), watch)


def append(path: Path) -> None:
    with path.open("ab") as stream:
        stream.write(b"x")


def overwrite_mapped(path: Path) -> None:
    """Through a mapping, and the time of writing is put back."""
    before = path.stat()
    with path.open("r+b") as stream, mmap.mmap(stream.fileno(), 0) as mapped:
        mapped[100] ^= 1
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def overwrite_and_explain(path: Path) -> None:
    """Written with the time put back, and a link is made meanwhile."""
    overwrite(path, 100, keeps_time=True)
    path.with_name("other link").hardlink_to(path)


def touch_access_time(path: Path) -> None:
    """As `touch -a`, which opens the file for writing."""
    with path.open("r+b") as stream:
        os.utime(stream.fileno(), ns=(1, path.stat().st_mtime_ns))


CONTENT: dict[str, Callable[[Path], None]] = {
    "written": lambda path: overwrite(path, 100),
    "written, the time put back": lambda path: overwrite(path, 100, keeps_time=True),
    "written through a mapping": overwrite_mapped,
    "longer": append,
    "shorter": lambda path: os.truncate(path, 8191),
    "empty": lambda path: os.truncate(path, 0),
    "touched": lambda path: os.utime(path),
}
ATTRIBUTES: dict[str, Callable[[Path], object]] = {
    "extended attribute": lambda path: os.setxattr(path, "user.label", b"x"),
    "time of access": lambda path: os.utime(path, ns=(1, path.stat().st_mtime_ns)),
    "time of access, opened for writing": touch_access_time,
    "owner set to what it is": lambda path: os.chown(path, -1, path.stat().st_gid),
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


@pytest.mark.parametrize("change", NAMES | ATTRIBUTES)
def test_fl02_bytes_that_are_the_same(change: str, path: Path, file: OpenFile) -> None:
    path.with_name("new").write_bytes(bytes(8192))
    path.with_name("kept").hardlink_to(path)
    assert not file.is_rewritten()
    await_tick(path)
    (NAMES | ATTRIBUTES)[change](path)
    assert not file.is_rewritten()
    assert not file.is_rewritten()
    overwrite(path.with_name("kept"), 100, keeps_time=True)
    assert file.is_rewritten(), "one explanation serves one change"


@pytest.mark.parametrize("watch", ["heard"], indirect=True)
def test_fl03_an_explanation_does_not_hide_a_write_that_was_heard(path: Path, file: OpenFile) -> None:
    assert not file.is_rewritten()
    overwrite_and_explain(path)
    assert file.is_rewritten()


@pytest.mark.parametrize("watch", ["heard"], indirect=True)
def test_fl03_a_byte_between_the_samples_whose_time_was_put_back(tmp_path: Path, watch: WriteWatch) -> None:
    path = tmp_path / "large.gguf"
    path.touch()
    os.truncate(path, LARGE)
    with path.open("rb") as stream:
        file = OpenFile(path, stream.fileno(), os.fstat(stream.fileno()), watch)
        assert not file.is_rewritten()
        for change in ATTRIBUTES.values():
            await_tick(path)
            change(path)
            assert not file.is_rewritten()
        overwrite(path, LARGE // 2 + (150 << 10), 1, keeps_time=True)
        assert file.is_rewritten()


@pytest.mark.parametrize("offset", [0, LARGE // 510, LARGE - 1])
def test_fl03_without_news_samples_are_compared(tmp_path: Path, offset: int) -> None:
    """Of the beginning, the end, and places in between."""
    path = tmp_path / "large.gguf"
    path.touch()
    os.truncate(path, LARGE)
    deaf = WriteWatch()
    deaf.close()
    with path.open("rb") as stream:
        file = OpenFile(path, stream.fileno(), os.fstat(stream.fileno()), deaf)
        assert not file.is_rewritten()
        overwrite(path, offset, 1 if offset == LARGE - 1 else 1 << 17, keeps_time=True)
        assert file.is_rewritten()


def test_fl03_what_is_written_before_the_first_check(path: Path, file: OpenFile) -> None:
    """There are no samples yet; attributes alone are no write if the system tells."""
    overwrite(path, 100, keeps_time=True)
    assert file.is_rewritten()


@pytest.mark.parametrize("watch", ["heard"], indirect=True)
def test_news_that_were_lost_say_nothing(path: Path, file: OpenFile, watch: WriteWatch) -> None:
    """More changes than the queue holds: samples are compared."""
    assert not file.is_rewritten()
    other = path.with_name("other")
    other.touch()
    with other.open("rb") as stream:
        watch.add(stream.fileno())
        limit = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
        for index in range(limit // 2 + 2):  # changes in turn: equal ones are reported once
            os.utime(path if index == 0 else other, ns=(index, path.stat().st_mtime_ns))
            append(other)
        overwrite(path, 100, keeps_time=True)
        assert file.is_rewritten()


def test_what_a_watch_hears(path: Path) -> None:
    watch = WriteWatch()
    with path.open("rb") as stream:
        first = watch.add(stream.fileno())
        assert watch.take(first) == 0
        overwrite(path, 0)
        assert watch.take(first) & MODIFY
        assert watch.take(first) & (MODIFY | OVERFLOW) == 0
    watch.close()
    watch.close()
    assert watch.take(first) == 0
    assert watch.take(None) == 0


def test_a_relative_path_is_the_same_file_from_another_directory(
    path: Path, watch: WriteWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(path.parent)
    with open(path.name, "rb") as stream:
        file = OpenFile(Path(path.name), stream.fileno(), os.fstat(stream.fileno()), watch)
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
