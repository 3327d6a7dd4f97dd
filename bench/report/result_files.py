"""Writes the website's index of the files in docs/results: what each holds, its command, commit and machine.

    python -m bench.report.result_files docs/result_files.md

`make site` runs it, so the page is always of the files that are there.
"""

import argparse
import ast
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.report.tables import RESULTS, Row, table
from bench.results import ROOT

_MODULE = re.compile(r"python (?:-m )?((?:bench|tools|tests)[./][\w./]+)")
_SENTENCE = re.compile(r"(.*?[.:])(?=\s|$)", re.DOTALL)
HEADER = ["file", "what", "command", "commit", "date", "machine"]


def page() -> str:
    """The page in Markdown: a table for each folder of docs/results."""
    by_folder: dict[str, list[Row]] = {}
    modules = module_files()
    for path in sorted(RESULTS.rglob("*.json")):
        name = path.relative_to(RESULTS)
        by_folder.setdefault(str(name.parent), []).append(row(name, json.loads(path.read_text()), modules))
    parts = [
        "# Result files\n",
        "Every figure of these pages comes from one of these files, which the command wrote. A cell is empty "
        "where a file says nothing.\n",
    ]
    for folder in sorted(by_folder, key=lambda each: (each != ".", each)):
        if folder != ".":
            parts.append(f"## {folder}\n")
        parts.append(table(HEADER, by_folder[folder]))
    return "\n".join(parts)


def row(name: Path, result: Mapping[str, Any], modules: Mapping[str, Path]) -> Row:
    """The line of a file. modules: by `module_files`."""
    command = result.get("command", "")
    return [
        f"[{name.name}](results/{name.as_posix()})",
        _cell(what(command, modules)),
        f"`{_cell(command)}`" if command else "",
        f"`{result['commit']}`" if isinstance(result.get("commit"), str) else "",
        result.get("date", ""),
        _cell(machine(result)),
    ]


def what(command: str, modules: Mapping[str, Path]) -> str:
    """The first sentence about the module that a command runs; empty where it is gone or names none."""
    found = _MODULE.match(command)
    if found is None:
        return ""
    path = modules.get(re.split(r"[./]", found[1].removesuffix(".py"))[-1])
    text = ast.get_docstring(ast.parse(path.read_text())) if path else None
    sentence = _SENTENCE.match(text or "")
    return " ".join(sentence[1].split()).rstrip(":") if sentence else ""


def module_files() -> dict[str, Path]:
    """Files of what writes results, by the last part of a module's name, which has outlived some folders."""
    files = [path for folder in ("tools", "bench", "tests/audits") for path in ROOT.glob(f"{folder}/**/*.py")]
    files = [path for path in files if path.parent.name != "report"]  # which measures nothing
    packages = {path.parent.name: path for path in files if path.name == "__main__.py"}
    return packages | {path.stem: path for path in files if not path.stem.startswith("__")}


def machine(result: Mapping[str, Any]) -> str:
    """The GPU, or else the CPU, that a file names; empty if it names none."""
    places = [result.get(name) for name in ("machine", "hardware")]
    facts: dict[str, Any] = {}
    for place in (*reversed(places), result):
        if isinstance(place, Mapping):
            facts |= {
                key: place[key] for key in ("gpu", "cpu_name", "cpu") if isinstance(place.get(key), str)
            }
    return facts.get("gpu") or facts.get("cpu_name") or facts.get("cpu") or ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.parse_args().out.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
