"""A function of the package, its benchmarks and tools has 60 lines at most, its file 600."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LINES_OF_A_FUNCTION = 60
LINES_OF_A_FILE = 600


def functions(source: str) -> Iterator[tuple[str, int]]:
    """The names of all functions and their lines, docstrings and functions inside included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            yield node.name, node.end_lineno - node.lineno + 1


@pytest.mark.parametrize("folder", ["src", "bench", "tools"])
def test_functions_and_files_are_short(folder: str) -> None:
    sources = {path.relative_to(ROOT): path.read_text() for path in (ROOT / folder).rglob("*.py")}
    assert len(sources) > 10
    too_long = [
        (str(path), name, lines)
        for path, text in sources.items()
        for name, lines in functions(text)
        if lines > LINES_OF_A_FUNCTION
    ]
    assert too_long == []
    files = {str(path): len(text.splitlines()) for path, text in sources.items()}
    assert {path: lines for path, lines in files.items() if lines > LINES_OF_A_FILE} == {}


def test_lines_of_functions_are_all_of_theirs() -> None:
    lines = ["class A:", "    @property", "    def f(", "        self", "    ):"]
    lines += ['        """A."""', "", "        async def g(): ..."]
    assert dict(functions("\n".join(lines))) == {"f": 6, "g": 1}
