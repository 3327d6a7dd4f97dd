"""Python's collector of reference cycles while a program starts.

Imports and loading make several hundred thousand objects that stay. The collector would go through all of
them every time their number has grown by a quarter, and find nothing.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


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
