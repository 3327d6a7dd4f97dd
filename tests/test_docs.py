"""The figures in the pages are those of the result files, and what pages name is there."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
NAMES_OF_TESTS = re.compile(r"^(?:async )?def (test_\w+)\(", re.MULTILINE)


def test_every_figure_in_the_pages_is_generated() -> None:
    command = [sys.executable, "bench/report.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}: run python bench/report.py"


def test_every_stop_on_the_ways_through_the_package_is_there() -> None:
    stops = re.findall(r"`([a-z_]+/[\w/]+\.\w+)`,\s+`([\w.]+)`", (DOCS / "structure.md").read_text())
    assert len(stops) > 30
    for file, name in stops:
        source = (ROOT / "src" / "coldstream" / file).read_text()
        defined = r"\b(def|class) " if file.endswith(".py") else r"\b"
        for part in name.split("."):
            assert re.search(rf"{defined}{part}\b", source), f"{part} of {file}"


def test_every_statement_of_speculation_has_a_test_of_its_name() -> None:
    _, _, section = (DOCS / "testing.md").read_text().partition("## Names of tests of speculation")
    names = re.findall(r"^\| `((?:sp|trap_)\w+)` \|", section.partition("\n## ")[0], re.MULTILINE)
    tests = [
        name for path in ROOT.glob("tests/*/**/*.py") for name in NAMES_OF_TESTS.findall(path.read_text())
    ]
    assert len(names) == 26
    for name in names:
        assert any(f"_{name}_" in test for test in tests), name
