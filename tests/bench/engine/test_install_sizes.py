"""What the benchmark of installing reads from pip's output."""

import pytest

from bench.engine.install import downloaded_bytes


@pytest.mark.parametrize(
    ("line", "num_bytes"),
    [
        ("  Downloading torch-2.15.0-cp311-cp311-manylinux_2_28_x86_64.whl (539.2 MB)\n", 539.2e6),
        ("Downloading mdurl-0.1.2-py3-none-any.whl (10.0 kB)\n", 10e3),
        ("  Downloading small.tar.gz (812 bytes)\n", 812),
        ("  Downloading torch-2.15.0-cp311-cp311-manylinux_2_28_x86_64.whl.metadata (29 kB)\n", 0),
        ("Collecting torch>=2.11\n", 0),
        ("  Using cached mdurl-0.1.2-py3-none-any.whl (10.0 kB)\n", 0),
    ],
)
def test_only_whole_files_count(line: str, num_bytes: float) -> None:
    assert downloaded_bytes(line) == num_bytes
