import os
from collections.abc import Iterator

import pytest


@pytest.fixture
def no_descriptor_leaks() -> Iterator[None]:
    """Whatever a test does to a file, refusing it included, must leave no descriptor open."""
    before = os.listdir("/proc/self/fd")
    yield
    assert os.listdir("/proc/self/fd") == before
