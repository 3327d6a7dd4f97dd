"""Builds the sdist and the wheel from what is committed, and tries both as a user would.

    python3 tools/package.py dist
    python3 tools/package.py build/trial --trial        not optimised, which takes a third of the time

The sdist is made of an export of HEAD, and the wheel of the sdist. The sdist must hold tracked files alone,
and all of them. The wheel is installed into an empty environment, away from the checkout, and generates.
"""

import argparse
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
METADATA = {"PKG-INFO"}  # what an sdist has besides
UNOPTIMISED = "-Ccmake.define.COLDSTREAM_OPTIMISATION=-O0"
PROMPT = "def read_lines(path):"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--trial", action="store_true", help="to be tried and not published: not optimised")
    options = parser.parse_args()
    out, settings = options.out.resolve(), [UNOPTIMISED] if options.trial else []
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        builder = environment(Path(folder) / "builder")
        run(builder, "-m", "pip", "--disable-pip-version-check", "install", "-q", "build")
        source = export(Path(folder) / "source")
        # Without a folder between, `build` makes the sdist, unpacks it elsewhere, and the wheel from that.
        run(builder, "-m", "build", "--outdir", str(out), *settings, str(source))
        (sdist,) = out.glob("coldstream-*.tar.gz")
        (wheel,) = out.glob("coldstream-*.whl")
        problem = difference(sdist, tracked())
        if problem:
            print(problem, file=sys.stderr)
            return 1
        try_wheel(wheel, Path(folder) / "user")
    print(f"{sdist.name} holds the {len(tracked())} tracked files; {wheel.name} generates")
    return 0


def environment(folder: Path) -> Path:
    """A new virtual environment; its Python."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    return folder / "bin" / "python"


def run(python: Path, *arguments: str, folder: Path | None = None) -> str:
    """What a command of `python` prints. Raises CalledProcessError."""
    command = [str(python), *arguments]
    return subprocess.run(command, cwd=folder, check=True, stdout=subprocess.PIPE, text=True).stdout


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


def difference(sdist: Path, expected: set[str]) -> str | None:
    """What an sdist has besides the expected files, or lacks of them; None if it is as it should be."""
    with tarfile.open(sdist) as files:
        found = {name.partition("/")[2] for name in files.getnames()} - METADATA - {""}
    more, less = sorted(found - expected), sorted(expected - found)
    if not more and not less:
        return None
    return f"{sdist.name} holds other files than the tracked ones; besides: {more[:5]}, lacking: {less[:5]}"


def try_wheel(wheel: Path, folder: Path) -> None:
    """Install a wheel into an empty environment and generate. Raises CalledProcessError or RuntimeError."""
    python = environment(folder / "venv")
    run(python, "-m", "pip", "--disable-pip-version-check", "install", "-q", str(wheel))
    command = ["-m", "coldstream", "run", "-p", PROMPT, "-n", "16", "--temp", "0", "-q", "--no-echo"]
    text = run(python, *command, folder=folder)
    if not text.strip():
        raise RuntimeError(f"{wheel.name} generated nothing")


if __name__ == "__main__":
    sys.exit(main())
