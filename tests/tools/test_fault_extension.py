"""The extension with a fault, of a small project that has been built as an installation is."""

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tools.planted_faults import extension
from tools.planted_faults.extension import build_with, installed_build

SOURCES = {
    "value.h": "constexpr int VALUE = 1;\n",
    "one.cpp": '#include "value.h"\nextern "C" int one() { return VALUE; }\n',
    "two.cpp": 'extern "C" int two() { return 2; }\n',
}
MODULE = "module.so"


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sources and a build of them, of which ninja says what it would; ccache makes some names relative."""
    root = tmp_path / "checkout"
    source, build = root / "src", root / "build/any"
    source.mkdir(parents=True)
    build.mkdir(parents=True)
    for name, text in SOURCES.items():
        (source / name).write_text(text)
        os.utime(source / name, (1, 1))
    (build / "CMakeCache.txt").write_text(f"CMAKE_HOME_DIRECTORY:INTERNAL={root}\n")
    commands = [
        f"c++ -I{source} -I/gone/nanobind/include -O3 -fPIC -MD -MT {name}.o -MF {name}.o.d -o {name}.o "
        f"-c {source}/{name}.cpp"
        for name in ("one", "two")
    ]
    commands.append(f": && c++ -shared -o {MODULE} one.o two.o && :")
    for command in commands:
        subprocess.run(command, shell=True, cwd=build, check=True)
    one = f"one.o: #deps 2\n    {source}/one.cpp\n    ../../src/value.h\n"
    two = f"two.o: #deps 1\n    {source}/two.cpp\n"
    printed = {"commands": "\n".join(commands), "deps": f"{one}\n{two}"}
    monkeypatch.setattr(extension, "_ninja", lambda _, *words: printed[words[-1]])
    return root


def results(module: Path) -> tuple[int, int]:
    library = ctypes.CDLL(str(module))
    return library.one(), library.two()


@pytest.mark.parametrize(
    ("name", "old", "new", "expected"),
    [
        ("value.h", "VALUE = 1", "VALUE = 5", (5, 2)),
        ("two.cpp", "return 2", "return 6", (1, 6)),
    ],
)
def test_what_depends_on_a_changed_file_is_compiled(
    checkout: Path, tmp_path: Path, name: str, old: str, new: str, expected: tuple[int, int]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(checkout / "src", copy / "src")
    (copy / "src" / name).write_text(SOURCES[name].replace(old, new))
    build = installed_build(checkout, MODULE)
    assert build is not None
    before = (build / MODULE).read_bytes()
    built = build_with(f"src/{name}", copy, tmp_path / "built", checkout, MODULE)
    assert results(built) == expected
    assert len(list((tmp_path / "built").glob("*.o"))) == 1
    assert (build / MODULE).read_bytes() == before


def test_what_is_newer_than_its_object_is_compiled_too(checkout: Path, tmp_path: Path) -> None:
    (checkout / "src/two.cpp").write_text(SOURCES["two.cpp"].replace("2;", "7;"))
    os.utime(checkout / "src/two.cpp", (1 << 32, 1 << 32))
    assert results(build_with("src/one.cpp", checkout, tmp_path / "built", checkout, MODULE)) == (1, 7)


def test_what_does_not_compile_is_an_error(checkout: Path, tmp_path: Path) -> None:
    (checkout / "src/one.cpp").write_text("int one( {")
    with pytest.raises(RuntimeError, match=r"c\+\+ .*failed"):
        build_with("src/one.cpp", checkout, tmp_path / "built", checkout, MODULE)


def test_the_build_of_another_checkout_is_none_of_this_one(checkout: Path, tmp_path: Path) -> None:
    shutil.move(checkout, tmp_path / "moved")
    assert installed_build(tmp_path / "moved", MODULE) is None


def test_the_build_of_another_python_is_none_of_this_one(checkout: Path) -> None:
    assert installed_build(checkout, "module.abi3.so") is None
