"""What a start on a GPU waits for and Python has no part in: the driver's context.

A thread makes it beside imports, which hold the interpreter's lock.
"""

import ctypes
import os
import threading
from contextlib import suppress
from functools import cache

DRIVER = "libcuda.so.1"


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
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)


def _load(path: str, mode: int) -> bool:
    """Loads a library, which stays loaded. Unlike `ctypes.CDLL` it does not hold the interpreter's lock."""
    load = ctypes.CDLL(None).dlopen
    load.restype, load.argtypes = ctypes.c_void_p, (ctypes.c_char_p, ctypes.c_int)
    return load(os.fsencode(path), mode) is not None
