"""Saves prefixes into a folder without end, and tells of each; to be killed. Usage: FOLDER SEED."""

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parent))

from prefix_memory import Source

from coldstream.kvcache.prefix.disk_tier import PrefixDisk

disk = PrefixDisk(Path(sys.argv[1]), b"a model", 300_000)
random = np.random.default_rng(int(sys.argv[2]))
print("open", flush=True)
while True:
    length = int(random.integers(1, 1500))
    start = 10_000 * int(random.integers(0, 4))
    ids = np.arange(start, start + length, dtype=np.int32)
    assert disk.save("", ids, Source(length))
    print("saved", flush=True)
