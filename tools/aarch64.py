"""Runs tests of the CPU's kernels, in a wheel for aarch64, on a processor that qemu emulates.

    python3 -m tools.package dist --python python3.11 --machine aarch64
    python3 -m tools.aarch64 dist/coldstream-*-cp311-*_aarch64.whl
    python3 -m tools.aarch64 dist/coldstream-*-cp311-*_aarch64.whl -- tests/kernels/test_cpu_router.py -k top

The interpreter is Python 3.11 of Debian 12 for arm64. debootstrap fetches its packages. They are unpacked and
not installed, so that no program of them runs but that interpreter. What tests need comes as wheels for
aarch64. Both stay in build/aarch64. Takes debootstrap, dpkg, qemu-user-static and g++-aarch64-linux-gnu. That
compiler is for one test; debootstrap takes root.

An emulated processor has no speed to measure. It has the instructions of all tiers of aarch64.
"""

import argparse
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

from tools.package import ROOT, environment

FOLDER = ROOT / "build" / "aarch64"
RELEASE, PYTHON = "bookworm", "usr/bin/python3.11"
QEMU = ("qemu-aarch64-static", "qemu-aarch64")
COMPILER = "aarch64-linux-gnu-g++"  # of test_cpu_vec16
# With all that they depend on, as pip would judge conditions by this machine. PyTorch 2.9.1 has a wheel for
# aarch64 without CUDA's libraries.
PACKAGES = (
    *("numpy>=2.4.1", "torch==2.9.1", "filelock", "typing-extensions", "sympy", "mpmath<1.4", "networkx"),
    *("jinja2", "markupsafe", "fsspec", "pytest>=9", "iniconfig", "pluggy", "packaging", "pygments"),
    *("pytest-timeout>=2.4", "pytest-asyncio>=1.5", "hypothesis>=6.150", "sortedcontainers"),
    *("cuda-core>=1.2", "cuda-bindings>=13.0.3,<14", "cuda-pathfinder", "gguf>=0.19", "pyyaml", "tqdm"),
    "tokenizers>=0.23.3",
)
# What wheels may name; Debian 12 has a newer glibc.
PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_24", "manylinux_2_17", "manylinux2014")
# Those that run the extension; the others are of CUDA, or of Python alone.
FILES = (
    *("test_cpu_*.py", "test_expert_pool.py", "test_runtime.py", "test_held_experts.py"),
    # What newer families have; with `--cpu-only`, as these files also test kernels of a GPU.
    *("test_attention_kinds.py", "test_indexer.py", "test_router_rules.py", "test_expert_sizes.py"),
    *("test_glu.py", "test_hyper_connections.py", "test_ngram_embedding.py"),
)
# The server of experts, whose threads poll each other: one test of it takes an emulated CPU minutes. Besides,
# what takes packages that are not installed there.
LEFT_OUT = "not server and not transformers and not kernels_compile"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path, help="for CPython 3.11 on aarch64")
    parser.add_argument("arguments", nargs="*", help="of pytest, instead of the tests of the CPU's kernels")
    options = parser.parse_args()
    qemu = next((path for path in map(shutil.which, QEMU) if path), None)
    missing = [name for name in ("debootstrap", "dpkg-deb", COMPILER) if shutil.which(name) is None]
    if qemu is None or missing:
        name = (missing or QEMU)[0]
        packages = "qemu-user-static debootstrap g++-aarch64-linux-gnu"
        print(f"there is no {name}: apt install {packages}", file=sys.stderr)
        return 1
    if "-cp311-cp311-" not in options.wheel.name or not options.wheel.name.endswith("_aarch64.whl"):
        print(f"{options.wheel.name} is not a wheel for CPython 3.11 on aarch64", file=sys.stderr)
        return 1
    debian = unpack_debian(FOLDER / "debian")
    site = install_packages(FOLDER / "site")
    package = unpack_wheel(options.wheel, FOLDER / "package")
    command = [str(write_python(qemu, debian)), "-m", "pytest", "-p", "no:cacheprovider", "--cpu-only"]
    variables = {
        "PYTHONHOME": str((debian / PYTHON).parents[1]),
        "PYTHONPATH": f"{package}{os.pathsep}{site}",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    tests = options.arguments or [*kernel_tests(), "-k", LEFT_OUT]
    return subprocess.run([*command, *tests], cwd=ROOT, env=os.environ | variables).returncode


def kernel_tests() -> list[str]:
    """Paths of the tests that run the extension's kernels."""
    return sorted(str(path) for pattern in FILES for path in (ROOT / "tests" / "kernels").glob(pattern))


def unpack_debian(folder: Path) -> Path:
    """`folder`, with the files of a small Debian for arm64; as it is, if its Python is there."""
    if (folder / PYTHON).exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    options = ("--arch=arm64", "--foreign", "--variant=minbase", "--include=python3,libstdc++6,libgomp1")
    subprocess.run(["debootstrap", *options, RELEASE, str(folder)], check=True, stdout=subprocess.DEVNULL)
    for package in sorted((folder / "var/cache/apt/archives").glob("*.deb")):
        subprocess.run(["dpkg-deb", "-x", str(package), str(folder)], check=True)
    return folder


def write_python(qemu: str, debian: Path) -> Path:
    """A script that is Debian's Python on the emulated CPU, also for the processes that it starts."""
    script = FOLDER / "python3.11"
    script.write_text(f'#!/bin/sh\nexec {qemu} -0 "$0" -L {debian} {debian / PYTHON} "$@"\n')
    script.chmod(0o755)
    return script


def install_packages(folder: Path, packages: Sequence[str] = PACKAGES) -> Path:
    """`folder`, with the wheels of `packages` for aarch64; as it is, if they are there."""
    stamp = folder / ".installed"
    if stamp.exists() and stamp.read_text() == repr(packages):
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    platforms = ("any", *(f"{name}_aarch64" for name in PLATFORMS))
    kinds = ["--only-binary=:all:", "--python-version", "3.11", "--implementation", "cp"]
    kinds += [option for name in platforms for option in ("--platform", name)]
    kinds += [option for name in ("cp311", "abi3", "none") for option in ("--abi", name)]
    installer = environment(sys.executable, folder.with_name("installer"))
    pip = [str(installer), "-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-compile"]
    command = [*pip, "--no-deps", "--target", str(folder), *kinds, *packages]
    subprocess.run(command, check=True)
    stamp.write_text(repr(packages))
    return folder


def unpack_wheel(wheel: Path, folder: Path) -> Path:
    """`folder`, with the files of the wheel alone."""
    shutil.rmtree(folder, ignore_errors=True)
    with zipfile.ZipFile(wheel) as files:
        files.extractall(folder)
    return folder


if __name__ == "__main__":
    sys.exit(main())
