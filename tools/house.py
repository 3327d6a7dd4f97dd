"""Sizes of the rooms at two commits: files, lines, classes, protocols and public functions.

    python -m tools.house --against 93970e7 --out docs/results/house.json

A room is a folder of `src/coldstream`, or a module at its root. Lines are those of Python, C++ and CUDA;
classes, protocols and functions those of Python.
"""

import argparse
import ast
import json
import tempfile
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

from bench.results import ROOT, commit
from tools.checkouts import check_out

NATIVE = (".cu", ".cuh", ".cpp", ".h", ".inl")
MADE = "_csrc.pyi"  # written by nanobind


def room_sizes(package: Path) -> dict[str, dict[str, int]]:
    """By room: files, Python's lines, native lines, classes, protocols and public functions."""
    rooms: dict[str, Counter[str]] = {}
    for path in sorted(package.rglob("*")):
        is_python = path.suffix == ".py"
        if not (is_python or path.suffix in NATIVE) or path.name == MADE:
            continue
        inside = path.relative_to(package).parts
        room = rooms.setdefault(inside[0] if len(inside) > 1 else "(root)", Counter())
        text = path.read_text()
        room["files"] += 1
        room["python_lines" if is_python else "native_lines"] += len(text.splitlines())
        if is_python:
            room.update(_ideas(ast.parse(text)))
    names = ("files", "python_lines", "native_lines", "classes", "protocols", "functions")
    return {room: {name: counts[name] for name in names} for room, counts in sorted(rooms.items())}


def _ideas(tree: ast.Module) -> Counter[str]:
    found: Counter[str] = Counter()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            bases = {base.id for base in node.bases if isinstance(base, ast.Name)}
            found["protocols" if "Protocol" in bases else "classes"] += 1
    found["functions"] = sum(
        isinstance(node, ast.FunctionDef) and not node.name.startswith("_") for node in tree.body
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--against", required=True, metavar="COMMIT")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        check_out(ROOT, options.against, Path(folder))
        before = room_sizes(Path(folder, "src", "coldstream"))
    result = {
        "commit": commit(),
        "date": datetime.now(UTC).date().isoformat(),
        "command": f"python -m tools.house --against {options.against}",
        "against": options.against,
        "before": before,
        "after": room_sizes(ROOT / "src" / "coldstream"),
    }
    text = json.dumps(result, indent=1)
    if options.out:
        options.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
