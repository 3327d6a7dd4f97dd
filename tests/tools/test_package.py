"""tools/package.py: what an sdist and a wheel may hold."""

import io
import tarfile
import zipfile
from pathlib import Path

import pytest

from tools import package

EXTENSION = "coldstream/kernels/_csrc.cpython-311-x86_64-linux-gnu.so"


def _sdist(folder: Path, *names: str) -> Path:
    path = folder / "coldstream-1.tar.gz"
    with tarfile.open(path, "w:gz") as files:
        for name in names:
            info = tarfile.TarInfo(f"coldstream-1/{name}")
            info.size = 1
            files.addfile(info, io.BytesIO(b"x"))
    return path


def _wheel(folder: Path, *names: str) -> Path:
    path = folder / "coldstream-1-cp312-abi3-manylinux_2_28_x86_64.whl"
    with zipfile.ZipFile(path, "w") as files:
        for name in names:
            files.writestr(name, "x")
    return path


def test_an_sdist_holds_the_tracked_files_and_its_metadata(tmp_path: Path) -> None:
    assert package.sdist_files(_sdist(tmp_path, "PKG-INFO", "a", "b/c")) == {"a", "b/c"}


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (
            {"a", "b/c", "notes.txt"},
            "x.tar.gz holds other files than the tracked ones; besides: ['notes.txt'], lacking: []",
        ),
        ({"a"}, "besides: [], lacking: ['b/c']"),
    ],
)
def test_a_file_more_or_less_is_named(found: set[str], message: str) -> None:
    assert package.difference("x.tar.gz", {"a", "b/c"}, {"a", "b/c"}) is None
    assert message in (package.difference("x.tar.gz", found, {"a", "b/c"}) or "")


@pytest.mark.parametrize("extension", [EXTENSION, "coldstream/kernels/_csrc.abi3.so"])
def test_a_wheel_holds_the_package_and_its_extension(tmp_path: Path, extension: str) -> None:
    tracked = {"pyproject.toml", "tests/test_x.py", "src/coldstream/a.cu", "docs/cli.md", "docs/index.md"}
    tracked |= {"docs/notes/x.md", "docs/results/x.json", "docs/page.png"}
    names = (
        "coldstream/",
        "coldstream/a.cu",
        "coldstream/docs/cli.md",
        extension,
        "coldstream-1.dist-info/METADATA",
    )
    wheel = _wheel(tmp_path, *names)
    assert package.wheel_files(wheel) == package.packaged(tracked)


@pytest.mark.parametrize(
    "more", ["tests/test_x.py", "coldstream.libs/libstdc++.so.6", "coldstream/kernels/x.so"]
)
def test_nothing_else_belongs_into_a_wheel(tmp_path: Path, more: str) -> None:
    expected = package.packaged({"src/coldstream/a.cu"})
    found = package.wheel_files(_wheel(tmp_path, "coldstream/a.cu", EXTENSION, more))
    assert f"besides: ['{more}'], lacking: []" in (package.difference("w", found, expected) or "")


def test_the_tracked_files_are_those_of_this_checkout() -> None:
    tracked = package.tracked()
    assert {"pyproject.toml", "src/coldstream/__init__.py"} <= tracked
    assert all((package.ROOT / name).is_file() for name in tracked)
    cuda = {name for name in package.packaged(tracked) if name.endswith((".cu", ".cuh", ".gguf"))}
    assert {"coldstream/kernels/rms_norm/rms_norm.cu", "coldstream/assets/demo.gguf"} <= cuda


def test_a_python_that_is_not_there_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["package", str(tmp_path / "out"), "--python", "python3.99"]
    monkeypatch.setattr("sys.argv", arguments)
    assert package.main() == 1
    assert "there is no python3.99: name others" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_headers_of_another_machine_have_its_place(tmp_path: Path) -> None:
    """Debian keeps a part of them in a folder with the name of the machine."""
    include, split = tmp_path / "include" / "python3.99", tmp_path / "include" / "x-linux-gnu" / "python3.99"
    split.mkdir(parents=True)
    (split / "pyconfig.h").touch()
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho {include} x-linux-gnu\n")
    python.chmod(0o755)
    found = package.link_headers(python, tmp_path / "links", "aarch64")
    assert (found / "aarch64-linux-gnu" / "python3.99" / "pyconfig.h").exists()
