"""docs/structure.md is short, and all that it names is there."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "coldstream"
TEXT = (ROOT / "docs" / "structure.md").read_text()

STOP = re.compile(r"`([\w/]+\.\w+):([\w.]+)`")
PATH = re.compile(r"`([\w/]+(?:\.(?:py|h|cpp|cu|cuh|inl)|/))`")
WALKS = {
    "A budget's way from --vram to slots": 15,
    "An expert's bytes on a partly filled GPU": 9,
    "A draft": 10,
    "A request, from the socket to tokens": 12,
    "A token's step": 10,
}


def sections() -> dict[str, str]:
    """The text under each heading, which has lost its backticks."""
    parts = re.split(r"^## (.*)\n", TEXT, flags=re.MULTILINE)
    return {name.replace("`", ""): text for name, text in zip(parts[1::2], parts[2::2], strict=True)}


def is_defined(source: str, name: str) -> bool:
    """Whether a module defines a dotted name: a class or a function, and what is in it."""
    body = ast.parse(source).body
    for part in name.split("."):
        found = [
            node
            for node in body
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == part
        ]
        if not found:
            return False
        body = found[0].body
    return True


@pytest.mark.parametrize("stop", sorted({f"{file}:{name}" for file, name in STOP.findall(TEXT)}))
def test_every_function_of_the_page_is_there(stop: str) -> None:
    file, name = stop.split(":")
    source = (PACKAGE / file).read_text()
    if file.endswith(".py"):
        assert is_defined(source, name)
    else:
        assert re.search(rf"^[^/\n]*\b{name}\b[^;\n]*[({{\n]", source, re.MULTILINE)


def test_every_file_and_folder_of_the_page_is_there() -> None:
    named = set(PATH.findall(TEXT))
    assert len(named) > 15
    assert [path for path in sorted(named) if not (PACKAGE / path).exists()] == []


def test_the_page_names_every_room() -> None:
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")} - {"assets"}
    assert {f"{room}/" for room in rooms} <= set(PATH.findall(TEXT))


def test_the_page_has_a_hundred_lines_at_most() -> None:
    assert len(TEXT.splitlines()) <= 100


@pytest.mark.parametrize(("walk", "most"), WALKS.items())
def test_a_walk_is_short(walk: str, most: int) -> None:
    assert len([line for line in sections()[walk].splitlines() if line]) <= 8
    assert 3 < len(STOP.findall(sections()[walk])) <= most


def test_eight_questions_have_a_place_for_an_answer() -> None:
    rows = [line for line in sections()["Eight questions"].splitlines() if line.startswith("| ")][2:]
    assert len(rows) == 8
    for row in rows:
        _, question, answer, _ = row.split("|")
        assert question.strip().endswith("?")
        assert STOP.search(answer), question
