"""What a start on a GPU waits for and Python has no part in: the driver's context, and PyTorch's libraries.

Threads make both ready beside imports, which hold the interpreter's lock. Only one thread of a process can
load libraries at a time: where imports are still to come that load some, they wait for PyTorch's.
"""

import ctypes
import importlib.util
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

DRIVER = "libcuda.so.1"
# In the order in which `import torch` loads them. The first one is for all to see, as it is there.
LIBRARIES = ("libtorch_global_deps.so", "libc10.so", "libtorch_cpu.so", "libc10_cuda.so", "libtorch_cuda.so")
# Of packages beside PyTorch: what other libraries of theirs ask for by name only, so that a system's own one
# could be found first. PyTorch loads them by their paths, for the same reason.
BESIDE = ("libcublasLt.so.*[0-9]", "libnvrtc.so.*[0-9]", "libnvJitLink.so.*[0-9]")


def begin() -> None:
    """Begins, once in a process, where the driver shows a device. What fails here fails again later."""
    _begun()


def wait_for_context() -> None:
    """Begins, and returns when the context is there, or cannot be made."""
    _begun().join()


@cache
def _begun() -> threading.Thread:
    thread = threading.Thread(target=_retain_context)
    thread.start()
    return thread


def _retain_context() -> None:
    """Makes the primary context of the first device, which lasts as long as the process."""
    with suppress(OSError, AttributeError):
        if not _load(DRIVER, os.RTLD_NOW):
            return
        driver = ctypes.CDLL(DRIVER)
        device, context = ctypes.c_int(0), ctypes.c_void_p(0)
        if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), 0) == 0:
            threading.Thread(target=_load_libraries).start()
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)


def _load_libraries() -> None:
    """Loads the libraries of an installed PyTorch that is not imported yet, up to one that fails."""
    with suppress(OSError, AttributeError, ImportError, ValueError):  # as `find_spec` raises too
        for path, mode in libraries():
            if not _load(path, mode):
                return


def libraries() -> Iterator[tuple[str, int]]:
    """Paths, and modes of loading; none where PyTorch is imported, missing, or set to load otherwise."""
    if "torch" in sys.modules or os.getenv("TORCH_USE_RTLD_GLOBAL"):
        return
    found = importlib.util.find_spec("torch")
    for folder in map(Path, (found and found.submodule_search_locations) or ()):
        first, *others = (folder / "lib" / name for name in LIBRARIES)
        beside = (path for name in BESIDE for path in sorted(folder.parent.glob(f"nvidia/*/lib/{name}")))
        yield str(first), os.RTLD_LAZY | os.RTLD_GLOBAL
        for path in (*beside, *others):
            yield str(path), os.RTLD_LAZY


def _load(path: str, mode: int) -> bool:
    """Loads a library, which stays loaded. Unlike `ctypes.CDLL` it does not hold the interpreter's lock."""
    load = ctypes.CDLL(None).dlopen
    load.restype, load.argtypes = ctypes.c_void_p, (ctypes.c_char_p, ctypes.c_int)
    return load(os.fsencode(path), mode) is not None
