"""A file is written whole or not at all: on a full disk, under a limit, without permission."""

import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from coldstream.errors import StorageError
from coldstream.files import write_file

# Writes 100 kB to the path, under a limit of so many bytes a file; what it raised goes to standard output.
_WRITE = """
import resource, sys
from pathlib import Path
from coldstream.errors import StorageError
from coldstream.files import write_file
path, limit = Path(sys.argv[1]), int(sys.argv[2])
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
try:
    write_file(path, b"n" * 100_000)
except StorageError as error:
    print(error, *sorted(entry.name for entry in path.parent.iterdir()), path.read_bytes(), sep="|")
"""


def test_a_new_file_and_one_that_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / ("n" * 255)  # the longest name there is
    write_file(path, b"first")
    os.chmod(path, 0o640)
    write_file(path, b"second")
    assert path.read_bytes() == b"second"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    link, target = tmp_path / "link", tmp_path / "elsewhere" / "file"
    link.symlink_to("elsewhere/file")
    for content in (b"first", b"second"):
        write_file(link, content)
        assert link.is_symlink()
        assert target.read_bytes() == content


def test_a_pipe_is_written_to_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(path.read_bytes()))
    reader.start()
    write_file(path, b"words")
    reader.join()
    assert read == [b"words"]
    assert path.is_fifo()


def test_a_limit_on_file_sizes_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_bytes(b"old")
    shown = subprocess.run(
        [sys.executable, "-c", _WRITE, path, "50000"], capture_output=True, text=True, check=True
    ).stdout
    message, *rest = shown.rstrip("\n").split("|")
    assert f"{path} cannot be written: File too large; 100000 bytes are needed, " in message
    assert "write to another disk" in message
    assert rest == ["out", "b'old'"]


def test_a_full_disk_leaves_the_old_file(tmp_path: Path) -> None:
    script = 'mount -t tmpfs -o size=64k none "$1" && echo -n old > "$1/out" && exec "$2" -c "$3" "$1/out" 0'
    arguments = ["sh", "-c", script, "sh", str(tmp_path), sys.executable, _WRITE]
    unshared = ["unshare", "--map-root-user", "--mount"]
    if subprocess.run([*unshared, "mount", "-t", "tmpfs", "none", "/mnt"], check=False).returncode:
        pytest.skip("this user may not mount a small disk")
    shown = subprocess.run([*unshared, *arguments], capture_output=True, text=True, check=True).stdout
    message, *rest = shown.rstrip("\n").split("|")
    assert f"{tmp_path}/out cannot be written: No space left on device; 100000 bytes are needed, " in message
    assert rest == ["out", "b'old'"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("no/folder", "No such file or directory; choose another place"),
        ("a\0b", "null byte"),
        (".", "directory; choose another place"),
        ("file/below", "Not a directory"),
        ("n" * 256, "File name too long"),
    ],
)
def test_places_where_no_file_can_be(tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError, match=reason):
        write_file(tmp_path / name, b"x")
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_is_not_ours(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(StorageError, match="Permission denied; choose a place that you may write to"):
        write_file(tmp_path / "out", b"x")


def test_an_interruption_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("coldstream.files.os.fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_file(tmp_path / "out", b"x")
    assert list(tmp_path.iterdir()) == []
