"""A side of a benchmark in a thread in place of a process, and the machine that it measures."""

import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import Pipe
from typing import Any

from coldstream.placement.hardware import Hardware

MACHINE = Hardware("a CPU", ("avx2",), 4, 4, 2**35, 2**33, 5e10)


@contextmanager
def side(target: Any, asked: object, cpus: Collection[int], environment: Mapping[str, str]) -> Iterator[Any]:
    """In a thread of this process, which runs on some CPUs."""
    here, there = Pipe()
    thread = threading.Thread(target=target, args=(there, asked))
    thread.start()
    try:
        yield here
    finally:
        thread.join()
