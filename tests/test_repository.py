"""What a visitor of the repository finds: workflows that call `make`, forms that name what exists."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from coldstream.cli.main import VERBS
from coldstream.gguf.quant_types import QuantType

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
COMES_WITH_OTHERS = {"anyio", "h11", "pydantic", "pydantic_core", "starlette"}  # with FastAPI and uvicorn
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z][\w-]*):(?!=)", MAKEFILE, re.MULTILINE))


def jobs(workflow: Path) -> dict[str, dict[str, Any]]:
    return yaml.safe_load(workflow.read_text())["jobs"]


def steps(workflow: Path) -> Iterator[dict[str, Any]]:
    for job in jobs(workflow).values():
        yield from job.get("steps", ())


def test_there_are_workflows_for_tests_wheels_docs_and_publishing() -> None:
    assert {path.stem for path in WORKFLOWS} >= {"tests", "wheels", "docs", "publish"}


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_targets_of_the_makefile_alone(workflow: Path) -> None:
    for step in steps(workflow):
        if "run" not in step:
            assert re.fullmatch(r"[\w./-]+@[\w./-]+", step["uses"])
            continue
        program, *words = step["run"].split()
        assert program == "make"
        settings = {word.partition("=")[0] for word in words if "=" in word}
        assert {word for word in words if "=" not in word} <= TARGETS
        assert all(f"$({name})" in MAKEFILE for name in settings)


def test_each_phony_target_has_a_rule_and_so_has_each_that_the_pages_name() -> None:
    """A phony target without a rule does nothing, and succeeds."""
    (phony,) = re.findall(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)
    assert set(phony.split()) <= TARGETS
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        named = set(
            re.findall(
                r"`make ((?:[a-z][\w-]*|[A-Z]+=\S+)(?: (?:[a-z][\w-]*|[A-Z]+=\S+))*)`", page.read_text()
            )
        )
        assert {word for command in named for word in command.split() if "=" not in word} <= TARGETS, page


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_a_job_that_builds_has_the_tags_of_the_repository(workflow: Path) -> None:
    for step in steps(workflow):
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"]["fetch-depth"] == 0


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_knows_no_secret_and_writes_only_to_publish(workflow: Path) -> None:
    assert "secrets." not in workflow.read_text()
    assert yaml.safe_load(workflow.read_text())["permissions"] == {"contents": "read"}
    writing = {name for name, job in jobs(workflow).items() if "write" in job.get("permissions", {}).values()}
    assert writing <= {"publish", "deploy"}


def test_a_release_is_made_of_what_the_wheels_workflow_built() -> None:
    (publish,) = (path for path in WORKFLOWS if path.stem == "publish")
    build, upload = jobs(publish)["wheels"], jobs(publish)["publish"]
    assert (ROOT / build["uses"]).is_file()
    assert upload["needs"] == "wheels"
    (kept,) = (step for step in steps(ROOT / build["uses"]) if "upload-artifact" in step.get("uses", ""))
    (fetched,) = (step for step in upload["steps"] if "download-artifact" in step["uses"])
    assert kept["with"]["name"] == fetched["with"]["name"]


@pytest.mark.parametrize("form", FORMS, ids=lambda path: path.stem)
def test_a_form_asks_for_commands_that_exist(form: Path) -> None:
    verbs = set(re.findall(r"`coldstream ([a-z][\w-]*)", form.read_text()))
    assert verbs <= set(VERBS)


def test_the_citation_names_the_project_and_its_licence() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["title"].startswith(PROJECT["name"])
    assert citation["license"] == PROJECT["license"]
    assert set(citation["keywords"]) <= set(PROJECT["keywords"])


def test_the_changelog_begins_with_what_is_not_released() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert headings[0] == "Unreleased"
    assert all(re.fullmatch(r"\d+\.\d+\.\d+ \(\d{4}-\d\d-\d\d\)", heading) for heading in headings[1:])


def test_the_types_with_new_bits_are_types_of_weights() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    (names,) = re.findall(r"fourteen types give other tokens [^:]*: ([^.]*)\.", text)
    found = re.split(r",\s+|\s+and\s+", names)
    assert len(found) == 14
    assert {QuantType[name] for name in found}


def test_the_extra_serve_is_an_empty_name() -> None:
    assert PROJECT["optional-dependencies"]["serve"] == []


def test_what_the_package_imports_is_an_ordinary_dependency() -> None:
    asked = {re.split("[<>=]", each)[0].replace("-", "_") for each in PROJECT["dependencies"]}
    foreign = imported_by("src/coldstream/server") | imported_by("src/coldstream/engine")
    assert {"fastapi", "llguidance"} <= foreign <= asked | COMES_WITH_OTHERS


def imported_by(folder: str) -> set[str]:
    """Packages that the files of a folder import, other than this one and Python's own."""
    found = set()
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module.partition(".")[0])
    return found - set(sys.stdlib_module_names) - {PROJECT["name"]}
