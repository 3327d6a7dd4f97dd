"""`run` without a model drafts with the bundled drafter, if the installation has one."""

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from coldstream.assets import demo_model_path
from coldstream.cli import model_argument
from coldstream.cli.model_argument import with_bundled_drafter
from coldstream.engine import EngineConfig
from dflash_cases import ALL_SLIDING, config, random_tensors, spec_of, write_gguf_drafter

Run = Callable[..., tuple[int, str, str]]
ON_CPU = EngineConfig(str(demo_model_path()), device="cpu")


@pytest.fixture
def drafter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of random weights, where the installation has its own."""
    values = config(
        True, **ALL_SLIDING, hidden_size=256, vocab_size=6144, num_target_layers=8, is_causal=True
    )
    values["dflash_config"] |= {"target_layer_ids": [1, 7], "mask_token_id": 6141}
    spec = spec_of(values)
    path = write_gguf_drafter(tmp_path / "demo-drafter.gguf", spec, random_tensors(spec))
    monkeypatch.setattr(model_argument, "demo_drafter_path", lambda: path)
    return path


@pytest.fixture
def no_input(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with open(os.devnull) as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        yield


@pytest.mark.usefixtures("no_input")
def test_run_drafts_with_it_and_answers_as_without(drafter: Path, run: Run) -> None:
    arguments = ("run", "-p", "def read_lines(path):", "-n", "48", "--seed", "3", "--device", "cpu")
    code, found, notes = run(*arguments, "--verbose")
    assert code == 0, notes
    assert f"model_draft: {drafter}" in notes
    assert "spec_type: dflash" in notes
    assert "nothing is drafted" not in notes
    assert run(*arguments, "--spec-type", "none")[1] == found
    code, fixed, notes = run(*arguments, "--tree-budget", "5")
    assert (code, fixed) == (0, found)
    assert "tokens a step by dflash" in notes


@pytest.mark.parametrize("spec_type", ["auto", "dflash"])
def test_it_drafts_where_nothing_else_was_named(drafter: Path, spec_type: str) -> None:
    config = replace(ON_CPU, spec_type=spec_type)
    assert with_bundled_drafter(config) == replace(config, model_draft=str(drafter))


@pytest.mark.parametrize(
    "changes",
    [
        {"spec_type": "none"},
        {"spec_type": "ngram"},
        {"spec_type": "mtp"},
        {"model_draft": "another.gguf"},
        {"plan": "saved.plan"},
        {"model": "another.gguf"},
        {"device": "cuda"},
        {"device": "auto", "vram": "1G"},
    ],
)
def test_it_does_not_where_something_else_was(drafter: Path, changes: dict[str, str]) -> None:
    config = replace(ON_CPU, **changes)  # type: ignore[arg-type]
    assert with_bundled_drafter(config) == config


def test_it_does_not_where_it_is_absent(drafter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_argument, "demo_drafter_path", lambda: drafter.with_name("absent"))
    assert with_bundled_drafter(ON_CPU) == ON_CPU
