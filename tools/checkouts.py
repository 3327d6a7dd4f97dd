"""Another checkout of the package: its sources, its extension, and an interpreter that imports them."""

import importlib
import shutil
import site
import subprocess
import sys
import tempfile
import venv
from pathlib import Path


def check_out(repository: Path, commit: str, folder: Path) -> None:
    """The files of a commit, without its repository. Raises CalledProcessError if there is no such commit."""
    with tempfile.TemporaryDirectory() as own:
        archive = Path(own) / "sources.tar"
        command = ["git", "-C", str(repository), "archive", "-o", str(archive), commit]
        subprocess.run(command, capture_output=True, check=True)
        shutil.unpack_archive(archive, folder)


def make_environment(folder: Path, sources: Path) -> Path:
    """The interpreter of an environment that imports `sources`, and else the packages that this one has.

    It has no packages of its own: an editable installation would find the sources that it was made from.
    """
    venv.create(folder, with_pip=False)
    (own,) = folder.glob("lib/python3*/site-packages")
    found = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    lines = [str(sources), *dict.fromkeys([*found, *site.getsitepackages()])]
    (own / "sources.pth").write_text("".join(f"{line}\n" for line in lines))
    return folder / "bin" / "python"


def build_extension(root: Path, folder: Path, optimisation: str = "-O3") -> Path:
    """Builds the extension of the sources below `root` in `folder`, and returns its file.

    After the first time only what has changed is built. Raises ImportError without the packages cmake, ninja
    and nanobind, and RuntimeError with what was printed if it cannot be built.
    """
    nanobind, ninja = importlib.import_module("nanobind"), importlib.import_module("ninja")
    importlib.import_module("cmake")
    cmake = [sys.executable, "-m", "cmake"]
    if not folder.exists():
        settings = {
            "CMAKE_MAKE_PROGRAM": Path(ninja.BIN_DIR) / "ninja",
            "CMAKE_BUILD_TYPE": "Release",
            "COLDSTREAM_OPTIMISATION": optimisation,
            "Python_EXECUTABLE": sys.executable,
            "nanobind_DIR": nanobind.cmake_dir(),
        }
        options = [f"-D{name}={value}" for name, value in settings.items()]
        _run_quietly([*cmake, "-S", root, "-B", folder, "-G", "Ninja", *options])
    _run_quietly([*cmake, "--build", folder, "--", "-j2"])
    (built,) = folder.glob("_csrc*.so")
    return built


def _run_quietly(command: list[object]) -> None:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command[:4]} failed:\n{done.stdout}{done.stderr}")
