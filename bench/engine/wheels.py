"""What each wheel weighs, and takes to build, install and run, in an empty environment without a compiler.

    python -m bench.engine.wheels --newer python3.13 --out docs/results/wheels.json

Each Python of `--python` makes a wheel of what is committed. That for the stable ABI is also tried with those
of `--newer`. A trial installs the wheel, generates 16 tokens with the bundled model, and asks a server for a
chat of as many.
"""

import argparse
import os
import platform
import subprocess
import tempfile
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.engine.install import disk_bytes
from bench.results import ROOT, write_result
from coldstream.placement.hardware import Hardware
from tools.package import GLIBC, PYTHONS, Packager
from tools.wheel_trial import try_wheel


def measure(pythons: Sequence[str], newer: Sequence[str], out: Path, folder: Path) -> dict[str, Any]:
    """By name of the wheel; they stay in `out`."""
    out.mkdir(parents=True, exist_ok=True)
    packager = Packager(folder, out.resolve())
    sdist = packager.make_sdist()
    wheels = {}
    for python in pythons:
        start = time.perf_counter()
        wheel = packager.make_wheel(python, sdist, [])
        build_s = time.perf_counter() - start
        users = [python, *(newer if "-abi3-" in wheel.name else [])]
        with zipfile.ZipFile(wheel) as files:
            extensions = [info.file_size for info in files.infolist() if info.filename.endswith(".so")]
        wheels[wheel.name] = {
            "wheel_bytes": wheel.stat().st_size,
            "extension_bytes": sum(extensions),
            "build_s": build_s,
            "trials": {version(user): trial(user, wheel, folder / f"{user}-user") for user in users},
        }
    return wheels


def trial(python: str, wheel: Path, folder: Path) -> dict[str, float]:
    """Seconds of each step, and what the environment then takes on disk."""
    return {**try_wheel(python, wheel, folder), "disk_bytes": disk_bytes(folder / "venv")}


def version(python: str) -> str:
    command = [python, "-c", "import platform; print(platform.python_version())"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", action="append", help="makes a wheel; may be given several times")
    parser.add_argument("--newer", action="append", default=[], help="tries that for the stable ABI as well")
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="where the wheels go")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        result = {
            "command": "python -m bench.engine.wheels --newer python3.13",
            "machine": {
                "system": f"{platform.system()} {platform.machine()}",
                "num_physical_cores": Hardware.measure().num_physical_cores,
                "load_average": load,
            },
            "glibc": f"{GLIBC[0]}.{GLIBC[1]}",
            "wheels": measure(options.python or PYTHONS, options.newer, options.dist, Path(folder)),
        }
        write_result(result, options.out)


if __name__ == "__main__":
    main()
