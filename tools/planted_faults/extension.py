"""The extension with a fault: what depends on its file is compiled, and linked with the installation's rest.

An editable installation keeps the folder in which its extension was built. Its objects are read and left.
"""

import os
import re
import shlex
import subprocess
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path

from tools.checkouts import build_extension

OPTIMISATION = "-O1"  # takes half the time of -O3
DEPENDENCIES = re.compile(r"-MD -MT \S+ -MF \S+ ")
NANOBIND = re.compile(r"-I\S*/nanobind/include")  # that of an environment which pip has removed
JOBS = 2


def installed_build(checkout: Path, module: str) -> Path | None:
    """The folder in which `module` of this checkout's installation was built; None if there is none."""
    line = f"CMAKE_HOME_DIRECTORY:INTERNAL={checkout}\n"
    caches = sorted(checkout.glob("build/*/CMakeCache.txt"))
    found = (cache.parent for cache in caches if line in cache.read_text())
    return next((folder for folder in found if (folder / module).exists()), None)


def build_with(file: str, copy: Path, folder: Path, checkout: Path, module: str) -> Path:
    """Builds the extension of the sources below `copy` in `folder`, and returns its file.

    file: the one, from the root, in which `copy` differs from `checkout`. module: the name of the installed
    extension's file. Without a build of it in `checkout` all sources are compiled.

    Raises ImportError without the packages cmake, ninja and nanobind, and RuntimeError with what was printed
    if it cannot be built.
    """
    build = installed_build(checkout, module)
    if build is None:
        return build_extension(copy, folder, OPTIMISATION)
    folder.mkdir(exist_ok=True)
    *compiling, linking = _ninja(build, "-t", "commands").splitlines()
    commands = {_output(command): command for command in compiling if " -c " in command}
    objects = [name for name in _outdated(build, checkout / file) if name in commands]
    replaced = {name: folder / f"{number}.o" for number, name in enumerate(objects)}
    with ThreadPoolExecutor(JOBS) as pool:
        found = [
            pool.submit(_compile, commands[name], replaced[name], build, copy, checkout) for name in objects
        ]
        for each in found:
            each.result()
    built = folder / _output(linking)
    words = [
        str(replaced.get(word, word))
        for word in shlex.split(linking.removeprefix(": && ").removesuffix(" && :"))
    ]
    words[words.index("-o") + 1] = str(built)
    _run(words, build)
    return built


def _outdated(build: Path, changed: Path) -> list[str]:
    """Objects that depend on `changed`, or on a file that is newer than they are."""
    found = []
    for part in _ninja(build, "-t", "deps").split("\n\n"):
        first, *others = part.splitlines() or [""]
        name = first.partition(":")[0]
        depends = [Path(os.path.normpath(build / line.strip())) for line in others]  # some may be relative
        written = (build / name).stat().st_mtime if depends else 0.0
        if changed in depends or any(path.exists() and path.stat().st_mtime > written for path in depends):
            found.append(name)
    return found


def _compile(command: str, to: Path, build: Path, copy: Path, checkout: Path) -> None:
    include = import_module("nanobind").include_dir()
    command = NANOBIND.sub(f"-I{include}", DEPENDENCIES.sub("", command))
    words = shlex.split(command.replace(f"{checkout}/src", f"{copy}/src"))
    words[words.index("-o") + 1] = str(to)
    words.insert(words.index("-c"), OPTIMISATION)  # the last one counts
    _run(words, build)


def _output(command: str) -> str:
    words = shlex.split(command)
    return words[words.index("-o") + 1]


def _ninja(build: Path, *arguments: str) -> str:
    return _run(
        [str(Path(import_module("ninja").BIN_DIR) / "ninja"), "-C", str(build), "--quiet", *arguments], build
    )


def _run(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command[:4])} failed:\n{done.stdout}{done.stderr}")
    return done.stdout
