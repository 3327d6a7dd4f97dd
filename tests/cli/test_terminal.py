"""What reaches a terminal."""

import io
import subprocess
import sys
from pathlib import Path

import pytest
from terminals import Terminal

from coldstream.cli.answer import AnswerWriter
from coldstream.cli.terminal import format_bytes, format_count, visible


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain\ttext\n", "plain\ttext\n"),
        ("\x1b[2Jgone\x07", "\\x1b[2Jgone\\x07"),
        ("a\rb\x9b", "a\\rb\\x9b"),
        ("👩‍👩‍👧 é 汉", "👩‍👩‍👧 é 汉"),
    ],
)
def test_control_characters_are_shown_not_obeyed(text: str, shown: str) -> None:
    assert visible(text) == shown


def test_a_pipe_gets_the_text_as_it_is_and_a_terminal_what_is_visible() -> None:
    pipe, terminal = io.StringIO(), _Terminal()
    AnswerWriter(pipe).write("a\x1bb")
    AnswerWriter(terminal).write("a\x1bb")
    assert (pipe.getvalue(), terminal.getvalue()) == ("a\x1bb", "a\\x1bb")


@pytest.mark.parametrize(("pieces", "written"), [(["a", "b"], "ab\n"), (["a\n", ""], "a\n"), ([""], "")])
def test_an_answer_ends_its_line_once(pieces: list[str], written: str) -> None:
    out = io.StringIO()
    writer = AnswerWriter(out)
    for piece in pieces:
        writer.write(piece)
    writer.end_line()
    assert out.getvalue() == written


def test_notes_are_broken_between_words_on_a_terminal_only(tmp_path: Path) -> None:
    code = "from coldstream.cli.terminal import note; note('several words in a line\\nand another')"
    command = [sys.executable, "-c", code]
    with Terminal(command, home=str(tmp_path), columns=14) as terminal:
        assert terminal.read_to_the_end() == "several words\nin a line\nand another\n"
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == "several words in a line\nand another\n"


def test_sizes_and_counts_read_as_in_llama_bench() -> None:
    assert (format_bytes(2**30), format_bytes(3 * 2**20)) == ("1.00 GiB", "3.00 MiB")
    assert (format_count(34_660_000_000), format_count(10_480_000)) == ("34.66 B", "10.48 M")
