"""The driver's context is made beside imports: with a driver that is none, in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

from fake_driver import build_driver

# Says whether the driver is loaded once the context is there or cannot be made.
_REPORT = """
import sys
from coldstream.kernels.cuda import ahead
ahead.begin()
ahead.wait_for_context()
assert not {"torch", "cuda"} & set(sys.modules)
print(ahead.DRIVER in open("/proc/self/maps").read())
"""


def report(folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", _REPORT],
        env=os.environ | {"LD_LIBRARY_PATH": str(folder)},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def test_a_driver_is_loaded_without_a_package(tmp_path: Path) -> None:
    assert report(build_driver(tmp_path)) == "True"


def test_a_driver_that_shows_no_device_ends_it(tmp_path: Path) -> None:
    assert report(build_driver(tmp_path, STATUS=100)) == "True"


def test_without_a_driver_nothing_is_loaded(tmp_path: Path) -> None:
    assert report(tmp_path) == "False"
