"""The first page's picture of a run: the script draws it from the recording, which a real run still gives."""

import re
from html import unescape
from xml.etree import ElementTree

import pytest

from tools import run_picture
from tools.run_picture import BACKGROUND, COLORS, COLUMNS, COMMANDS, Call, lines_of, load, record, svg


def test_the_picture_is_what_the_script_draws() -> None:
    assert run_picture.PICTURE.read_text() == svg(load()), "run python -m tools.run_picture"


@pytest.mark.sharded(of="measurements")
def test_the_recorded_texts_are_what_the_commands_print_now() -> None:
    """Speeds belong to the machine; the answer does not."""
    recorded = load()
    assert tuple(call.command for call in recorded) == COMMANDS
    assert [call.stdout for call in record(COMMANDS)] == [call.stdout for call in recorded]
    assert len({call.stdout for call in recorded}) == 1


def test_every_word_is_in_the_picture_and_within_it() -> None:
    calls = load()
    tree = ElementTree.fromstring(svg(calls))
    texts = [element for element in tree.iter() if element.tag.endswith("}text")]
    drawn = "".join("".join(text.itertext()) for text in texts)
    for call in calls:
        for part in (*call.command, call.stdout, call.stderr):
            assert re.sub(r"\s", "", part) in re.sub(r"[\s']", "", drawn) or "'" in part
    width = float(tree.attrib["width"])
    assert all(float(text.attrib["x"]) + float(text.attrib["textLength"]) <= width for text in texts)
    assert max(float(text.attrib["y"]) for text in texts) < float(tree.attrib["height"])


def test_long_lines_are_broken_between_words_and_nothing_is_lost() -> None:
    words = " ".join(str(number) for number in range(200))
    lines = [text for _, text in lines_of([Call(("a",), words, "x" * 250)])]
    assert max(map(len, lines)) <= COLUMNS
    assert " ".join(" ".join(lines).split()).startswith(f"$ a {words} x")
    assert "".join(lines).count("x") == 250


def test_marks_of_the_text_are_no_marks_of_the_picture() -> None:
    drawn = svg([Call(("a",), "<b> & 'c'", "")])
    assert "&lt;b&gt; &amp;" in drawn
    assert "<b> & 'c'" in unescape(drawn)


def luminance(color: str) -> float:
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("color", COLORS.values())
def test_colours_stand_out_from_the_background(color: str) -> None:
    """A ratio of 7 is WCAG's highest level for small text. The background is the picture's own."""
    assert f'fill="{BACKGROUND}"' in svg(load())
    assert (luminance(color) + 0.05) / (luminance(BACKGROUND) + 0.05) >= 7
