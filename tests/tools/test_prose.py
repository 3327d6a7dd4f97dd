"""tools/prose.py: what counts as a sentence, as a word, and as a retired word."""

import json
import re
import tomllib
from pathlib import Path

import pytest

from tools import prose
from tools.prose import Report, Word

PAGE = """# A heading of four words

One sentence. Is this another? It says `a or b`, and
goes on here. `f(x)` begins one. llama.cpp begins one, 2.5 times.

| a table | is |
| --- | --- |
| no | sentence |

- An item without an end
- A second item. With two sentences, e.g. this one.

```
code of many words that is none of it a sentence
```

    indented code that is none either

<!-- figures: some -->
Generated figures have no sentences. None at all.
<!-- /figures -->

The last [with a link of seven words](page.md#anchor) here.
"""

MODULE = '''"""A head of a module.

Its second paragraph
goes on.
"""

def wee_rows(x: int) -> str:
    """Counts rows."""
    # It was said of a margin.
    return f"the edge is at {x}" "no docstring at all here"
'''


def word(pattern: str, *parts: str, allowed: tuple[str, ...] = (), identifiers: tuple[str, ...] = ()) -> Word:
    patterns = tuple(re.compile(each) for each in allowed)
    return Word("w", "x", re.compile(pattern), frozenset(parts), patterns, frozenset(identifiers))


def test_sentences_of_a_page_are_those_of_paragraphs_and_items() -> None:
    assert prose.read_markdown(PAGE).sentences == [
        "One sentence.",
        "Is this another?",
        "It says Code, and goes on here.",
        "Code begins one.",
        "llama.cpp begins one, 2.5 times.",
        "An item without an end",
        "A second item.",
        "With two sentences, e.g. this one.",
        "The last with a link of seven words here.",
    ]


def test_a_second_paragraph_of_an_item_is_no_code() -> None:
    page = "1. An item.\n\n    Its second paragraph.\n\nNo item.\n\n    code()\n"
    assert prose.read_markdown(page).sentences == ["An item.", "Its second paragraph.", "No item."]


def test_a_module_has_sentences_in_docstrings_and_prose_in_comments_and_messages() -> None:
    found = prose.read_python(MODULE)
    assert set(found.sentences) == {"A head of a module.", "Its second paragraph goes on.", "Counts rows."}
    texts = " ".join(text for _, text in found.prose)
    assert "said of a margin" in texts
    assert "the edge is at" in texts
    names = {name for _, name in found.identifiers}
    assert {"wee_rows", "x"} <= names
    assert not names & {"said", "edge"}


def test_c_has_prose_in_comments_and_names_outside_of_them() -> None:
    found = prose.read_c('// some rows\nint place = 2; /* said\nagain */ puts("a margin");\n')
    assert [line for line, _ in found.prose] == [1, 2, 3]
    assert {name for _, name in found.identifiers} == {"int", "place", "puts"}


@pytest.mark.parametrize(
    ("sentence", "words"), [("Two words.", 2), ("10 - 4 = 6 tok/s", 4), ("a, b: c", 3), ("– — ·", 0), ("", 0)]
)
def test_a_word_has_a_letter_or_a_digit(sentence: str, words: int) -> None:
    assert prose.count_words(sentence) == words


@pytest.mark.parametrize(
    ("counts", "least"), [([], 0), ([5], 5), (list(range(1, 11)), 9), (list(range(1, 12)), 10)]
)
def test_nine_tenths_do_not_exceed_the_percentile(counts: list[int], least: int) -> None:
    assert prose.percentile_90(counts) == least
    assert sum(count <= least for count in counts) >= 0.9 * len(counts)
    assert not counts or sum(count < least for count in counts) < 0.9 * len(counts)


def test_an_allowed_use_is_no_place() -> None:
    twig = word(r"\btwig\b", "twig", allowed=("git twig",))
    assert twig.in_prose("git twig and a twig") == ["twig"]
    assert twig.in_prose("a git twig") == []


def test_identifiers_are_compared_by_their_parts() -> None:
    wee = word("wee", "wee", identifiers=("wee_of_them",))
    found = [
        name
        for name in ("wee_rows", "WeeRows", "linear_wee", "weer", "askew", "wee_of_them")
        if wee.in_identifier(name)
    ]
    assert found == ["wee_rows", "WeeRows", "linear_wee"]


def test_names_of_tests_are_sentences() -> None:
    wee = word(r"\bwee rows\b", "wee", allowed=("a wee rows",))
    assert wee.in_identifier("test_steps_of_wee_rows")
    assert not wee.in_identifier("test_a_wee_rows_and_wee_columns")


def test_the_table_finds_what_is_retired_and_lets_other_meanings_be() -> None:
    words = {each.name: each for each in prose.load_words()}
    rows = tomllib.loads((prose.ROOT / "tools" / "prose.toml").read_text())["word"]
    for row in rows:
        word = words[row["name"]]
        assert word.in_prose(row["example"]) if "example" in row else word.parts, word.name
        assert not word.in_prose(prose.plain(row.get("fine", ""))), word.name
    assert words["rounds"].in_identifier("RoundSizes")
    assert not words["rounds"].in_identifier("round")
    assert not words["rounds"].in_identifier("rounding")


@pytest.mark.parametrize(
    ("path", "room"),
    [
        ("src/coldstream/models/cuda/runner.py", "models"),
        ("src/coldstream/files.py", "coldstream"),
        ("docs/notes/a.md", "docs"),
        ("README.md", "."),
    ],
)
def test_rooms_are_folders_of_the_package(path: str, room: str) -> None:
    assert prose.room(path) == room


def test_long_sentences_and_retired_words_fail_a_check(tmp_path: Path) -> None:
    short, long = "word " * prose.MAX_WORDS + ".", "word " * (prose.MAX_WORDS + 1) + "."
    (tmp_path / "short.md").write_text(short)
    (tmp_path / "long.md").write_text(f"{long}\n\nSaid it.")
    report = prose.measure(tmp_path, ["short.md", "long.md"], [word("Said")])
    assert prose.failures(prose.measure(tmp_path, ["short.md"], [word("Said")])) == []
    assert prose.failures(report) == [
        f".: 90th percentile {prose.MAX_WORDS + 1} words",
        f"long.md: 90th percentile {prose.MAX_WORDS + 1} words",
        "w: 1 places",
    ]
    assert report.long == [("long.md", long)]
    figures = json.loads(prose.as_json(report))
    assert figures["pages"]["long.md"] == {
        "sentences": 2,
        "p90": prose.MAX_WORDS + 1,
        "longest": prose.MAX_WORDS + 1,
    }
    assert figures["retired"] == {"w": {".": 1}}


def test_file_names_are_read_too(tmp_path: Path) -> None:
    (tmp_path / "wee_rows.py").write_text("x = 1\n")
    report: Report = prose.measure(tmp_path, ["wee_rows.py"], [word("zzz", "wee")])
    assert [place.text for place in report.found] == ["wee_rows"]


def test_it_reads_every_kind_of_file_in_every_room() -> None:
    of_kind = {(prose.room(path), Path(path).suffix): path for path in prose.tracked()}
    report = prose.measure(prose.ROOT, sorted(of_kind.values()), prose.load_words())
    assert {"models", "engine", "docs", "tests"} <= report.by_room().keys()
    assert {".py", ".md", ".cu", ".cuh", ".h", ".cpp"} <= {suffix for _, suffix in of_kind}


def test_an_unknown_word_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        prose.main(["--places", "nothing"])
    assert "no retired word is named nothing" in capsys.readouterr().err
