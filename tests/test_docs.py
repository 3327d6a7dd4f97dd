"""The figures in the pages are those of the result files."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_every_figure_in_the_pages_is_generated() -> None:
    command = [sys.executable, "bench/report.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}: run python bench/report.py"
