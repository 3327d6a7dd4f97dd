"""The snippets of docs/python.md run, one after the other, and print what the page says."""

import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parent.parent / "docs" / "python.md"
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n^```text\n(.*?)^```$)?", re.DOTALL | re.MULTILINE)


def snippets(text: str) -> list[re.Match[str]]:
    """The snippets of a page: the code, and its output or None."""
    blocks = list(BLOCK.finditer(text))
    assert len(blocks) == text.count("```python") > 5
    return blocks


def test_every_snippet_prints_what_the_page_says() -> None:
    text = PAGE.read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    for block in snippets(text):
        line = text.count("\n", 0, block.start(1)) + 1
        code = compile("\n" * (line - 1) + block[1], str(PAGE), "exec")
        printed = StringIO()
        with redirect_stdout(printed):
            exec(code, names)
        assert printed.getvalue() == (block[2] or ""), f"{PAGE.name}, line {line}"
    with pytest.raises(Exception, match="closed"):
        names["llm"].generate("def")
