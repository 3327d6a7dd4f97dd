"""What `make` installs: what a machine must have for it, when it is done, and the oldest versions."""

import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tools import install

Ran = list[tuple[str, ...]]


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Ran:
    """The arguments of every `pip install`, which installs nothing and succeeds."""
    calls: Ran = []
    monkeypatch.setattr(install, "pip", lambda folder, *arguments: calls.append(arguments) or 0)
    return calls


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An environment with a Python and a pip, or what looks like it."""
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    for name in ("python", "pip"):
        (tmp_path / "venv" / "bin" / name).touch()
    return tmp_path / "venv"


def test_this_machine_has_what_it_takes() -> None:
    assert install.what_is_missing() is None


def test_an_old_python_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    version = namedtuple("version", "major minor micro")(3, 9, 2)
    monkeypatch.setattr(sys, "version_info", version)
    assert "3.9.2: install one and name it, for example make PYTHON=" in (install.what_is_missing() or "")


@pytest.mark.parametrize("module", ["venv", "ensurepip"])
def test_a_python_without_environments(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    assert "sudo apt install python3-venv" in (install.what_is_missing() or "")


def test_a_python_without_headers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(install.sysconfig, "get_path", lambda name: str(tmp_path))
    assert "sudo apt install python3-dev" in (install.what_is_missing() or "")


def test_a_machine_without_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert "sudo apt install g++" in (install.what_is_missing() or "")
    monkeypatch.setenv("CXX", "no-such-compiler -std=c++20")
    assert "(no-such-compiler)" in (install.what_is_missing() or "")


def test_the_script_says_so_and_fails(tmp_path: Path) -> None:
    """Run as `make` runs it, by a Python whose `ensurepip` is gone."""
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['ensurepip'] = None")
    command = [sys.executable, str(install.ROOT / "tools" / "install.py"), str(tmp_path / "venv")]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert "python3-venv" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_what_is_installed_is_not_installed_again(folder: Path, ran: Ran) -> None:
    for _ in range(2):
        assert install.install(folder, set(), oldest=False) == 0
    assert ran == [("-e", str(install.ROOT))]


def test_extras_are_added_and_stay(folder: Path, ran: Ran) -> None:
    for extras in (set[str](), {"cuda"}, set[str](), {"test"}, {"cuda"}, set[str]()):
        install.install(folder, extras, oldest=False)
    declared = install.read_project()["project"]
    cuda = declared["dependencies"] + declared["optional-dependencies"]["cuda"]
    extra = declared["optional-dependencies"]
    test = [text for text in extra["test"] if text not in ("coldstream[cuda]",)]
    assert ran == [("-e", str(install.ROOT)), tuple(cuda), tuple(cuda + test)]


def test_a_new_environment_or_a_changed_checkout_gets_the_package_with_its_extras(
    folder: Path, ran: Ran, monkeypatch: pytest.MonkeyPatch
) -> None:
    install.install(folder, {"cuda"}, oldest=False)
    monkeypatch.setattr(install, "digest", lambda oldest: "changed")
    install.install(folder, {"test"}, oldest=False)
    made = []
    monkeypatch.setattr(install.subprocess, "run", lambda command, **options: made.append(command))
    (folder / "bin" / "python").unlink()
    (folder / ".installed").write_text('{"digest": "changed", "extras": []}')
    install.install(folder, {"test"}, oldest=False)
    assert len(made) == 1
    assert ran == [("-e", f"{install.ROOT}[{extra}]") for extra in ("cuda", "test", "test")]


def test_a_changed_checkout_is_installed_again(
    folder: Path, ran: Ran, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    checkout = tmp_path / "checkout"
    for name in ("pyproject.toml", "CMakeLists.txt"):
        checkout.mkdir(exist_ok=True)
        shutil.copy(install.ROOT / name, checkout / name)
    (checkout / "src" / "package" / "csrc").mkdir(parents=True)
    monkeypatch.setattr(install, "ROOT", checkout)
    changes = ("pyproject.toml", "CMakeLists.txt", "src/package/csrc/new.cpp", "src/package/__init__.py")
    install.install(folder, set(), oldest=False)
    for count, name in enumerate(changes, start=2):
        with open(checkout / name, "a") as file:
            file.write("\n")
        install.install(folder, set(), oldest=False)
        assert len(ran) == count, name
    (checkout / "src" / "package" / "__init__.py").write_text("x = 1")  # found there without installing again
    install.install(folder, set(), oldest=False)
    assert len(ran) == len(changes) + 1


def test_an_installation_that_fails_is_tried_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_with = {"pip": 0}

    def pip(*arguments: Any) -> int:
        install_with["pip"] += 1
        return 1

    monkeypatch.setattr(install, "pip", pip)
    assert [install.install(folder, set(), oldest=False) for _ in range(2)] == [1, 1]
    assert install_with["pip"] == 2


def test_it_says_what_comes(folder: Path, ran: Ran, capsys: pytest.CaptureFixture[str]) -> None:
    install.install(folder, {"cuda"}, oldest=False)
    (line,) = capsys.readouterr().out.splitlines()
    assert "with the extra cuda" in line
    assert " MB of disk; compiling takes" in line
    install.install(folder, {"test"}, oldest=False)
    assert capsys.readouterr().out.endswith(" MB of disk\n")


@pytest.mark.sharded(of="processes")
def test_pip_shows_how_far_it_is_and_why_it_failed(capfd: pytest.CaptureFixture[str]) -> None:
    folder = Path(sys.prefix)
    assert install.pip(folder, "--no-index", "there-is-no-such-package") == 1
    shown = capfd.readouterr()
    assert "ERROR: No matching distribution" in shown.out
    assert "pip failed" in shown.err
    assert install.pip(folder, "--no-index", "pip") == 0
    assert capfd.readouterr() == ("", "")


def test_the_oldest_versions_are_the_lower_bounds_of_every_dependency(folder: Path, ran: Ran) -> None:
    assert install.install(folder, {"test"}, oldest=True) == 0
    build, project = ran
    pins = [Requirement(line) for line in (folder / "oldest.txt").read_text().splitlines()]
    pins += [Requirement(line) for line in build if "==" in line]
    found = {pin.name: pin.specifier for pin in pins}
    declared = install.read_project()
    listed = declared["project"]["dependencies"] + declared["build-system"]["requires"]
    for extra in declared["project"]["optional-dependencies"].values():
        listed += extra
    requirements = [Requirement(text) for text in listed if not text.startswith("coldstream")]
    assert found.keys() == {requirement.name for requirement in requirements}
    for requirement in requirements:
        lowest = next(bound for bound in requirement.specifier if bound.operator == ">=")
        assert Version(lowest.version) in found[requirement.name], requirement
    assert ("-c", str(folder / "oldest.txt"), "-e", f"{install.ROOT}[test]") == project[-4:]


@pytest.mark.parametrize("requirement", ["numpy", "numpy<3", "numpy==2.0", "numpy>2"])
def test_a_dependency_without_a_lower_bound_is_refused(requirement: str) -> None:
    with pytest.raises(ValueError, match="no lower bound"):
        install.oldest_version(requirement)
    assert (
        install.oldest_version("a-b>=1.2,<3; sys_platform == 'linux'") == "a-b==1.2; sys_platform == 'linux'"
    )
    assert install.oldest_version("a[b,c-d]>=1.2") == "a==1.2"


def test_an_extra_is_installed_beside_an_environment_that_it_sees(
    tmp_path: Path, ran: Ran, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the other one has can be imported, also by its .pth files, and what is its own goes first."""
    base, folder = tmp_path / "base", tmp_path / "beside"
    for each in (base, folder):
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(each)], check=True)
    site = next(base.glob("lib/python3*/site-packages"))
    (tmp_path / "checkout").mkdir()
    (site / "checkout.pth").write_text(f"{tmp_path / 'checkout'}\n")
    (site / "both.py").write_text("FROM = 'base'")
    (tmp_path / "checkout" / "edited.py").touch()
    for _ in range(2):
        assert install.install_beside(folder, {"ray"}, base) == 0
    assert len(ran) == 1
    declared = install.read_project()["project"]
    extras = declared["optional-dependencies"]
    wanted = declared["dependencies"] + extras["ray"]
    assert set(ran[0]) == {each for each in wanted if not each.startswith("coldstream")}
    assert not any(each.startswith("torch") for each in ran[0])
    show = [str(folder / "bin" / "python"), "-c", "import both, edited; print(both.FROM)"]
    assert subprocess.run(show, check=True, capture_output=True, text=True).stdout == "base\n"
    (next(folder.glob("lib/python3*/site-packages")) / "both.py").write_text("FROM = 'beside'")
    assert subprocess.run(show, check=True, capture_output=True, text=True).stdout == "beside\n"
    monkeypatch.setattr(install, "requirements", lambda extras: ["another"])
    install.install_beside(folder, {"ray"}, base)
    assert ran[1:] == [("another",)]
