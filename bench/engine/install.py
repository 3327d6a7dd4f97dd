"""What each kind of installation downloads, takes on disk and how long it lasts, in an empty environment.

    python -m bench.engine.install --python /usr/bin/python3 --out docs/results/install.json

The wheel is built once, by an isolated build, and then installed with each extra into a new virtual
environment, with none of the caller's settings and no cache. Downloads are as pip names them.
"""

import argparse
import os
import platform
import re
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from bench.results import ROOT, write_result
from coldstream.placement.hardware import Hardware

KINDS = {"cpu": "", "cuda": "[cuda]", "test": "[test]"}
DOWNLOAD = re.compile(r"\s*Downloading (?!\S*\.metadata)\S+ \(([\d.]+) (bytes|kB|MB|GB)\)")
UNITS = {"bytes": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}
SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin"


class Installer:
    """Virtual environments below `folder`, each with a home directory of its own."""

    def __init__(self, python: str, folder: Path) -> None:
        self._python = python
        self._folder = folder

    def build(self) -> tuple[Path, dict[str, float]]:
        """The wheel, and what making it took."""
        wheels = self._folder / "wheels"
        venv, environment = self._new("build")
        command = [f"{venv}/bin/pip", "wheel", "--no-deps", "-w", str(wheels), str(ROOT)]
        taken = run_pip(command, environment)
        (wheel,) = wheels.glob("*.whl")
        return wheel, {"wall_s": taken["wall_s"]}

    def install(self, kind: str, wheel: Path) -> dict[str, float]:
        """What the installation of `wheel` with the extras of `kind` took and takes; it is removed again."""
        venv, environment = self._new(kind)
        empty = disk_bytes(venv)
        taken = run_pip([f"{venv}/bin/pip", "install", f"{wheel}{KINDS[kind]}"], environment)
        listed = [f"{venv}/bin/pip", "list", "--format", "freeze"]
        packages = subprocess.run(listed, env=environment, capture_output=True, text=True, check=True)
        result = {
            **taken,
            "disk_bytes": disk_bytes(venv),
            "empty_environment_bytes": empty,
            "packages": len(packages.stdout.splitlines()),
        }
        subprocess.run(["rm", "-rf", str(venv.parent)], check=True)
        return result

    def _new(self, name: str) -> tuple[Path, dict[str, str]]:
        home = self._folder / name
        home.mkdir()
        environment = {"PATH": SYSTEM_PATH, "HOME": str(home)}
        subprocess.run([self._python, "-m", "venv", str(home / "venv")], env=environment, check=True)
        return home / "venv", environment


def run_pip(command: list[str], environment: Mapping[str, str]) -> dict[str, float]:
    """Wall seconds of a command of pip, which must succeed and is shown, and the bytes that it downloads."""
    start, num_bytes = time.perf_counter(), 0.0
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            num_bytes += downloaded_bytes(line)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return {"wall_s": time.perf_counter() - start, "download_bytes": round(num_bytes)}


def downloaded_bytes(line: str) -> float:
    """What a line of pip's says that it downloads: 0 for other lines, and for a file's metadata alone."""
    match = DOWNLOAD.match(line)
    return float(match[1]) * UNITS[match[2]] if match else 0.0


def disk_bytes(folder: Path) -> int:
    """Bytes on disk of the files below `folder`."""
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", default="python3")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    version = [options.python, "-c", "import platform; print(platform.python_version())"]
    with tempfile.TemporaryDirectory() as folder:
        installer = Installer(options.python, Path(folder))
        wheel, build = installer.build()
        result = {
            "command": "python -m bench.engine.install",
            "machine": {
                "system": f"{platform.system()} {platform.machine()}",
                "python": subprocess.run(version, capture_output=True, text=True, check=True).stdout.strip(),
                "num_physical_cores": Hardware.measure().num_physical_cores,
                "load_average": os.getloadavg()[0],
            },
            "wheel_bytes": wheel.stat().st_size,
            "build": build,
            "installs": {kind: installer.install(kind, wheel) for kind in KINDS},
        }
        write_result(result, options.out)


if __name__ == "__main__":
    main()
