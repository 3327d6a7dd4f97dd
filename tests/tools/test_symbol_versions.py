"""tools/symbol_versions.py: which versions of which libraries a wheel's extension may need.

Libraries are made here, with a symbol of a version each, so that the answers are those of any machine.
"""

import subprocess
import zipfile
from pathlib import Path

import pytest

from tools import symbol_versions

NAME = "coldstream-1-cp312-abi3-manylinux_2_28_x86_64.whl"
EXTENSION = "coldstream/kernels/_csrc.abi3.so"


def _link(out: Path, code: str, *options: str) -> Path:
    source = out.with_suffix(".c")
    source.write_text(code)
    subprocess.run(["cc", "-shared", "-fPIC", "-nostdlib", str(source), "-o", str(out), *options], check=True)
    return out


def _extension(folder: Path, library: str, version: str) -> Path:
    """A shared library that takes a symbol of `version` from `library`."""
    script = folder / "versions"
    script.write_text(f"{version} {{ global: taken; local: *; }};\n")
    options = (f"-Wl,-soname,{library}", f"-Wl,--version-script={script}")
    taken = _link(folder / "taken.so", "int taken(void) { return 1; }", *options)
    return _link(folder / "_csrc.so", "int taken(void); int f(void) { return taken(); }", str(taken))


def _wheel(folder: Path, extension: Path | None, name: str = NAME) -> Path:
    path = folder / name
    with zipfile.ZipFile(path, "w") as files:
        files.writestr("coldstream/__init__.py", "")
        if extension:
            files.write(extension, EXTENSION)
    return path


@pytest.mark.parametrize(
    ("library", "version"),
    [("libc.so.6", "GLIBC_2.28"), ("libm.so.6", "GLIBC_2.2.5"), ("libpthread.so.0", "GLIBC_2.3.2")],
)
def test_symbols_of_the_named_glibc_are_allowed(tmp_path: Path, library: str, version: str) -> None:
    assert symbol_versions.problems(_wheel(tmp_path, _extension(tmp_path, library, version))) == []


@pytest.mark.parametrize(
    "version", ["GLIBC_2.29", "GLIBC_2.34", "GLIBC_3.0", "GLIBC_ABI_DT_RELR", "GLIBC_PRIVATE"]
)
def test_a_newer_or_private_symbol_is_named(tmp_path: Path, version: str) -> None:
    found = symbol_versions.problems(_wheel(tmp_path, _extension(tmp_path, "libc.so.6", version)))
    assert found == [f"{EXTENSION} needs {version} of libc.so.6, which glibc 2.28 lacks"]


def test_the_limit_is_that_of_the_name(tmp_path: Path) -> None:
    extension = _extension(tmp_path, "libc.so.6", "GLIBC_2.34")
    assert symbol_versions.problems(_wheel(tmp_path, extension, NAME.replace("2_28", "2_34"))) == []


def test_a_library_of_the_compiler_is_named(tmp_path: Path) -> None:
    found = symbol_versions.problems(
        _wheel(tmp_path, _extension(tmp_path, "libstdc++.so.6", "GLIBCXX_3.4.30"))
    )
    assert f"{EXTENSION} needs the library libstdc++.so.6" in found
    assert f"{EXTENSION} needs GLIBCXX_3.4.30 of libstdc++.so.6, which glibc 2.28 lacks" in found


def test_a_wheel_without_a_promise_or_an_extension_is_refused(tmp_path: Path) -> None:
    extension = _extension(tmp_path, "libc.so.6", "GLIBC_2.2.5")
    plain = _wheel(tmp_path, extension, "coldstream-1-cp311-cp311-linux_x86_64.whl")
    assert symbol_versions.problems(plain) == [f"{plain.name} names no version of glibc (manylinux_X_Y)"]
    assert symbol_versions.problems(_wheel(tmp_path, None)) == [f"{NAME} has no extension"]


def test_symbols_without_versions_prove_nothing(tmp_path: Path) -> None:
    (found,) = symbol_versions.problems(
        _wheel(tmp_path, _link(tmp_path / "_csrc.so", "int f(void) { return 1; }"))
    )
    assert "names no version of any symbol" in found
