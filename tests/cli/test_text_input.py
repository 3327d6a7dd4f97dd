"""Prompts from files: to the byte, and within bounds."""

from pathlib import Path

import pytest

from coldstream.cli import text_input
from coldstream.cli.text_input import prompt_of
from coldstream.errors import InvalidRequestError


@pytest.mark.parametrize(
    ("content", "prompt"),
    [("a", "a"), ("a\n", "a"), ("a\n\n", "a\n"), ("a \n", "a "), (" \n", " "), ("\n\n", "\n")],
)
def test_the_last_line_end_alone_is_the_files(tmp_path: Path, content: str, prompt: str) -> None:
    path = tmp_path / "x.txt"
    path.write_text(content)
    assert prompt_of(None, path) == prompt
    assert prompt_of("more", path) == f"{prompt}\nmore"


def test_a_file_may_have_as_many_bytes_as_are_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_input, "MAX_TEXT_BYTES", 10)
    path = tmp_path / "x.txt"
    path.write_bytes(b"a" * 10)
    assert prompt_of(None, path) == "a" * 10
    path.write_bytes(b"a" * 11)
    with pytest.raises(InvalidRequestError, match="has more than 10 bytes"):
        prompt_of(None, path)
