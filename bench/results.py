"""Where figures go: a JSON document per result, with the commit and the day of the measurement."""

import argparse
import json
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
# The sources that figures depend on.
SOURCES = ("src", "bench", "tests/audits", "CMakeLists.txt", "pyproject.toml")


def commit(sources: Sequence[str] = SOURCES) -> str:
    """The commit of this checkout, marked if `sources` differ; "unknown" where there is no repository."""
    try:
        name = _git("rev-parse", "--short=12", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", *sources)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{name}-changed" if changed else name


def write_result(result: Mapping[str, Any], path: Path | None, commit_name: str | None = None) -> None:
    """Writes `result` to `path`, if given, and prints it as one line of JSON, both with commit and date.

    commit_name is for a copy of the sources without their repository.
    """
    stamped = {
        "commit": commit_name or commit(),
        "date": datetime.now(UTC).date().isoformat(),
        **result,
    }
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(stamped, indent=1) + "\n")
    print(json.dumps(stamped), flush=True)


def add_result_options(parser: argparse.ArgumentParser, default: Path | None = None) -> None:
    """Adds where `write_result` writes, `default` unless it is said, and the commit that it names."""
    parser.add_argument("--out", type=Path, default=default, help="also write the result here, as JSON")
    parser.add_argument("--commit", help="of these sources, where they are without their repository")


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
