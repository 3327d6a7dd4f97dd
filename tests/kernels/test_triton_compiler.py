"""Every Triton kernel compiles for the oldest and the measured kind of GPU, where there is none too."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile(capability: int, tmp_path: Path) -> None:
    # A process of its own: this one may have bound the kernels to the interpreter.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    program = Path(__file__).with_name("triton_compile.py")
    command = [sys.executable, str(program), str(capability)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert {"few_rows_kernel", "grouped_kernel"} <= {line.split()[0] for line in result.stdout.splitlines()}
