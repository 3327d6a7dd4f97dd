"""The report for others: what the issue form asks for, and nothing that says whose machine it is."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import click
import pytest
import yaml

from builders import write_gguf
from coldstream.cli.doctor import finding_lines, summary
from coldstream.cli.rig_report import Figure, RigReport, given_settings, render
from coldstream.planning.diagnosis import find
from machine_facts import SOUND

Run = Callable[..., tuple[int, str, str]]
FORM = Path(__file__).parents[2] / ".github" / "ISSUE_TEMPLATE" / "rig.yml"


def report(**changed: object) -> RigReport:
    figures = (Figure("tg128", "12.00 ± 0.10 tok/s", "14.0 tok/s"), Figure("pp10", "99.00 tok/s", ""))
    values = {"verb": "bench", "settings": (), "model": "a model", "figures": figures, "notes": ()}
    return RigReport(**{**values, "document": '{"a": 1}', **changed})


def shown(made: RigReport) -> str:
    return render(made, summary(SOUND), finding_lines(find(SOUND), None))


def test_a_page_has_a_section_for_each_thing() -> None:
    page = shown(report(settings=("vram 6G", "n_gen 128"), notes=("first", "second")))
    titles = re.findall(r"^### (.*)$", page, re.MULTILINE)
    assert titles == ["Machine", "Model", "Settings", "Figures", "Notes", "JSON"]
    assert "GPU 0             Example GPU, 8.00 GiB, compute capability 8.9" in page
    assert "nothing to mend" in page
    assert "`bench`: vram 6G, n_gen 128" in page
    assert re.search(r"^\| tg128 +\| 12.00 ± 0.10 tok/s \| +14.0 tok/s \|$", page, re.MULTILINE)
    assert "- first\n- second\n" in page


def test_without_settings_and_notes_it_says_so() -> None:
    page = shown(report())
    assert "`bench`: defaults" in page
    assert "### Notes\n\nnone\n" in page


def test_no_home_and_no_user_is_in_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ann")
    page = shown(report(notes=("not run: /home/ann/models/x.gguf cannot be read",), model="/home/ann/y"))
    assert "/home/ann" not in page
    assert "not run: ~/models/x.gguf" in page


def test_bench_writes_one(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    model = str(write_gguf(tmp_path / "tiny.gguf")[0])
    path = tmp_path / "report.md"
    arguments = ("-p", "168", "-n", "4", "-d", "0,8", "-r", "1", "--device", "cpu")
    code, out, _ = run("bench", model, *arguments, "--report", str(path), "--json")
    assert code == 0
    page = path.read_text()
    assert json.loads(page.split("```json\n")[1].split("\n```")[0]) == json.loads(out)
    rows = re.findall(r"^\| (\S.*?) *\| +\S+ ± \S+ tok/s \| *(.*?) \|$", page, re.MULTILINE)
    forecasts = dict(rows)
    assert list(forecasts) == ["pp168", "pp168 @ d8", "tg4", "tg4 @ d8"]
    assert {name for name, forecast in forecasts.items() if not forecast} == {"pp168 @ d8"}
    assert forecasts["tg4"] != forecasts["pp168"]
    assert "`bench`: n_prompt 168, n_gen 4, n_depth 0,8, repetitions 1, device cpu" in page
    assert "decode reads" in page
    assert not any(word in page for word in (str(tmp_path), "hf_secret", os.environ["HF_TOKEN"]))


def test_the_form_asks_for_the_commands_that_write_one() -> None:
    form = yaml.safe_load(FORM.read_text())
    fields = {each["id"]: each["attributes"] for each in form["body"] if "id" in each}
    assert "coldstream bench MODEL" in fields["report"]["description"]
    assert "coldstream verify MODEL" in fields["report"]["description"]
    assert FORM.read_text().count("--report") == 2


def test_a_file_that_an_option_names_goes_by_its_last_part() -> None:
    parameters = [click.Option(["--plan"]), click.Option(["--threads"], default=2), click.Argument(["model"])]
    command = click.Command("bench", params=parameters)
    with command.make_context("bench", ["--plan", "/data/ann/a.json", "/data/ann/model.gguf"]) as context:
        assert given_settings(context) == ("plan a.json",)
