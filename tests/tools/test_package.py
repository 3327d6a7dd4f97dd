"""tools/package.py: what an sdist may hold."""

import io
import tarfile
from pathlib import Path

import pytest

from tools import package


def _sdist(folder: Path, *names: str) -> Path:
    path = folder / "coldstream-1.tar.gz"
    with tarfile.open(path, "w:gz") as files:
        for name in names:
            info = tarfile.TarInfo(f"coldstream-1/{name}")
            info.size = 1
            files.addfile(info, io.BytesIO(b"x"))
    return path


def test_an_sdist_holds_the_tracked_files_and_its_metadata(tmp_path: Path) -> None:
    assert package.difference(_sdist(tmp_path, "PKG-INFO", "a", "b/c"), {"a", "b/c"}) is None


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("a", "b/c", "notes.txt"), "besides: ['notes.txt'], lacking: []"),
        (("a",), "besides: [], lacking: ['b/c']"),
    ],
)
def test_a_file_more_or_less_is_named(tmp_path: Path, names: tuple[str, ...], message: str) -> None:
    assert message in (package.difference(_sdist(tmp_path, *names), {"a", "b/c"}) or "")


def test_the_tracked_files_are_those_of_this_checkout() -> None:
    tracked = package.tracked()
    assert {"pyproject.toml", "src/coldstream/__init__.py"} <= tracked
    assert all((package.ROOT / name).is_file() for name in tracked)
