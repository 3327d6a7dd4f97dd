"""`run` without a model drafts with the bundled drafter, if it is asked for DFlash."""

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from coldstream.assets import demo_drafter_path, demo_model_path
from coldstream.cli import model_argument
from coldstream.cli.model_argument import with_bundled_drafter
from coldstream.engine import EngineConfig

Run = Callable[..., tuple[int, str, str]]
DFLASH = EngineConfig(str(demo_model_path()), device="cpu", spec_type="dflash")


@pytest.fixture
def no_input(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with open(os.devnull) as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        yield


@pytest.mark.sharded(of="processes")
@pytest.mark.usefixtures("no_input")
def test_run_drafts_with_it_if_asked_and_answers_as_without(run: Run) -> None:
    arguments = ("run", "-p", "def read_lines(path):", "-n", "48", "--seed", "3", "--device", "cpu")
    code, plain, notes = run(*arguments, "--verbose")
    assert code == 0, notes
    assert "model_draft: None" in notes
    assert "spec_type: none" in notes
    code, drafted, notes = run(*arguments, "--verbose", "--spec-type", "dflash", "--tree-budget", "5")
    assert (code, drafted) == (0, plain)
    assert f"model_draft: {demo_drafter_path()}" in notes
    assert "tokens a step by dflash" in notes


def test_it_drafts_where_dflash_was_asked_for_without_a_file() -> None:
    assert with_bundled_drafter(DFLASH) == replace(DFLASH, model_draft=str(demo_drafter_path()))


@pytest.mark.parametrize(
    "changes",
    [
        {"spec_type": "auto"},
        {"spec_type": "none"},
        {"spec_type": "ngram"},
        {"spec_type": "mtp"},
        {"model_draft": "another.gguf"},
        {"plan": "saved.plan", "spec_type": "auto"},
        {"model": "another.gguf"},
    ],
)
def test_it_does_not_otherwise(changes: dict[str, str]) -> None:
    config = replace(DFLASH, **changes)  # type: ignore[arg-type]
    assert with_bundled_drafter(config) == config


def test_it_does_not_where_it_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = demo_drafter_path().with_name("absent")
    monkeypatch.setattr(model_argument, "demo_drafter_path", lambda: absent)
    assert with_bundled_drafter(DFLASH) == DFLASH
