"""tools/aarch64.py: what it runs on an emulated CPU, and of which wheel."""

import re
import shutil
import tomllib
import zipfile
from pathlib import Path

import pytest

from tools import aarch64


def _run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], wheel: str, lacking: str = ""
) -> str:
    """What it says of a wheel on a machine that has every program but `lacking`."""
    monkeypatch.setattr(shutil, "which", lambda name: None if lacking and lacking in name else f"/bin/{name}")
    monkeypatch.setattr("sys.argv", ["aarch64", wheel])
    assert aarch64.main() == 1
    return capsys.readouterr().err


def test_the_tests_are_those_that_run_the_extension() -> None:
    paths = [Path(name) for name in aarch64.kernel_tests()]
    assert {"test_cpu_linear.py", "test_expert_pool.py", "test_runtime.py"} <= {path.name for path in paths}
    for path in paths:
        assert re.search(r"\b_csrc\b|quant_cases|cpu_cases", path.read_text()), path
        assert "cuda" not in path.name


@pytest.mark.parametrize("name", ["debootstrap", "dpkg-deb", "aarch64-linux-gnu-g++", "qemu-aarch64"])
def test_a_program_that_is_not_there_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    said = _run(monkeypatch, capsys, "coldstream-1-cp311-cp311-manylinux_2_28_aarch64.whl", name)
    assert said.startswith(f"there is no {name}")
    assert "apt install qemu-user-static debootstrap g++-aarch64-linux-gnu" in said


@pytest.mark.parametrize(
    "wheel",
    [
        "coldstream-1-cp311-cp311-manylinux_2_28_x86_64.whl",
        "coldstream-1-cp312-abi3-manylinux_2_28_aarch64.whl",
    ],
)
def test_a_wheel_that_its_python_cannot_load_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], wheel: str
) -> None:
    assert _run(monkeypatch, capsys, wheel) == f"{wheel} is not a wheel for CPython 3.11 on aarch64\n"


def test_files_of_an_earlier_wheel_are_gone(tmp_path: Path) -> None:
    for name in ("old", "new"):
        with zipfile.ZipFile(tmp_path / f"{name}.whl", "w") as files:
            files.writestr(f"coldstream/{name}.py", "")
    for name in ("old", "new"):
        folder = aarch64.unpack_wheel(tmp_path / f"{name}.whl", tmp_path / "package")
    assert [path.name for path in folder.rglob("*.py")] == ["new.py"]


def test_lower_bounds_are_those_of_the_project() -> None:
    """But for PyTorch's, of which the project's oldest version brings CUDA along on aarch64."""
    project = tomllib.loads((aarch64.ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    bounds = {each.split(",")[0] for each in (*project["dependencies"], *extras["cuda"], *extras["test"])}
    given = {each.split(",")[0] for each in aarch64.PACKAGES if ">=" in each}
    assert given <= bounds
