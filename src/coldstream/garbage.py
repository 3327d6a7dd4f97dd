"""Python's collector of reference cycles while many objects are made at once.

Imports and loading make several hundred thousand objects that stay, and a large request makes as many that go
together. The collector would go through all of them every time their number has grown by a quarter, and find
nothing.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused() -> Iterator[None]:
    """Nothing is collected within. Not for several threads at once."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def starting() -> Iterator[None]:
    """Nothing is collected within, and what is there at the end is taken to stay until the program ends.

    Only for entry points of programs: cycles of a caller's own that are garbage at the end stay too.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
