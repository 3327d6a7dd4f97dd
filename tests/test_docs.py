"""The figures in the pages are those of the result files, and what pages name is there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import coldstream

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md")), *sorted((ROOT / "tools").rglob("*.md"))]
LINK = re.compile(r"\]\(([^)\s]+)\)")
NAMES_OF_TESTS = re.compile(r"^(?:async )?def (test_\w+)\(", re.MULTILINE)


def test_every_figure_in_the_pages_is_generated() -> None:
    command = [sys.executable, "-m", "bench.report", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}: run python -m bench.report"


def anchors(page: Path) -> set[str]:
    """Of the headings of a page, as GitHub makes them: no marks, links or punctuation, spaces as hyphens."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    plain = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in headings)
    return {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_of_a_page_leads_to_a_file_and_a_heading(page: Path) -> None:
    text = re.sub(r"^```.*?^```|`[^`\n]*`", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for link in LINK.findall(text):
        if re.match(r"\w+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_every_note_begins_with_a_table_and_the_first_page_lists_it() -> None:
    notes = DOCS / "notes"
    listed = re.findall(r"^\| \[[\w-]+\]\(([\w-]+\.md)\) \|", (notes / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(page.name for page in notes.glob("*.md") if page.name != "README.md")
    for name in listed:
        head = (notes / name).read_text().partition("\n## ")[0]
        assert "\n| --- |" in head or name == "aims.md", name


def test_the_python_reference_has_every_public_name_once() -> None:
    names = re.findall(r"^\.\. auto\w+:: coldstream\.(\w+)$", (DOCS / "api.md").read_text(), re.MULTILINE)
    assert sorted(names) == sorted({*coldstream.__all__} - {"__version__"})


def test_the_glossary_has_thirty_terms_at_most() -> None:
    rows = [line for line in (DOCS / "glossary.md").read_text().splitlines() if line.startswith("| ")][2:]
    assert 20 < len(rows) <= 30
    assert len({row.split("|")[1] for row in rows}) == len(rows)


def test_every_statement_of_speculation_has_a_test_of_its_name() -> None:
    _, _, section = (DOCS / "testing.md").read_text().partition("## Names of tests of speculation")
    names = re.findall(r"^\| `((?:sp|trap_)\w+)` \|", section.partition("\n## ")[0], re.MULTILINE)
    tests = [
        name for path in ROOT.glob("tests/*/**/*.py") for name in NAMES_OF_TESTS.findall(path.read_text())
    ]
    assert len(names) == 26
    for name in names:
        assert any(f"_{name}_" in test for test in tests), name
