"""What a start on a GPU makes ready beside imports: with a driver that is none, in processes of their own."""

import importlib.util
import os
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from coldstream.kernels.cuda import ahead
from fake_driver import build_driver

# Says what is loaded once all threads have ended, and whether PyTorch works after that.
_REPORT = """
import sys, threading
from coldstream.kernels.cuda import ahead
ahead.begin()
ahead.wait_for_context()
for thread in threading.enumerate():
    if thread is not threading.main_thread():
        thread.join()
assert "torch" not in sys.modules
maps = open("/proc/self/maps").read()
print(*(name for name in ahead.LIBRARIES if name in maps))
if "libtorch_cuda.so" in maps:
    import torch
    print(torch.ones(2, 3).matmul(torch.ones(3)).sum().item())
"""


def report(**environment: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", _REPORT],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a driver library that shows a GPU."""
    return build_driver(tmp_path_factory.mktemp("driver"))


def pytorch_has_cuda() -> bool:
    found = importlib.util.find_spec("torch")
    folders = (found and found.submodule_search_locations) or []
    return any(Path(folder, "lib", name).exists() for folder in folders for name in ahead.LIBRARIES[-1:])


@pytest.mark.skipif(not pytorch_has_cuda(), reason="this PyTorch has no CUDA")
def test_libraries_are_there_before_pytorch_is_imported_and_it_works_with_them(driver: Path) -> None:
    loaded, product = report(LD_LIBRARY_PATH=str(driver))
    assert tuple(loaded.split()) == ahead.LIBRARIES
    assert float(product) == 6


def test_nothing_is_loaded_for_a_driver_that_shows_no_device(tmp_path: Path) -> None:
    assert report(LD_LIBRARY_PATH=str(build_driver(tmp_path, STATUS=100))) == [""]


def test_what_pytorch_would_load_otherwise_is_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert list(ahead.libraries()) == []
    spec = ModuleSpec("torch", None, is_package=True)
    spec.submodule_search_locations = ["/packages/torch"]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    assert [Path(path).name for path, _ in ahead.libraries()] == [*ahead.LIBRARIES]
    monkeypatch.setenv("TORCH_USE_RTLD_GLOBAL", "1")
    assert list(ahead.libraries()) == []
    monkeypatch.delenv("TORCH_USE_RTLD_GLOBAL")
    monkeypatch.setitem(sys.modules, "torch", sys)
    assert list(ahead.libraries()) == []


def test_libraries_of_packages_beside_pytorch_come_before_those_that_ask_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("cu13/lib/libnvJitLink.so.13", "cublas/lib/libcublasLt.so.12", "cublas/lib/libcublas.so.12"):
        path = tmp_path / "nvidia" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    spec = ModuleSpec("torch", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path / "torch")]
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    first, *others = ahead.libraries()
    assert first == (str(tmp_path / "torch/lib/libtorch_global_deps.so"), os.RTLD_LAZY | os.RTLD_GLOBAL)
    assert {mode for _, mode in others} == {os.RTLD_LAZY}
    names = [Path(path).name for path, _ in others]
    assert names == ["libcublasLt.so.12", "libnvJitLink.so.13", *ahead.LIBRARIES[1:]]
