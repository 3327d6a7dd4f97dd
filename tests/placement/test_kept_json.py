"""Files of what was found out about a machine: whatever is in their place, nothing waits for it."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from coldstream.errors import StorageError
from coldstream.files import write_file
from coldstream.placement.kept_json import NoFileError, is_in_the_way, read_json, store_json

IN_THE_WAY: dict[str, Callable[[Path], object]] = {
    "folder": Path.mkdir,
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "socket": lambda path: os.mknod(path, stat.S_IFSOCK | 0o600),
    "link to a folder": lambda path: path.symlink_to(path.parent),
    "link to where no folder is": lambda path: path.symlink_to(path.parent / "none" / "file"),
}


@pytest.mark.parametrize("put", IN_THE_WAY.values(), ids=IN_THE_WAY)
def test_what_is_no_file_is_neither_read_nor_written_to(
    tmp_path: Path, put: Callable[[Path], object]
) -> None:
    path = tmp_path / "kept.json"
    put(path)
    before = os.lstat(path), os.listdir("/proc/self/fd")
    with pytest.raises(NoFileError):
        read_json(path, 100)
    with pytest.raises(StorageError, match=r"kept\.json is no file: remove it"):
        store_json(path, {})
    after = os.lstat(path), os.listdir("/proc/self/fd")
    assert (after[0].st_ino, after[0].st_mode, after[1]) == (before[0].st_ino, before[0].st_mode, before[1])
    assert os.listdir(tmp_path) == ["kept.json"]


def test_a_link_is_followed_unless_it_leads_to_itself(tmp_path: Path) -> None:
    path, target = tmp_path / "kept.json", tmp_path / "elsewhere.json"
    path.symlink_to(target)
    with pytest.raises(FileNotFoundError):
        read_json(path, 100)
    store_json(path, [1])
    assert (path.is_symlink(), read_json(target, 100)) == (True, [1])
    path.unlink()
    path.symlink_to(path)
    with pytest.raises(OSError, match="symbolic links"):
        read_json(path, 100)
    assert not is_in_the_way(path)
    store_json(path, [2])
    assert (path.is_symlink(), read_json(path, 100)) == (False, [2])


def test_only_the_beginning_of_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    write_file(path, b"[1]" + b" " * 97 + b"?" * 2**20)
    assert read_json(path, 100) == [1]
    with pytest.raises(ValueError, match="Extra data"):
        read_json(path, 101)
