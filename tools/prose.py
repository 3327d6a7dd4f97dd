"""Measures sentences of docs and docstrings, and finds words that this project has retired.

    python -m tools.prose                 words a sentence by room and by page, and retired words by room
    python -m tools.prose --places WORD   where a retired word stands
    python -m tools.prose --long          the sentences of more than 28 words, by file
    python -m tools.prose --check         exit 1 above 28 words at the 90th percentile, or with a retired word
    python -m tools.prose --json          the same figures for programs

A sentence ends at a full stop, a question mark, a paragraph's or a list item's end. Code, tables, headings
and generated figures are no sentences. Code within a line counts as one word. The words are in
tools/prose.toml.
"""

import argparse
import ast
import json
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parent.parent
MAX_WORDS: Final = 28  # of a sentence, at the 90th percentile
LANGUAGES: Final = {".py": "Python", ".md": "Markdown"} | dict.fromkeys(
    (".h", ".cpp", ".inl", ".cu", ".cuh"), "C"
)

_ABBREVIATION: Final = re.compile(r"\b(e\.g|i\.e|cf|vs|etc|resp|approx|no|fig|eq|al)\.$", re.IGNORECASE)
_END: Final = re.compile(r"[.!?][)\"'*”]*(?=\s|$)")
_GOES_ON: Final = re.compile(r"[a-z]+[,;:)]*(\s|$)")  # a plain word without a capital is no beginning
_ITEM: Final = re.compile(r"\s*(?:[-*+]|\d+[.)])\s+")
_PART: Final = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
_C_TEXT: Final = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)
_NAME: Final = re.compile(r"\b[A-Za-z_]\w*\b")
# Of a module that can be parsed: strings, which are left out, comments and names.
_PYTHON_TOKEN: Final = re.compile(
    r'''[rbfuRBFU]{0,2}("""|\'\'\'|"|\')(?:\\.|.)*?\1|(?P<comment>#[^\n]*)|(?P<name>\b[^\W\d]\w*)''',
    re.DOTALL,
)


@dataclass(frozen=True)
class Word:
    """A retired word: what to say instead, how it shows, and where it may stand."""

    name: str
    say: str
    prose: re.Pattern[str]
    parts: frozenset[str]
    allowed: tuple[re.Pattern[str], ...]
    identifiers: frozenset[str]

    def in_prose(self, text: str) -> list[str]:
        """Every match that no allowed use covers."""
        matches = list(self.prose.finditer(text))
        if not matches:
            return []
        free = [match.span() for pattern in self.allowed for match in pattern.finditer(text)]
        return [
            match[0]
            for match in matches
            if not any(start <= match.start() and match.end() <= end for start, end in free)
        ]

    def in_identifier(self, identifier: str) -> bool:
        """Whether one of its parts is the word, or the sentence that a test's name is has it."""
        if identifier.startswith("test_"):
            return bool(self.in_prose(identifier.replace("_", " ")))
        return identifier not in self.identifiers and not self.parts.isdisjoint(parts_of(identifier))


@cache
def parts_of(identifier: str) -> frozenset[str]:
    """The words of an identifier, in small letters: `few_rows` and `FewRows` have two."""
    return frozenset(part.lower() for part in _PART.findall(identifier))


@dataclass(frozen=True)
class Source:
    """What a file says: its sentences (of docs and docstrings alone), all of its prose, and its identifiers.

    prose: pairs of a line number and a text.
    """

    sentences: list[str] = field(default_factory=list)
    prose: list[tuple[int, str]] = field(default_factory=list)
    identifiers: list[tuple[int, str]] = field(default_factory=list)


@dataclass(frozen=True)
class Place:
    """Where a retired word stands, and as what."""

    word: str
    path: str
    line: int
    text: str
    is_identifier: bool


def load_words(path: Path = ROOT / "tools" / "prose.toml") -> list[Word]:
    """The table of retired words."""
    rows = tomllib.loads(path.read_text())["word"]
    return [
        Word(
            name=row["name"],
            say=row["say"],
            prose=re.compile(row["prose"], re.IGNORECASE),
            parts=frozenset(row.get("parts", ())),
            allowed=tuple(re.compile(each, re.IGNORECASE) for each in row.get("allowed", ())),
            identifiers=frozenset(row.get("identifiers", ())),
        )
        for row in rows
    ]


def count_words(sentence: str) -> int:
    """Words with a letter or a digit, separated by space."""
    return sum(any(map(str.isalnum, word)) for word in sentence.split())


def percentile_90(counts: Sequence[int]) -> int:
    """The least count that nine tenths of all do not exceed; 0 of none."""
    return sorted(counts)[-(-len(counts) * 9 // 10) - 1] if counts else 0


def split_sentences(paragraph: str) -> list[str]:
    """The sentences of one paragraph."""
    found, start = [], 0
    for match in _END.finditer(paragraph):
        rest = paragraph[match.end() :].lstrip()
        if _GOES_ON.match(rest) or _ABBREVIATION.search(paragraph[start : match.end()].rstrip(")\"'*”")):
            continue
        found.append(paragraph[start : match.end()])
        start = match.end()
    found.append(paragraph[start:])
    return [sentence.strip() for sentence in found if count_words(sentence)]


def paragraphs(text: str) -> Iterator[str]:
    """Paragraphs and list items of Markdown or of a docstring, without code, tables, headings and figures."""
    text = re.sub(r"<!-- figures: .*?<!-- /figures -->|<!--.*?-->", "\n\n", text, flags=re.DOTALL)
    text = re.sub(r"^([ \t]*)```.*?^\1```[^\n]*$", "\n\n<code>\n\n", text, flags=re.MULTILINE | re.DOTALL)
    lines: list[str] = []
    in_list = False
    for line in [*text.splitlines(), ""]:
        item = _ITEM.match(line)
        is_code = line.startswith("    ") and not lines and not in_list and not item
        if item or not line.strip() or is_code or line.startswith(("#", "|", "<")):
            if lines:
                yield plain(" ".join(lines))
            lines = [line[item.end() :]] if item else []
            in_list = bool(item) or (in_list and not line.strip())
        else:
            in_list = in_list and line.startswith(" ")
            lines.append(line.strip())


def plain(text: str) -> str:
    """Without marks: code within a line is one word, a link is its text."""
    text = re.sub(r"``[^`]*``|`[^`]*`", "Code", text)
    text = re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", text)
    return text.replace("**", "").strip()


def read_markdown(text: str) -> Source:
    """A page."""
    found = [sentence for paragraph in paragraphs(text) for sentence in split_sentences(paragraph)]
    without_code = re.sub(
        r"^```.*?^```|`[^`\n]*`|\]\([^)]*\)|<!-- .*? -->",
        lambda match: "\n" * match[0].count("\n"),
        text,
        flags=re.MULTILINE | re.DOTALL,
    )
    return Source(found, list(enumerate(without_code.splitlines(), 1)))


def read_python(text: str) -> Source:
    """A module: docstrings have sentences; comments and messages are prose too."""
    found = Source()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if docstring := ast.get_docstring(node):
                found.sentences.extend(
                    sentence for each in paragraphs(docstring) for sentence in split_sentences(each)
                )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.count(" ") > 1:
            found.prose.append((node.lineno, plain(node.value)))
    line, end = 1, 0
    for token in _PYTHON_TOKEN.finditer(text):
        line, end = line + text.count("\n", end, token.start()), token.start()
        if token["comment"]:
            found.prose.append((line, plain(token["comment"])))
        elif token["name"]:
            found.identifiers.append((line, token["name"]))
    return found


def read_c(text: str) -> Source:
    """C++ or CUDA: comments and strings are prose, the rest is identifiers."""
    found = Source()
    for match in _C_TEXT.finditer(text):
        found.prose.append((text.count("\n", 0, match.start()) + 1, plain(match[0])))
    code = _C_TEXT.sub(lambda match: "\n" * match[0].count("\n"), text)
    for number, line in enumerate(code.splitlines(), 1):
        found.identifiers.extend((number, name) for name in _NAME.findall(line))
    return found


READERS: Final = {"Markdown": read_markdown, "Python": read_python, "C": read_c}


def room(path: str) -> str:
    """The room of a file: a folder of the package, or the outer folder."""
    parts = path.split("/")
    if path.startswith("src/coldstream/"):
        return parts[2] if len(parts) > 3 else "coldstream"
    return parts[0] if len(parts) > 1 else "."


def tracked(root: Path = ROOT) -> list[str]:
    """The files under version control that this program can read."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True)
    paths = sorted(path for path in done.stdout.splitlines() if (root / path).is_file())
    return [path for path in paths if Path(path).suffix in LANGUAGES]


def places(path: str, source: Source, words: Sequence[Word], known: dict[str, list[str]]) -> list[Place]:
    """Where retired words stand in one file, its name included. known: identifiers with theirs, so far."""
    found = [
        Place(word.name, path, line, match, False)
        for word in words
        for line, text in source.prose
        for match in word.in_prose(text)
    ]
    names = [(0, Path(path).stem), *source.identifiers]
    for name in {name for _, name in names} - known.keys():
        known[name] = [word.name for word in words if word.in_identifier(name)]
    return found + [Place(word, path, line, name, True) for line, name in names for word in known[name]]


@dataclass
class Report:
    """Words of each sentence by file, sentences above the limit, and places of retired words."""

    counts: dict[str, list[int]] = field(default_factory=dict)
    long: list[tuple[str, str]] = field(default_factory=list)  # path and sentence
    found: list[Place] = field(default_factory=list)

    def by_room(self) -> dict[str, list[int]]:
        """Words of each sentence by room."""
        rooms: dict[str, list[int]] = {}
        for path, counts in self.counts.items():
            rooms.setdefault(room(path), []).extend(counts)
        return rooms

    def pages(self) -> dict[str, list[int]]:
        """The same of every page of Markdown."""
        return {path: counts for path, counts in self.counts.items() if path.endswith(".md")}


def measure(root: Path, paths: Sequence[str], words: Sequence[Word]) -> Report:
    """Reads the files."""
    report, known = Report(), dict[str, list[str]]()
    for path in paths:
        source = READERS[LANGUAGES[Path(path).suffix]]((root / path).read_text())
        if source.sentences:
            report.counts[path] = [count_words(sentence) for sentence in source.sentences]
            report.long += [(path, each) for each in source.sentences if count_words(each) > MAX_WORDS]
        report.found.extend(places(path, source, words, known))
    return report


def failures(report: Report) -> list[str]:
    """What --check objects to: rooms and pages with long sentences, and retired words."""
    groups = report.by_room() | report.pages()
    long = {name: percentile_90(counts) for name, counts in groups.items()}
    found = [f"{name}: 90th percentile {words} words" for name, words in long.items() if words > MAX_WORDS]
    retired = Counter(place.word for place in report.found)
    return found + [f"{word}: {count} places" for word, count in retired.items()]


def print_report(report: Report, words: Sequence[Word]) -> None:
    """Two tables for people."""
    for title, groups in (("room", report.by_room()), ("page", report.pages())):
        print(f"{title:44} sentences  p90  longest")
        for name, counts in sorted(groups.items(), key=lambda pair: -percentile_90(pair[1])):
            print(f"{name:44} {len(counts):9} {percentile_90(counts):4} {max(counts):8}")
        print()
    print(f"{'retired word':20} {'prose':>6} {'names':>6}  say instead")
    for word in words:
        those = [place for place in report.found if place.word == word.name]
        names = sum(place.is_identifier for place in those)
        print(f"{word.name:20} {len(those) - names:6} {names:6}  {word.say}")


def as_json(report: Report) -> str:
    """The same for programs: figures by room and page, and retired words by room."""
    retired: dict[str, dict[str, int]] = {}
    for place in report.found:
        by_room = retired.setdefault(place.word, {})
        by_room[room(place.path)] = by_room.get(room(place.path), 0) + 1
    groups = {"rooms": report.by_room(), "pages": report.pages()}
    figures = {
        title: {
            name: {"sentences": len(counts), "p90": percentile_90(counts), "longest": max(counts)}
            for name, counts in group.items()
        }
        for title, group in groups.items()
    }
    return json.dumps({**figures, "retired": retired}, indent=1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("paths", nargs="*", help="files below the root; all that are tracked otherwise")
    parser.add_argument("--check", action="store_true", help="exit 1 if anything is too long or retired")
    parser.add_argument("--json", action="store_true", help="print figures as JSON")
    parser.add_argument("--long", action="store_true", help="print the sentences of too many words")
    parser.add_argument("--places", metavar="WORD", help="print where a retired word stands")
    options = parser.parse_args(arguments)
    words = load_words()
    if options.places and options.places not in {word.name for word in words}:
        parser.error(f"no retired word is named {options.places}: {', '.join(word.name for word in words)}")
    report = measure(ROOT, options.paths or tracked(), words)
    if options.places:
        for place in report.found:
            if place.word == options.places:
                print(f"{place.path}:{place.line}: {place.text}")
    elif options.long:
        for path, sentence in report.long:
            print(f"{path}: {sentence}")
    elif options.check:
        print("\n".join(failures(report)))
        return int(bool(failures(report)))
    elif options.json:
        print(as_json(report))
    else:
        print_report(report, words)
    return 0


if __name__ == "__main__":
    sys.exit(main())
