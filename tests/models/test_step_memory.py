"""A step leaves no memory behind: 100 KB a step would be seen, in Python and in C++."""

import subprocess
import sys
from pathlib import Path

import pytest
from runner_cases import MIX

from builders import Dims, write_gguf
from ram_budgets import least_ram

HERE = Path(__file__).parent
NUM_REPEATS = 12
NUM_STEPS = 10 * NUM_REPEATS
# Far above what an allocator takes at once, far below a leak of 100 KB in each step.
MOST_KIB = NUM_STEPS * 10


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
@pytest.mark.parametrize("is_mapped", [True, False], ids=["mapped", "from the disk"])
def test_mm04_steps_after_the_first_take_no_more_memory(tmp_path: Path, is_mapped: bool) -> None:
    """In a process of its own, whose allocator has no holes that a leak could fill unseen."""
    path = tmp_path / "moe.gguf"
    write_gguf(path, types=MIX, dims=Dims(experts=64, experts_used=4))
    ram_bytes = 1 << 32 if is_mapped else least_ram(path, context_length=128) + (2 << 20)
    command = [
        sys.executable,
        str(HERE / "step_memory_worker.py"),
        str(path),
        str(ram_bytes),
        str(NUM_REPEATS),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    _, before, after = ([int(kib) for kib in line.split()] for line in done.stdout.splitlines())
    for name, was, is_now in zip(("anonymous", "data"), before, after, strict=True):
        assert is_now - was < MOST_KIB, f"{name}: {was} KiB, and {is_now} KiB {NUM_STEPS} steps later"
