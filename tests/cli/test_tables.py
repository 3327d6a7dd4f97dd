"""Tables lose nothing, however narrow the terminal is."""

import fcntl
import os
import pty
import struct
import sys
import termios
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from terminals import Terminal

from builders import write_gguf
from coldstream.cli.tables import pair_lines, table_lines, width_of, wrap
from short_rates import PROGRAM

CELLS = st.text(st.sampled_from("abc 汉é·"), min_size=1, max_size=12).map(str.strip)
COLUMNS = ("model", "size", "test", "t/s")
ROWS = [("coldstream demo", "29.26 MiB", "pp512", "12607.47"), ("coldstream demo", "29.26 MiB", "tg8", "7.1")]


def without_spaces(lines: list[str]) -> str:
    return "".join("".join(lines).split())


def test_what_fits_is_a_grid() -> None:
    assert table_lines(("name", "size"), [("a", "1.00 GiB"), ("long name", "2")], ("name",), 40) == [
        "name           size",
        "─────────  ────────",
        "a          1.00 GiB",
        "long name         2",
    ]


def test_llama_bench_s_table_is_markdown() -> None:
    lines = table_lines(COLUMNS, ROWS, ("model",), None, markdown=True)
    assert lines[0] == "| model           |      size |  test |      t/s |"
    assert lines[1] == "|-----------------|-----------|-------|----------|"
    assert lines[2] == "| coldstream demo | 29.26 MiB | pp512 | 12607.47 |"


def test_columns_that_are_the_same_in_all_rows_go_above_a_table_that_is_too_wide() -> None:
    assert table_lines(COLUMNS, ROWS, ("model",), 30, markdown=True) == [
        "model  coldstream demo",
        "size   29.26 MiB",
        "",
        "|  test |      t/s |",
        "|-------|----------|",
        "| pp512 | 12607.47 |",
        "|   tg8 |      7.1 |",
    ]


def test_the_first_column_is_wrapped_where_that_is_enough() -> None:
    rows = [("keys and values of all tokens", "RAM", "1 MiB"), ("free", "RAM", "2 MiB")]
    assert table_lines(("what", "where", "size"), rows, ("what", "where"), 32) == [
        "what                where   size",
        "──────────────────  ─────  ─────",
        "keys and values of  RAM    1 MiB",
        "  all tokens",
        "free                RAM    2 MiB",
    ]


def test_rows_become_lists_where_nothing_else_helps() -> None:
    rows = [("first", "11111111"), ("second", "22222222")]
    assert table_lines(("name", "number"), rows, ("name",), 15) == [
        "name",
        "    first",
        "number",
        "    11111111",
        "",
        "name",
        "    second",
        "number",
        "    22222222",
    ]


@given(st.lists(st.tuples(CELLS, CELLS, CELLS), min_size=1, max_size=4), st.integers(14, 60), st.booleans())
def test_every_cell_is_shown_and_no_line_is_wider_than_the_terminal(
    rows: list[tuple[str, str, str]], width: int, markdown: bool
) -> None:
    lines = table_lines(("one", "two", "three"), rows, ("one",), width, markdown)
    assert max(map(cell_len, lines)) <= width
    shown = without_spaces(lines)
    for row in rows:
        for cell in row:
            assert all(word in shown for word in cell.split())
    for name in ("one", "two", "three"):
        assert name in shown


@given(st.dictionaries(CELLS, CELLS, min_size=1, max_size=4), st.integers(14, 60))
def test_every_fact_is_shown(facts: dict[str, str], width: int) -> None:
    lines = pair_lines(facts, width)
    assert max(map(cell_len, lines)) <= width
    shown = without_spaces(lines)
    for name, value in facts.items():
        assert "".join(name.split()) in shown
        assert all(word in shown for word in value.split())


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("short", ["short"]),
        ("a longer text in words", ["a longer text", "in words"]),
        ("/a/path/without/spaces", ["/a/path/withou", "t/spaces"]),
        (" " * 40, [""]),
    ],
)
def test_wrapping(text: str, lines: list[str]) -> None:
    assert wrap(text, 14) == lines
    assert wrap(text, None) == [text]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("tables") / "tiny.gguf")[0]


@pytest.mark.sharded(of="processes")
@pytest.mark.parametrize("columns", [80, 60])
@pytest.mark.parametrize(
    ("verb", "names"),
    [
        (("bench", "-p", "8,16", "-n", "4", "-r", "1"), ["backend", "threads", "params", "t/s", "ceiling"]),
        (("plan", "-c", "100"), ["what", "where", "size", "of this plan", "at most", "decode, tok/s"]),
        (("show", "--tensors"), ["bits per weight", "blk.3.ffn_gate_exps.weight", "offset", "shape"]),
    ],
)
def test_no_verb_writes_beyond_the_edge_of_a_terminal(
    path: Path, tmp_path: Path, verb: tuple[str, ...], names: list[str], columns: int
) -> None:
    name, *options = verb
    command = [sys.executable, *PROGRAM, name, str(path), *options]
    with Terminal(command, home=str(tmp_path), columns=columns) as terminal:
        lines = terminal.read_to_the_end().splitlines()
    # Without a sentence, which the terminal wraps, and bars, which are drawn over each other.
    tables = [line for line in lines if "decode reads" not in line and "━" not in line]
    assert max(map(cell_len, tables)) <= columns
    shown = "\n".join(lines)
    assert "…" not in shown.split("metadata:")[0]
    for name in names:
        assert name in shown


def test_a_terminal_that_does_not_say_how_wide_it_is_has_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    parent, child = pty.openpty()
    with os.fdopen(child, "w") as stream, os.fdopen(parent, "w"):
        assert width_of(stream) == 80
        fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 33, 0, 0))
        assert width_of(stream) == 33
    with open(os.devnull, "w") as file:
        assert width_of(file) is None
    assert width_of(None) is None


@pytest.mark.parametrize("markdown", [False, True])
def test_a_table_that_is_as_wide_as_the_terminal_is_one(markdown: bool) -> None:
    wide = table_lines(COLUMNS, ROWS, ("model",), None, markdown)
    width = max(map(cell_len, wide))
    assert table_lines(COLUMNS, ROWS, ("model",), width, markdown) == wide
    narrower = table_lines(COLUMNS, ROWS, ("model",), width - 1, markdown)
    assert narrower != wide
    assert max(map(cell_len, narrower)) < width


def test_a_first_column_of_numbers_is_not_wrapped() -> None:
    columns, rows = ("numbers of it", "name"), [("123 456 789 123", "a" * 20), ("7 8", "b" * 20)]
    assert "─" in "".join(table_lines(columns, rows, ("numbers of it", "name"), 32))
    lines = table_lines(columns, rows, ("name",), 32)
    assert "─" not in "".join(lines)
    assert any("123 456 789 123" in line for line in lines)


@pytest.mark.parametrize("width", [0, 1, 9, 10])
def test_words_are_split_into_no_less_than_ten_cells(width: int) -> None:
    assert wrap("a" * 25, width) == ["a" * 10, "a" * 10, "a" * 5]
