"""Budgets of RAM for tests that leave experts on the disk."""

from pathlib import Path

import pytest

from bench.runners import open_cpu_runner
from coldstream.placement.plan import BudgetTooSmallError


def least_ram(path: Path, *, context_length: int, threads: int = 2) -> int:
    """The smallest budget of whole MiB that is accepted, as the error for a smaller one says."""
    with pytest.raises(BudgetTooSmallError) as caught:
        open_cpu_runner(path, threads=threads, context_length=context_length, ram_bytes=1)
    return -(-caught.value.least_bytes // 2**20) * 2**20
