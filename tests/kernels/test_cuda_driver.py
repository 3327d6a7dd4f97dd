"""What a driver says without a context: of a library that is made for it, in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from coldstream.kernels.cuda.driver import (
    MIN_CAPABILITY,
    MIN_CUDA,
    Driver,
    DriverDevice,
    driver_version,
    old_card,
    old_driver,
)
from fake_driver import build_driver

_REPORT = "from coldstream.kernels.cuda.driver import *; print([find_driver(), served_cuda()])"
_REFUSED = """
from coldstream.kernels.cuda import device
device.missing_packages = lambda: ()
try:
    device.find_gpu()
except device.DeviceError as error:
    print(error)
"""


def said(folder: Path, script: str = _REPORT) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"LD_LIBRARY_PATH": str(folder)},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def test_a_driver_with_two_devices(tmp_path: Path) -> None:
    build_driver(tmp_path, CUDA_VERSION=12080, NUM_DEVICES=2, MAJOR=7)
    devices = (
        DriverDevice("Example GPU", (7, 6), 8 << 30),
        DriverDevice("Another GPU", (7, 6), 9 << 30),
    )
    assert said(tmp_path) == repr([Driver((12, 8), 0, devices), (12, 8)])


@pytest.mark.parametrize(
    ("values", "driver"),
    [
        ({"STATUS": 100}, Driver((13, 0), 100, ())),
        ({"NUM_DEVICES": 0}, Driver((13, 0), 0, ())),
    ],
    ids=["does not start", "shows none"],
)
def test_a_driver_without_devices(tmp_path: Path, values: dict[str, int], driver: Driver) -> None:
    build_driver(tmp_path, **values)
    assert said(tmp_path) == repr([driver, (13, 0)])
    assert not driver.is_usable


def test_a_library_that_is_no_driver(tmp_path: Path) -> None:
    source = tmp_path / "none.c"
    source.write_text("int cuInit(unsigned flags) { return 0; }\n")
    subprocess.run(["gcc", "-shared", "-o", str(tmp_path / "libcuda.so.1"), str(source)], check=True)
    assert said(tmp_path) == repr([Driver(), None])
    (tmp_path / "libcuda.so.1").write_text("no library")
    assert said(tmp_path) == repr([Driver(), None])


def test_a_gpu_of_an_old_driver_is_refused_with_the_driver_to_install(tmp_path: Path) -> None:
    build_driver(tmp_path, CUDA_VERSION=12090)
    assert said(tmp_path, _REFUSED) == (
        "device cuda: the driver serves CUDA 12.9, this version needs 13.0: install driver 580 or later, "
        "or use device cpu"
    )


def test_what_is_new_enough() -> None:
    card = DriverDevice("a card", MIN_CAPABILITY, 1)
    old = DriverDevice("a card", (MIN_CAPABILITY[0] - 1, 9), 1)
    assert Driver(MIN_CUDA, 0, (card,)).is_usable
    assert not Driver(MIN_CUDA, 0, (old, card)).is_usable
    assert not Driver((MIN_CUDA[0] - 1, 9), 0, (card,)).is_usable
    assert old_driver(None) is None
    assert old_driver((MIN_CUDA[0] + 1, 0)) is None
    assert "compute capability 6.9, this version needs 7.5" in (old_card(old.name, old.capability) or "")


def test_the_driver_has_a_version_or_is_unknown() -> None:
    assert driver_version() == "unknown" or driver_version()[0].isdigit()


def test_the_kernel_module_says_its_version_before_any_library(tmp_path: Path) -> None:
    module = tmp_path / "version"
    module.write_text("580.95.05\n")
    assert driver_version(module) == "580.95.05"
    module.write_bytes(b"\xff\xfe")
    assert driver_version(module) == driver_version(tmp_path / "none")
