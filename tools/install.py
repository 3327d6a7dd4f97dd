"""Installs this checkout into a virtual environment, saying what that brings; does nothing where it is done.

    python3 tools/install.py .venv                 what run and serve take: `cuda` if there is a GPU
    python3 tools/install.py .venv test            with the extra `test`
    python3 tools/install.py .venv test --oldest   and with the oldest versions that pyproject.toml allows
    python3 tools/install.py .venv-ray ray --beside .venv   the extra `ray`, over what another one has

What is there stays: an environment with the extra `test` keeps it. Needs nothing but Python, and says so
where that is too old.
"""

from __future__ import annotations  # an old Python shall get as far as the message

import argparse
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections import deque
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SIZES = ROOT / "docs" / "results" / "install.json"
MIN_PYTHON = (3, 11)
IMPLIED = {"test": {"cuda"}}  # extras that an extra contains
COMPILERS = ("c++", "g++", "clang++")
# Of what pip prints where no terminal shows its progress bars: what says how far it is.
TELLING = re.compile(
    r"\s*(Downloading (?!.*\.metadata)|Building|Installing|Successfully|Attempting|ERROR|WARNING)"
)
TAIL_LINES = 60  # of its output, for when it fails


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("extras", nargs="*")
    parser.add_argument("--oldest", action="store_true")
    parser.add_argument("--beside", type=Path, metavar="FOLDER")
    options = parser.parse_args()
    problem = what_is_missing()
    if problem:
        print(problem, file=sys.stderr)
        return 1
    if options.beside:
        return install_beside(options.folder, set(options.extras), options.beside)
    extras = set(options.extras) or ({"cuda"} if has_gpu() else set())
    return install(options.folder, extras, options.oldest)


def what_is_missing() -> str | None:
    """Of what this machine must bring: the first thing that it lacks, and how to get it."""
    if sys.version_info < MIN_PYTHON:
        found = ".".join(map(str, sys.version_info[:3]))
        return (
            f"coldstream needs Python 3.11 or newer, and {sys.executable} is {found}: "
            "install one and name it, for example make PYTHON=python3.11 demo"
        )
    if importlib.util.find_spec("venv") is None or importlib.util.find_spec("ensurepip") is None:
        return (
            f"{sys.executable} cannot make a virtual environment: sudo apt install python3-venv, "
            "or name another Python, for example make PYTHON=python3.11 demo"
        )
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return f"{sys.executable} has no headers to compile an extension with: sudo apt install python3-dev"
    compiler = os.environ.get("CXX", "").split()[:1] or COMPILERS
    if not any(shutil.which(name) for name in compiler):
        return f"there is no C++ compiler ({', '.join(compiler)}): sudo apt install g++"
    return None


def has_gpu() -> bool:
    """Whether the package would find a GPU."""
    sys.path.insert(0, str(ROOT / "src"))
    from coldstream.kernels.cuda.device import gpu_is_visible

    return gpu_is_visible()


def install(folder: Path, extras: set[str], oldest: bool) -> int:
    """Make `folder` an environment with the extras, unless it is one of this state of the checkout."""
    stamp = folder / ".installed"
    state, done = digest(oldest), read_stamp(stamp)
    there = set(done.get("extras", []))
    if done.get("digest") == state and extras <= with_implied(there):
        return 0
    extras = without_implied(extras | there)
    is_new = not ((folder / "bin" / "python").exists() and (folder / "bin" / "pip").exists())
    compiles = is_new or oldest or done.get("digest") != state
    print(announcement(folder, extras, oldest, compiles), flush=True)
    stamp.unlink(missing_ok=True)
    if is_new:
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    target = f"{ROOT}[{','.join(sorted(extras))}]" if extras else str(ROOT)
    if oldest:
        code = install_oldest(folder, target)
    elif compiles:
        code = pip(folder, "-e", target)
    else:
        code = pip(folder, *requirements(extras))  # to install the target would compile its extension again
    if code == 0:
        stamp.write_text(json.dumps({"digest": state, "extras": sorted(extras)}))
    return code


def install_beside(folder: Path, extras: set[str], base: Path) -> int:
    """Make `folder` an environment with the extras and all of `base`, another one, which stays as it is."""
    wanted, stamp = requirements(extras), folder / ".installed"
    state = hashlib.sha256(repr((str(base.resolve()), sys.version_info[:2], wanted)).encode()).hexdigest()
    if read_stamp(stamp).get("digest") == state:
        return 0
    print(f"Installing {', '.join(sorted(extras))} into {folder}, beside {base}", flush=True)
    # Without pip: that of `base` is found as well, and to install one takes two seconds.
    subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder)], check=True)
    found = [sysconfig.get_path("purelib", "venv", {"base": str(each.resolve())}) for each in (base, folder)]
    # Its own .pth files count as well: one of them says where this checkout is.
    Path(found[1], "beside.pth").write_text(f"import site; site.addsitedir({found[0]!r})\n")
    code = pip(folder, *wanted)
    if code == 0:
        stamp.write_text(json.dumps({"digest": state, "extras": sorted(extras)}))
    return code


def with_implied(extras: set[str]) -> set[str]:
    """With those that they contain."""
    return extras.union(*(IMPLIED.get(extra, set()) for extra in extras))


def without_implied(extras: set[str]) -> set[str]:
    return extras.difference(*(IMPLIED.get(extra, set()) for extra in extras))


def read_stamp(path: Path) -> dict:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}


def digest(oldest: bool) -> str:
    """Of all that an editable installation depends on: it knows the packages there were when it was made."""
    sources = [
        path for path in ROOT.glob("src/**/csrc/**/*") if path.is_file() and "__pycache__" not in path.parts
    ]
    sources += [ROOT / "pyproject.toml", ROOT / "CMakeLists.txt", *ROOT.glob("src/**/dequantize/grids.py")]
    state = hashlib.sha256(repr((oldest, sys.version_info[:2])).encode())
    for path in sorted(sources):
        state.update(f"{path.relative_to(ROOT)} {path.stat().st_size}\n".encode() + path.read_bytes())
    for path in sorted(ROOT.glob("src/**/__init__.py")):
        state.update(f"{path.relative_to(ROOT)}\n".encode())
    return state.hexdigest()


def announcement(folder: Path, extras: set[str], oldest: bool, compiles: bool) -> str:
    """What comes, in one line, with the sizes that were measured."""
    what = "coldstream" + (f" with the extra {', '.join(sorted(extras))}" if extras else "")
    if oldest:
        what += ", in the oldest versions allowed,"
    kind = next((each for each in ("test", "cuda") if each in extras), "cpu")
    size = json.loads(SIZES.read_text())["installs"][kind]
    line = (
        f"Installing {what} into {folder}: downloads up to {size['download_bytes'] / 1e6:.0f} MB, "
        f"takes {size['disk_bytes'] / 1e6:.0f} MB of disk"
    )
    return line + ("; compiling takes a few minutes" if compiles else "")


def install_oldest(folder: Path, target: str) -> int:
    """With every direct dependency, also for building, in its oldest version. The exit code."""
    project = read_project()
    constraints = folder / "oldest.txt"
    constraints.write_text("".join(f"{pin}\n" for pin in oldest_versions()))
    build = [oldest_version(requirement) for requirement in project["build-system"]["requires"]]
    # Without isolation, because constraints do not reach an isolated build.
    return pip(folder, *build, "cmake>=3.25", "ninja") or pip(
        folder, "--no-build-isolation", "-c", str(constraints), "-e", target
    )


def read_project() -> dict:
    import tomllib  # which an old Python lacks

    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def requirements(extras: set[str]) -> list[str]:
    """Of the package with these extras: all but itself."""
    project = read_project()["project"]
    own = project["name"] + "["
    found = list(project["dependencies"])
    for extra in sorted(with_implied(extras)):
        found += project["optional-dependencies"][extra]
    return [requirement for requirement in found if not requirement.startswith(own)]


def oldest_versions() -> list[str]:
    """Pins of all direct dependencies, extras included, to their lower bounds."""
    extras = set(read_project()["project"]["optional-dependencies"])
    return sorted({oldest_version(requirement) for requirement in requirements(extras)})


def oldest_version(requirement: str) -> str:
    """`name[extra]>=1.2,<3; marker` → `name==1.2; marker`, as constraints name no extras.

    Raises ValueError for one without a lower bound.
    """
    match = re.fullmatch(r"([\w.-]+)(?:\[[\w.,-]+\])?\s*>=\s*([\w.]+)(?:,[^;]*)?(;.*)?", requirement)
    if match is None:
        raise ValueError(f"pyproject.toml: {requirement!r} has no lower bound (name>=version)")
    return f"{match[1]}=={match[2]}{match[3] or ''}"


def pip(folder: Path, *arguments: str) -> int:
    """Run `pip install`: with progress bars on a terminal, else showing the lines that say how far it is."""
    command = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install"]
    command.append("--no-compile")  # what is imported is compiled then; all of it would take half a minute
    if sys.stdout.isatty():
        return subprocess.run([*command, *arguments]).returncode
    command += ["--progress-bar", "off", *arguments]
    tail: deque[str] = deque(maxlen=TAIL_LINES)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        for line in process.stdout or ():
            tail.append(line)
            if TELLING.match(line):
                print(line, end="", flush=True)
    if process.returncode:
        print("pip failed; its last lines:", *tail, sep="\n", file=sys.stderr)
    return process.returncode


if __name__ == "__main__":
    sys.exit(main())
