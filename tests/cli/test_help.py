"""`coldstream help`: every page, as the file has it, and laid out on a terminal."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from terminals import Terminal, without_controls

from coldstream.cli import help as help_module
from coldstream.errors import ColdstreamError

Run = Callable[..., tuple[int, str, str]]
DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(path for path in DOCS.glob("*.md") if path.stem not in {"index", "api", "result_files"})


def test_all_pages_are_listed_by_their_titles(run: Run) -> None:
    code, out, error = run("help")
    assert (code, error) == (0, "")
    listed = dict(line.split(maxsplit=1) for line in out.splitlines()[3:])
    titles = {page.stem: page.read_text().partition("\n")[0].removeprefix("# ") for page in PAGES}
    assert listed == titles


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_is_printed_as_the_file_has_it(run: Run, page: Path) -> None:
    assert run("help", page.stem) == (0, page.read_text(), "")


def test_a_command_has_its_options_for_a_page(run: Run) -> None:
    code, out, error = run("help", "convert-drafter")
    assert (code, error) == (0, "")
    assert out == run("convert-drafter", "--help")[1]


@pytest.mark.parametrize(
    ("topic", "advice"), [("servers", "did you mean server?"), ("zzz", "there are agents, ")]
)
def test_an_unknown_topic_is_wrong_usage(run: Run, topic: str, advice: str) -> None:
    code, out, error = run("help", topic)
    assert (code, out) == (2, "")
    assert f"no page {topic}: {advice}" in error


@pytest.mark.sharded(of="processes")
def test_a_terminal_shows_a_page_laid_out(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "coldstream", "help", "glossary"]
    with Terminal(command, home=str(tmp_path), columns=70, environment={"PAGER": "cat"}) as terminal:
        terminal.read_to_the_end()
    shown = without_controls(terminal.screen)
    title = (DOCS / "glossary.md").read_text().partition("\n")[0]
    assert title.removeprefix("# ") in shown
    assert title not in shown
    assert max(map(len, shown.splitlines())) <= 70


def test_an_installed_package_has_its_own_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "coldstream"
    (package / "docs").mkdir(parents=True)
    monkeypatch.setattr(help_module, "__file__", str(package / "cli" / "help.py"))
    with pytest.raises(ColdstreamError, match=r"coldstream/docs has no pages: install coldstream again"):
        help_module.pages()
    (package / "docs" / "one.md").write_text("# One\n\nText.\n")
    assert help_module.pages() == {"one": package / "docs" / "one.md"}


def test_the_list_names_the_website_that_the_package_declares(run: Run, tmp_path: Path) -> None:
    package = tmp_path / "coldstream-1.dist-info"
    package.mkdir()
    facts = "Metadata-Version: 2.1\nName: coldstream\nVersion: 1\nProject-URL: Issues, http://a/\n"
    (package / "METADATA").write_text(facts + "Project-URL: Documentation, http://b/\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})"
    code += "; from coldstream.cli.main import main; main(['help'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("\n\nthe same pages as a website: http://b/\n")
    assert "website: http" not in run("help")[1]


def test_a_list_of_pages_costs_no_model_and_no_network() -> None:
    code = "import sys; from coldstream.cli.main import main; main(['help']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
